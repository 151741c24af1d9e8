"""The public calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from lockstep import dispatch
from lockstep.call import autocast, ops
from lockstep.call.eager import is_eager
from lockstep.checks import check_types, split_parts
from lockstep.dispatch import Explanation
from lockstep.kernels.kernel import Given
from lockstep.problem import Tensors, Window, describe, make_options, pad_bias

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Common(TypedDict, total=False):
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    query_invariant: bool
    allow_tf32: bool
    constant_time: bool
    kernel: str | None


class _Varlen(_Common, total=False):
    page_table: Tensor | None
    kv_lens: Tensor | None
    kv_starts: Tensor | None


class _Paged(_Common, total=False):
    bias: Tensor | None
    kv_starts: Tensor | None
    secret_lengths: bool


class _Dense(_Paged, total=False):
    kv_lens: Tensor | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Dense],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Dense]
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    constant_time: bool = False,
    secret_lengths: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention: `softmax(softcap(scale · q kᵀ) + bias) v`.

    Differentiable in q, k, v, bias and sinks, through lse as well: once, in reverse mode. A
    sequence's bits do not depend on the batch around it.

    Args:
        q: [B, Hq, Sq, D] float16, bfloat16, float32 or float64. As for k and v, any strides do;
            a last dim that is not contiguous costs a copy.
        k: [B, Hkv, Skv, D] in the dtype of q. Hq is a multiple of Hkv, and query head h reads
            key head `h // (Hq // Hkv)`.
        v: [B, Hkv, Skv, Dv] in the dtype of q.
        causal: Row `q_idx` sees the keys up to its diagonal position `q_idx + Skv - Sq`.
        window: `(left, right)`: how many keys a row sees on either side of its diagonal position,
            None for no limit on that side.
        scale: Factor of the scores, `D ** -0.5` if None; 0, or of a size between 1e-37 and 1e37.
        softcap: Bounds scores smoothly: `softcap · tanh(score / softcap)`, before the bias.
            Between 1e-37 and 1e37, and `scale / softcap` likewise.
        sinks: [Hq] in the dtype of q or float32. One more logit per head in the denominator of
            the softmax, with no value attached.
        bias: Broadcastable to [B, Hq, Sq, Skv], in the dtype of q or float32, added to the scores.
            Where it is -inf, it hides the key. Any strides do, and cost no copy.
        kv_lens: [B] int32 or int64, each from 0 to Skv. Sequence b has `kv_lens[b]` keys; what
            lies beyond is not looked at, and `Skv` in the above becomes `kv_lens[b]`. A length out
            of that range raises on the CPU. On a GPU, where looking at it would wait for the
            device, it makes its own sequence NaN, unless the environment has LOCKSTEP_CHECK=1.
        kv_starts: [B] int32 or int64, each from 0 to `kv_lens[b]`, or Skv without lengths. Keys of
            sequence b before `kv_starts[b]`, padding on the left, are not looked at: it gets what
            it gets from `k[b, :, kv_starts[b]:]`, bit for bit. Its diagonal stays where it is, at
            its last key. Wrong ones are treated as wrong lengths are.
        alibi_slopes: [Hq] or [B, Hq], finite, in the dtype of q or float32 (ALiBi): scores lose the
            slope of their head times the distance of the key from the row's diagonal position,
            behind the softcap. No bias can come with them, nor a gradient be asked for them.
        return_lse: Also return the log-sum-exp of each row's scores.
        query_invariant: Also make the bits of a row of out and lse independent of the other
            queries of the call: a whole prefill, its chunks and single tokens against the same
            cache then agree bit for bit. Only kernels that promise it will run.
        allow_tf32: Let a GPU cut the factors of float32 products to tf32, 10 bits behind the
            point, whatever torch is set to do: off by a few thousandths, and many times as fast.
        constant_time: Make what is executed and which addresses are touched, in gradients too,
            depend on shapes, dtypes, strides and options alone, never on values. Only kernels that
            promise it will run. The documentation says what this does not cover.
        secret_lengths: With constant_time, hide the values of kv_lens as well: all Skv keys are
            loaded, and those beyond a length are masked.
        kernel: The name of a kernel, which then runs or raises. None chooses; see `explain`.

    Returns:
        out [B, Hq, Sq, Dv] in the dtype of q, and with `return_lse` the pair `(out, lse)`, where
        lse is [B, Hq, Sq] in float32 (float64 for float64), natural logarithm. A row that sees no
        key has out 0 and lse -inf. If q is a view of tokens [B, Sq, Hq, D] in memory, so are both:
        `out.transpose(1, 2).reshape(B, Sq, -1)` copies nothing. Gradients lie as their tensors do.

    Raises:
        ValueError, TypeError: An argument does not fit; the message names it.
        NotImplementedError: No kernel runs this; the message has the reason of each.

    Example:
        >>> q = torch.randn(2, 8, 1024, 64)
        >>> k, v = torch.randn(2, 2, 2, 1024, 64)
        >>> lockstep.attention(q, k, v, causal=True).shape
        torch.Size([2, 8, 1024, 64])
        >>> starts = torch.tensor([0, 24])  # keys of padding on the left
        >>> lockstep.attention(q[:, :, -1:], k, v, kv_starts=starts).shape
        torch.Size([2, 8, 1, 64])
    """
    asked = (
        causal,
        window,
        scale,
        softcap,
        query_invariant,
        allow_tf32,
        return_lse,
        kernel,
        constant_time,
        secret_lengths,
    )
    bias = None if bias is None else pad_bias(bias)
    given = (q, k, v, bias, sinks, kv_lens, None, None, None, kv_starts, alibi_slopes)
    return _run(ops.attention, given, asked, window, return_lse, kernel)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Varlen],
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
    **options: Unpack[_Varlen],
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

    Wrong offsets raise on the CPU. On a GPU, where looking at them would wait for the device, they
    raise with LOCKSTEP_CHECK=1 in the environment. Without it, sequences that begin or end at a
    wrong offset are NaN, with their gradients, and others are as they should be: the first offset
    is wrong unless it is 0, another one if it is out of range or less than one before it that is
    not. Rows and keys behind the last offset, which belong to no sequence, are NaN too.

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
    """
    asked = (
        causal,
        window,
        scale,
        softcap,
        query_invariant,
        allow_tf32,
        return_lse,
        kernel,
        constant_time,
        False,
    )
    given = (
        q,
        k,
        v,
        None,
        sinks,
        kv_lens,
        cu_seqlens_q,
        cu_seqlens_k,
        page_table,
        kv_starts,
        alibi_slopes,
    )
    operator = ops.attention_varlen if page_table is None else ops.attention_varlen_paged
    return _run(operator, given, asked, window, return_lse, kernel)


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Paged],
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
    **options: Unpack[_Paged],
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
    asked = (
        causal,
        window,
        scale,
        softcap,
        query_invariant,
        allow_tf32,
        return_lse,
        kernel,
        constant_time,
        secret_lengths,
    )
    bias = None if bias is None else pad_bias(bias)
    given = (
        q,
        k_pages,
        v_pages,
        bias,
        sinks,
        kv_lens,
        None,
        None,
        page_table,
        kv_starts,
        alibi_slopes,
    )
    return _run(ops.attention_paged, given, asked, window, return_lse, kernel)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combines the results of attention over different keys into that over all of them.

    The state is carried from the first part to the last, in float32 (float64 for float64), just
    as a kernel carries it from one span of keys to the next. Differentiable.

    Args:
        parts: `(out, lse)` pairs of the same queries, as returned with `return_lse=True`:
            out [..., Dv], lse [...].

    Returns:
        The pair `(out, lse)`, in the shapes and dtypes of the parts. Where every part has lse
        -inf, out is 0 and lse is -inf.

    Raises:
        ValueError, TypeError: The parts do not fit together.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 256, 64)
        >>> halves = zip(k.split(128, dim=2), v.split(128, dim=2))
        >>> parts = [lockstep.attention(q, k, v, return_lse=True) for k, v in halves]
        >>> out, lse = lockstep.merge(parts)
    """
    return ops.merge(*split_parts(parts))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    constant_time: bool = False,
    secret_lengths: bool = False,
    kernel: str | None = None,
) -> Explanation:
    """Says which kernel a call would run and why each other one refuses. Runs nothing.

    Takes the arguments of the call: with `cu_seqlens_q` those of `attention_varlen`, with
    `page_table` alone those of `attention_paged` (k and v are then the pages), otherwise those of
    `attention`.

    Returns:
        An `Explanation` with `kernel` (a name, or None), `refusals` (a reason per name) and
        `problem`. Print it to read it.

    Raises:
        ValueError, TypeError: An argument does not fit, or no kernel has the name `kernel`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64, dtype=torch.float64)
        >>> lockstep.explain(q, k, v, causal=True).kernel
        'oracle'
    """
    options = make_options(
        causal,
        window,
        scale,
        softcap,
        query_invariant,
        allow_tf32,
        kernel=kernel,
        constant_time=constant_time,
        secret_lengths=secret_lengths,
    )
    tensors = Tensors(
        *(q, k, v, pad_bias(bias), sinks, kv_lens, cu_seqlens_q, cu_seqlens_k, page_table),
        *(kv_starts, alibi_slopes),
    )
    check_types(tensors, tensors.layout)
    return dispatch.explain(describe(autocast.cast(tensors), options), kernel)


def _run(
    operator: ops.Attention,
    given: Given,
    asked: tuple[Any, ...],
    window: Window | None,
    return_lse: bool,
    kernel: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Follows one call from its arguments to its results: `ops` does the rest.

    `given` are the fields of `Tensors`, and `asked` the arguments of `make_options`; the other
    arguments are among these.
    """
    is_cast = autocast.is_any_enabled()
    if not is_cast and is_eager():
        result: Tensor | tuple[Tensor, Tensor] | None
        result = operator.call_again(given, asked, window, return_lse)
        if result is not None:
            return result
    options, tensors = make_options(*asked), Tensors._make(given)
    if is_cast:
        check_types(tensors, operator.layout)
        tensors = autocast.cast(tensors)
    results = operator(tensors, options, kernel)
    return results[:2] if return_lse else results[0]
