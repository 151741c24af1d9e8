"""The functions of FlashAttention 3's `flash_attn_interface`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.api import merge
from lockstep.flash_attn.conventions import (
    NO_WINDOW,
    Scores,
    WindowSize,
    dense,
    dense_in_chunks,
    in_chunks,
    packed,
    refuse,
)
from lockstep.flash_attn.kv_cache import Rotary, attend_to_cache

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """`lockstep.flash_attn.flash_attn_func` with the arguments of FlashAttention 3.

    v may have a head dim of its own. `num_splits`, `pack_gqa`, `sm_margin` and `deterministic` are
    hints that Lockstep does not need. `s_aux` [Hq], an argument of vLLM's version, is one more
    logit per head in the denominator. With `attention_chunk`, keys come in chunks of so many from
    the first on, and a query sees the chunk it is in alone; unlike FlashAttention 3's, such a call
    is differentiable.

    Returns:
        out [B, Sq, Hq, Dv], or with `return_attn_probs` the pair `(out, lse)`.

    Raises:
        NotImplementedError: `qv` or a `descale` is given.

    Example:
        >>> q = torch.randn(2, 100, 8, 64)
        >>> out, lse = flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
        >>> lse.shape
        torch.Size([2, 8, 100])
    """
    _refuse("flash_attn_func", qv, q_descale, k_descale, v_descale)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, s_aux)
    out, lse = _dense(q, k, v, scores, attention_chunk)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv [B, S, 3, H, D], or [B, S, Hq + 2 Hkv, D] with `num_heads_q`.

    Example:
        >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 12, 64), num_heads_q=8).shape
        torch.Size([2, 100, 8, 64])
    """
    _refuse("flash_attn_qkvpacked_func", None, q_descale, k_descale, v_descale)
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    elif num_heads_q is None:
        raise ValueError("num_heads_q is needed for qkv of 4 dims")
    else:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = torch.split(qkv, [num_heads_q, heads, heads], 2)
    scores = Scores.of(softmax_scale, causal, window_size, softcap)
    out, lse = _dense(q, k, v, scores, attention_chunk)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """`lockstep.flash_attn.flash_attn_varlen_func` with the arguments of FlashAttention 3.

    Args:
        seqused_q, seqused_k: [B]: so many queries and keys of each sequence are used, from its
            first on. Queries that are not come out as 0.

    Example:
        >>> q, ends = torch.randn(100, 8, 64), torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, q, q, ends, ends, 70, 70).shape
        torch.Size([100, 8, 64])
    """
    _refuse("flash_attn_varlen_func", qv, q_descale, k_descale, v_descale)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, s_aux)
    if attention_chunk:
        if seqused_q is not None or seqused_k is not None:
            raise NotImplementedError(
                "flash_attn_varlen_func: seqused_q and seqused_k are not supported by Lockstep "
                "with attention_chunk"
            )
        cu_seqlens_q, cu_seqlens_k = in_chunks(
            cu_seqlens_q, cu_seqlens_k, attention_chunk, max_seqlen_k
        )
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scores, seqused_q, seqused_k)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """`lockstep.flash_attn.flash_attn_with_kvcache` with the arguments of FlashAttention 3.

    Args:
        cu_seqlens_q: [B + 1]: q is packed, [T, Hq, D], and so is the result.
        cu_seqlens_k_new: [B + 1]: k and v are packed, [T, Hkv, D].
        max_seqlen_q: With cu_seqlens_q, no sequence has more queries; `lockstep.attention_varlen`
            says what becomes of one that does.
        rotary_seqlens: [B]: where rotary positions begin, instead of `cache_seqlens`.

    Raises:
        NotImplementedError: `qv`, a `descale` or `attention_chunk` is given.

    Example:
        >>> q, cache = torch.randn(2, 1, 8, 64), torch.zeros(2, 2, 100, 2, 64)
        >>> length = torch.tensor([50, 7], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, *cache, cache_seqlens=length).shape
        torch.Size([2, 1, 8, 64])
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, qv, q_descale, k_descale, v_descale)
    refuse(name, attention_chunk=attention_chunk)
    out, lse = attend_to_cache(
        q,
        (k_cache, v_cache),
        (k, v),
        Scores.of(softmax_scale, causal, window_size, softcap, s_aux),
        cache_seqlens=cache_seqlens,
        rotary=Rotary.of(rotary_cos, rotary_sin, rotary_interleaved),
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Results over different keys combined into those over all, as `lockstep.merge` does it.

    Args:
        out_partial: [splits, B, Sq, Hq, Dv]
        lse_partial: [splits, B, Sq, Hq]
        out: [B, Sq, Hq, Dv] to write the result to, or None.
        out_dtype: Of the result; that of `out_partial` if None.

    Returns:
        out [B, Sq, Hq, Dv] and lse [B, Sq, Hq].

    Example:
        >>> flash_attn_combine(torch.randn(3, 2, 5, 4, 64), torch.randn(3, 2, 5, 4))[0].shape
        torch.Size([2, 5, 4, 64])
    """
    merged, lse = merge(list(zip(out_partial, lse_partial, strict=True)))
    merged = merged.to(out_dtype or out_partial.dtype)
    return (merged if out is None else out.copy_(merged)), lse


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None: Lockstep needs no plan of a call in advance.

    Example:
        >>> get_scheduler_metadata(batch_size=2) is None
        True
    """


def _dense(q: Tensor, k: Tensor, v: Tensor, scores: Scores, chunk: int) -> tuple[Tensor, Tensor]:
    return dense_in_chunks(q, k, v, scores, chunk) if chunk else dense(q, k, v, scores)


def _given(x: Tensor | None) -> str | None:
    return None if x is None else "a tensor"


def _refuse(
    function: str,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    refuse(
        function,
        qv=_given(qv),
        q_descale=_given(q_descale),
        k_descale=_given(k_descale),
        v_descale=_given(v_descale),
    )
