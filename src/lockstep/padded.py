"""Attention of a batch in which each sequence has keys of its own from a first to a last one.

The tokens of a batch lie at equal distances in memory, so they are one long row of tokens, and a
padded batch is a packed one that needs no copy: each sequence takes its part of the row, and what
lies between, padding and the unused end of a cache, belongs to sequences without queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.api import attention_varlen


def attention_in_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    early: Tensor | None = None,
    late: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention to the keys from `start[b]` to `end[b]` of each sequence.

    Its bits are those of the sequence alone.

    Args:
        q: [B, Sq, Hq, D]
        k: [B, Skv, Hkv, D]
        v: [B, Skv, Hkv, Dv]
        start, end: [B] int32, 0 <= start <= end <= Skv
        early, late: [B] int32: so many query rows before and after the others are padding, and
            come out as 0. The others are the queries of the sequence: the last one stands at its
            last key.
        options: Those of `attention_varlen`.

    Returns:
        out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]
    """
    B, Sq, Hq = q.shape[:3]
    keys, step = _tokens(k)
    values, value_step = _tokens(v)
    if step != value_step:
        keys, values, step = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), k.shape[1]
    zero = torch.zeros_like(start)
    before = zero if early is None else early
    own = zero + Sq if late is None else (Sq - late).clamp(min=0)
    row = torch.arange(B, dtype=torch.int32, device=q.device)
    # Where each part of a row ends: queries before it, the sequence, queries after it, keys up to
    # the next row's first.
    in_q = torch.stack([before, own, zero + Sq, zero + Sq], 1) + row[:, None] * Sq
    first = row * step
    following = torch.cat([first[1:] + start[1:], first.new_full((1,), keys.shape[0])])
    in_k = torch.stack([first + start, first + end, first + end, following], 1)
    # And one part in front of all: the keys before the first row's.
    offsets_q = torch.cat([zero.new_zeros(2), in_q.flatten()])
    offsets_k = torch.cat([zero.new_zeros(1), start[:1], in_k.flatten()])
    out, lse = attention_varlen(
        q.reshape(B * Sq, Hq, -1), keys, values, offsets_q, offsets_k, return_lse=True, **options
    )
    return out.view(B, Sq, Hq, -1), lse.view(B, Sq, Hq).transpose(1, 2)


def _tokens(x: Tensor) -> tuple[Tensor, int]:
    """[B, S, H, D] as tokens [T, H, D], and how many of them lie from one sequence to the next."""
    B, S, H, D = x.shape
    batch, token, head, last = x.stride()
    if B > 1 and batch != S * token and not x.requires_grad and token and batch % token == 0:
        step = batch // token
        return x.as_strided(((B - 1) * step + S, H, D), (token, head, last)), step
    return x.reshape(B * S, H, D), S
