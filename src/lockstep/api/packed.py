"""Attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from lockstep.api.shared import VarlenOptions, run
from lockstep.call import ops
from lockstep.options import MAX_REACH, rounded_bound
from lockstep.problem import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    constant_time: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of different lengths, packed one after another without padding.

    Sequence b has the queries `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` and the keys
    `cu_seqlens_k[b]` to `cu_seqlens_k[b + 1]`, and gets what `attention` would give it alone.
    Differentiable in q, k, v and sinks, through lse as well: once, in reverse mode.

    With a `page_table`, keys and values come out of a paged cache instead: what a serving engine
    calls for a batch of prompts, chunks of prompts and single tokens. Each sequence then gets what
    `attention_paged` would give it alone. For inference: asking for a gradient raises
    NotImplementedError. A batch of single tokens alone is faster as `attention_paged`. It has the
    same bits there if the same kernel runs both: on Hopper GPUs, name `kernel="triton"` for that.

    Args:
        q: [Tq, Hq, D]
        k: [Tk, Hkv, D]; with a page_table [n_pages, page, Hkv, D]. Pages may be any view with these
            dims, such as one half of a cache that has keys and values side by side.
        v: [Tk, Hkv, Dv]; with a page_table [n_pages, page, Hkv, Dv].
        cu_seqlens_q: [B + 1] int32 or int64, from 0 to Tq, never decreasing.
        cu_seqlens_k: [B + 1] int32 or int64, from 0 to Tk, never decreasing. None with a
            page_table.
        page_table: [B, max_pages] int32 or int64, as for `attention_paged`.
        kv_lens: [B] int32 or int64: the keys of each sequence with a page_table, its queries being
            the last ones; None without one.
        kv_starts: [B] int32 or int64, with a page_table: as for `attention_paged`.
        max_seqlen_q: 0 or more, if the caller knows that no sequence has more queries than this. It
            changes no bit. If it is small, a call with a page_table launches fewer kernels on
            Hopper GPUs, none for long sequences; elsewhere nothing changes. A sequence with more
            queries raises on the CPU. On a GPU, where looking at lengths would wait for the device,
            its rows of out and lse may be NaN, and others are as they should be.

    Wrong offsets raise on the CPU. On a GPU, where looking at them would wait for the device, they
    raise with LOCKSTEP_CHECK=1 in the environment. Without it, sequences that begin or end at a
    wrong offset are NaN, with their gradients, and others are as they should be: the first offset
    is wrong unless it is 0, another one if it is out of range or less than one before it that is
    not. Rows and keys after the last offset, which belong to no sequence, are NaN too.

    The other arguments are those of `attention`.

    Returns:
        out [Tq, Hq, Dv], and with `return_lse` the pair `(out, lse)` with lse [Tq, Hq].

    Raises:
        ValueError, TypeError: An argument does not fit; the message names it.
        NotImplementedError: No kernel runs this; the message has the reason of each.

    Example:
        >>> q, k, v = torch.randn(3, 300, 8, 64)
        >>> offsets = torch.tensor([0, 100, 300])
        >>> lockstep.attention_varlen(q, k, v, offsets, offsets, causal=True).shape
        torch.Size([300, 8, 64])

        A prompt of 5 tokens and one new token of a sequence of 20, from pages of 16:

        >>> cache = torch.randn(10, 16, 8, 2 * 64)
        >>> k, v = cache.split(64, dim=-1)
        >>> table, lens = torch.tensor([[3, -1], [7, 1]]), torch.tensor([5, 20])
        >>> offsets = torch.tensor([0, 5, 6])
        >>> lockstep.attention_varlen(
        ...     torch.randn(6, 8, 64), k, v, offsets, page_table=table, kv_lens=lens, causal=True
        ... ).shape
        torch.Size([6, 8, 64])

        One new token of each of these sequences, as the caller knows:

        >>> offsets, options = torch.tensor([0, 1, 2]), {"causal": True, "max_seqlen_q": 1}
        >>> lockstep.attention_varlen(
        ...     torch.randn(2, 8, 64), k, v, offsets, page_table=table, kv_lens=lens, **options
        ... ).shape
        torch.Size([2, 8, 64])
    """
    if max_seqlen_q is not None:
        max_seqlen_q = _bound_of_call(max_seqlen_q, q, page_table)
    option_arguments = (
        causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel,
        constant_time, False, max_seqlen_q,
    )  # fmt: skip
    given = (
        q, k, v, None, sinks, kv_lens, cu_seqlens_q, cu_seqlens_k, page_table, kv_starts,
        alibi_slopes,
    )  # fmt: skip
    operator = ops.attention_varlen if page_table is None else ops.attention_varlen_paged
    return run(operator, given, option_arguments, window, return_lse, kernel)


def _bound_of_call(max_seqlen_q: Any, q: Any, page_table: Any) -> Any:
    """The bound that a call goes on with: on a GPU one that many calls share, or None where no
    kernel has a use for it; what is no bound stays, to be refused. On the CPU lengths are compared
    with the bound as it is."""
    is_bound = isinstance(max_seqlen_q, int) and not isinstance(max_seqlen_q, bool)
    if not (is_bound and 0 <= max_seqlen_q <= MAX_REACH and getattr(q, "is_cuda", False)):
        return max_seqlen_q
    return None if page_table is None else rounded_bound(max_seqlen_q)
