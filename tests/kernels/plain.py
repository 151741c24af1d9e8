"""Attention out of PyTorch's operators, every step in the precision of the inputs.

This is the yardstick of the correctness rule: what anyone would write without a kernel. It has the
calls of `lockstep.reference`, and is derived by autograd.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]: (out, lse)."""
    B, Hq, Sq, D = q.shape
    Skv, group = k.shape[2], Hq // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)  # [B, Hq, Sq, Skv]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    left, right = window or (None, None)
    hidden = _hidden(Sq, Skv, left, 0 if causal else right, kv_lens)
    logits = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        sink = sinks.to(q.dtype)[:, None, None].expand(B, Hq, Sq, 1)
        logits = torch.cat([logits, sink], dim=-1)
    # A row of nothing but -inf would have a softmax of NaN.
    empty = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    p = torch.softmax(logits, -1)[..., :Skv].masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits.float(), -1).masked_fill(empty.squeeze(-1), -math.inf)
    return p @ v, lse


def _hidden(
    Sq: int, Skv: int, left: int | None, right: int | None, kv_lens: Tensor | None
) -> Tensor:
    lens = torch.tensor([Skv]) if kv_lens is None else kv_lens
    lens = lens.long()[:, None, None, None]
    kv_idx = torch.arange(Skv)
    distance = kv_idx - (torch.arange(Sq)[:, None] + lens - Sq)  # [B or 1, 1, Sq, Skv]
    hidden = (kv_idx >= lens).expand_as(distance)
    if left is not None:
        hidden = hidden | (distance < -left)
    if right is not None:
        hidden = hidden | (distance > right)
    return hidden


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], sequence by sequence."""
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        q_tokens = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        k_tokens = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        pieces = q[q_tokens], k[k_tokens], v[k_tokens]
        out, lse = attention(*(x.transpose(0, 1)[None] for x in pieces), **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D] against gathered pages."""
    pages = page_table.long().clamp(0, len(k_pages) - 1)  # [B, max_pages]
    # [B, max_pages, page, Hkv, D] -> [B, Hkv, Skv, D]
    k, v = (x[pages].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))
    return attention(q, k, v, kv_lens=kv_lens, **options)
