"""Attention out of a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from lockstep.api.shared import PagedOptions, run
from lockstep.call import ops
from lockstep.problem import Window, pad_bias

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    constant_time: bool = False,
    secret_lengths: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention out of a paged cache: decode (Sq = 1) and chunked prefill (Sq > 1).

    Key i of sequence b is `k_pages[page_table[b, i // page], i % page]`. The queries are the last
    Sq positions of their sequence, so `causal=True` lets the last one see all `kv_lens[b]` keys.
    For inference: asking for a gradient raises NotImplementedError.

    Args:
        q: [B, Hq, Sq, D]
        k_pages: [n_pages, page, Hkv, D]
        v_pages: [n_pages, page, Hkv, Dv]
        page_table: [B, max_pages] int32 or int64. Only the entries that kv_lens reaches are
            looked at. As for kv_lens, a wrong one raises on the CPU. On a GPU, where looking at it
            would wait for the device, the keys on a page that is not there are NaN to the rows
            that see them, unless the environment has LOCKSTEP_CHECK=1. With secret_lengths all
            entries are followed, and one that is no page stands for page 0. The page table itself
            is public.
        kv_lens: [B] int32 or int64, at most `max_pages · page`, which is Skv to the bias. Others
            are treated as by `attention`.
        kv_starts: [B] int32 or int64, each from 0 to `kv_lens[b]`. Keys of sequence b before
            `kv_starts[b]` are not looked at, nor are pages that hold no other: it gets what a cache
            with its first key at position 0 gives, bit for bit.

    The other arguments are those of `attention`.

    Returns:
        out [B, Hq, Sq, Dv], and with `return_lse` the pair `(out, lse)` with lse [B, Hq, Sq].

    Raises:
        ValueError, TypeError: An argument does not fit; the message names it.
        NotImplementedError: No kernel runs this; the message has the reason of each.

    Example:
        >>> q = torch.randn(2, 8, 1, 64)
        >>> k_pages, v_pages = torch.randn(2, 10, 16, 2, 64)
        >>> page_table, kv_lens = torch.tensor([[3, 7], [1, -1]]), torch.tensor([20, 9])
        >>> lockstep.attention_paged(q, k_pages, v_pages, page_table, kv_lens).shape
        torch.Size([2, 8, 1, 64])
    """
    option_arguments = (
        causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel,
        constant_time, secret_lengths,
    )  # fmt: skip
    bias = None if bias is None else pad_bias(bias)
    given = (
        q, k_pages, v_pages, bias, sinks, kv_lens, None, None, page_table, kv_starts,
        alibi_slopes,
    )  # fmt: skip
    return run(ops.attention_paged, given, option_arguments, window, return_lse, kernel)
