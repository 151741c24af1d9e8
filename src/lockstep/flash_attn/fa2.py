"""The functions of flash-attn 2."""

from __future__ import annotations

from torch import Tensor

from lockstep.flash_attn.conventions import (
    NO_WINDOW,
    Scores,
    WindowSize,
    dense,
    packed,
    paged,
    refuse,
)
from lockstep.flash_attn.kv_cache import Rotary, attend_to_cache

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """Attention of tokens-first tensors; `lockstep.attention` says what it computes.

    Args:
        q: [B, Sq, Hq, D]
        k, v: [B, Skv, Hkv, D], Hq a multiple of Hkv
        dropout_p: 0; anything else raises.
        softmax_scale: `D ** -0.5` if None.
        causal: The last query sees all keys, the one before all but one, and so on.
        window_size: `(left, right)`, -1 for no limit.
        softcap: 0 for none.
        alibi_slopes: [Hq] or [B, Hq] float32: scores lose slope times the distance to the
            diagonal. They have no gradient.
        deterministic: Results are, whatever this says.
        return_attn_probs: Also return lse [B, Hq, Sq], and None for the probabilities, which exist
            at no time. A row that sees no key has lse -inf.
        s_aux: [Hq], one more logit per head in the denominator, under the name that it has in
            vLLM's FlashAttention 3; differentiable.

    Returns:
        out [B, Sq, Hq, D], or `(out, lse, None)`.

    Raises:
        NotImplementedError: `dropout_p` is not 0, or no kernel runs the call.
        ValueError, TypeError: An argument does not fit.

    Example:
        >>> q = torch.randn(2, 100, 8, 64)
        >>> flash_attn_func(q, q, q, causal=True).shape
        torch.Size([2, 100, 8, 64])
    """
    refuse("flash_attn_func", dropout_p=dropout_p)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, s_aux)
    out, lse = dense(q, k, v, scores, alibi_slopes=alibi_slopes)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv [B, S, 3, H, D].

    Example:
        >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 8, 64)).shape
        torch.Size([2, 100, 8, 64])
    """
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q [B, Sq, Hq, D] and kv [B, Skv, 2, Hkv, D].

    Example:
        >>> flash_attn_kvpacked_func(torch.randn(2, 9, 8, 64), torch.randn(2, 50, 2, 2, 64)).shape
        torch.Size([2, 9, 8, 64])
    """
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Result:
    """Attention of packed sequences; `lockstep.attention_varlen` says what it computes.

    Args:
        q: [Tq, Hq, D]
        k, v: [Tk, Hkv, D]; with a block_table [pages, page, Hkv, D]
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, from 0 to Tq and Tk.
        max_seqlen_q: With a block_table, no sequence has more queries; `lockstep.attention_varlen`
            says what becomes of one that does. Lockstep does not need it otherwise.
        max_seqlen_k: Lockstep does not need it.
        block_table: [B, max_pages] int32: the pages of each sequence; such calls are for inference.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out [Tq, Hq, D], or `(out, lse, None)` with lse [Hq, Tq].

    Raises:
        NotImplementedError: `dropout_p` is given.

    Example:
        >>> q, ends = torch.randn(100, 8, 64), torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, q, q, ends, ends, 70, 70, causal=True).shape
        torch.Size([100, 8, 64])
    """
    refuse("flash_attn_varlen_func", dropout_p=dropout_p)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, s_aux)
    if block_table is None:
        out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scores, alibi_slopes=alibi_slopes)
    else:
        lens = cu_seqlens_k.diff()
        out, lse = paged(
            q, k, v, cu_seqlens_q, lens, block_table, scores, alibi_slopes, max_seqlen_q
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv [T, 3, H, D].

    Example:
        >>> ends = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(100, 3, 8, 64), ends, 70).shape
        torch.Size([100, 8, 64])
    """
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q [Tq, Hq, D] and kv [Tk, 2, Hkv, D].

    Example:
        >>> ends = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> q, kv = torch.randn(100, 8, 64), torch.randn(100, 2, 2, 64)
        >>> flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 70, 70).shape
        torch.Size([100, 8, 64])
    """
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to a cache, which first takes up new keys and values, in place.

    Args:
        q: [B, Sq, Hq, D]
        k_cache, v_cache: [B or more, S, Hkv, D], or pages [n_pages, page, Hkv, D] with a
            block_table.
        k, v: [B, Sn, Hkv, D] written after the first `cache_seqlens[b]` keys of each sequence. A
            sequence whose cache they do not fit raises on a CPU; on a GPU its cache stays as it
            is, and its out is NaN.
        rotary_cos, rotary_sin: [positions, rotary dim / 2], applied to k, and to q: at the
            positions after the cache if the mask is causal or a window, else all at the first.
        cache_seqlens: [B] int32 or one int: keys in the cache. All of it if None.
        cache_batch_idx: [B]: sequence b is that row of the cache.
        cache_leftpad: [B]: the first keys that do not count.
        block_table: [B, pages] int32
        rotary_interleaved: Pairs are dims 2i and 2i + 1, else i and i + rotary dim / 2.
        num_splits: Lockstep decides that by a sequence's own length.
        return_softmax_lse: Also return lse [B, Hq, Sq].

    The other arguments are those of `flash_attn_func`. There is no gradient.

    Returns:
        out [B, Sq, Hq, D], or `(out, lse)`.

    Raises:
        ValueError: Arguments do not go together; the message names them.

    Example:
        >>> q, cache = torch.randn(2, 1, 8, 64), torch.zeros(2, 2, 100, 2, 64)
        >>> new, length = torch.randn(2, 1, 2, 64), torch.tensor([0, 7], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=length, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    scores = Scores.of(softmax_scale, causal, window_size, softcap, s_aux)
    out, lse = attend_to_cache(
        q,
        (k_cache, v_cache),
        (k, v),
        scores,
        cache_seqlens=cache_seqlens,
        rotary=Rotary.of(rotary_cos, rotary_sin, rotary_interleaved),
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=block_table,
        alibi_slopes=alibi_slopes,
    )
    return (out, lse) if return_softmax_lse else out
