"""The forward operators of PyTorch's fused attention, answered by `lockstep.attention`.

Each function takes what the operator of its name takes, and returns what it returns. It raises
NotImplementedError for what Lockstep does not do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lockstep


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
    debug: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, D] and lse [B, H, Sq]."""
    if dropout_p or debug:
        raise NotImplementedError("Lockstep has no dropout")
    k, v, bias, is_causal, window = align(q, k, v, is_causal, bias)
    out, lse = lockstep.attention(
        q, k, v, causal=is_causal, window=window, bias=bias, scale=scale, return_lse=True
    )
    # PyTorch's is contiguous whatever the order of q.
    return out, lse.contiguous()


def align(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, bool, tuple[None, int] | None]:
    """k, v, bias, causal and window of a causal mask that ends in the lower right corner, as ours
    does, from one that begins in the upper left corner, as PyTorch's does."""
    Sq, Skv = q.shape[2], k.shape[2]
    if is_causal and Sq > Skv:
        return k, v, bias, False, (None, Sq - Skv)
    if is_causal and Sq < Skv:
        k, v = k[:, :, :Sq], v[:, :, :Sq]
        bias = bias[..., :Sq] if bias is not None and bias.shape[-1] == Skv else bias
    return k, v, bias, is_causal, None


def _random_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that did not happen: nothing reads them, and to fill them would
    take two kernels of their own."""
    return q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


def flash_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    return attend(query, key, value, dropout_p, is_causal, scale, attn_mask)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attend(query, key, value, dropout_p, is_causal, scale, debug=return_debug_mask)
    return _as_flash(query, key, out, lse)


def _as_flash(query: Tensor, key: Tensor, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    none = query.new_empty(0)
    return out, lse, none, none, query.shape[2], key.shape[2], *_random_state(query), none


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attend(query, key, value, dropout_p, is_causal, scale, attn_bias, return_debug_mask)
    return _as_flash(query, key, out, lse)


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    out, lse = attend(query, key, value, dropout_p, is_causal, scale, attn_bias)
    return out, lse, *_random_state(query)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Tokens first: [B, S, H, D], or [T, H, D] with cum_seq_q. The causal mask ends in the lower
    right corner, and a window of -1 has no limit. With a block_table, keys are in pages, and
    seqused_k has the length of each sequence. lse is [B, H, Sq], or [H, T]."""
    is_paged = block_table is not None
    if dropout_p or return_debug_mask or (seqused_k is not None) != is_paged:
        raise NotImplementedError("Lockstep has no such option here")
    if is_paged and cum_seq_q is None:
        raise NotImplementedError("Lockstep takes a block_table with cum_seq_q here")
    window = window_of(window_size_left, window_size_right)
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = lockstep.attention(
            q,
            k,
            v,
            causal=is_causal,
            window=window,
            scale=scale,
            alibi_slopes=alibi_slopes,
            return_lse=True,
        )
        out, lse = out.transpose(1, 2), lse.contiguous()
    else:
        out, lse = lockstep.attention_varlen(
            query,
            key,
            value,
            cum_seq_q,
            None if is_paged else cum_seq_k,
            page_table=block_table,
            kv_lens=seqused_k,
            causal=is_causal,
            window=window,
            scale=scale,
            alibi_slopes=alibi_slopes,
            return_lse=True,
        )
        lse = lse.transpose(0, 1)
    return out, lse, *_random_state(query), query.new_empty(0)


def window_of(left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """A window as ours are, from one of flash_attn, where -1 is no limit."""
    left, right = (None if x is None or x < 0 else x for x in (left, right))
    return left, right


def flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, lse, *_ = flash_forward(*args, **kwargs)
    out.copy_(result)
    return lse
