"""Attention to a cache of keys and values that first takes up new ones, in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.api import attention_paged
from lockstep.flash_attn.conventions import Scores, dense

Pair = tuple[Tensor, Tensor]


class Rotary(NamedTuple):
    """Rotary embeddings: tables [positions, pairs]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(cls, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Rotary | None:
        if (cos is None) != (sin is None):
            raise ValueError("rotary_cos and rotary_sin belong together, got one of them")
        return None if cos is None or sin is None else cls(cos, sin, interleaved)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, S, H, D] turned to positions [B, S]; dims behind the rotary ones stay."""
        pairs = self.cos.shape[1]
        cos, sin = (t[positions].unsqueeze(2).float() for t in (self.cos, self.sin))
        turned, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned.chunk(2, -1)
        parts = (a * cos - b * sin, a * sin + b * cos)
        turned = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)


def attend_to_cache(
    q: Tensor,
    cache: Pair,
    new: tuple[Tensor | None, Tensor | None],
    scores: Scores,
    *,
    cache_seqlens: int | Tensor | None,
    rotary: Rotary | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    alibi_slopes: Tensor | None = None,
) -> Pair:
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]; `fa2.flash_attn_with_kvcache` has the arguments."""
    k_cache, v_cache = cache
    B, Sq = q.shape[:2]
    if page_table is None:
        room = k_cache.shape[1]
    else:
        room = page_table.shape[1] * k_cache.shape[1]
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is for caches without pages")
    if cache_seqlens is None:
        cache_seqlens = room
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device)
    lens = cache_seqlens
    with torch.no_grad():
        k, v = new
        if k is not None and v is not None:
            if rotary is not None:
                k = rotary(k, _positions(cache_seqlens, k.shape[1], True, rotary))
            _append(cache, (k, v), cache_seqlens, cache_batch_idx, page_table, room)
            lens = cache_seqlens + k.shape[1]
        elif k is not None or v is not None:
            raise ValueError("k and v belong together, got one of them")
        if rotary is not None:
            moves = scores.causal or scores.window is not None
            q = rotary(q, _positions(cache_seqlens, Sq, moves, rotary))
        lens = lens.to(torch.int32)
        if page_table is not None:
            out, lse = attention_paged(
                q.transpose(1, 2),
                k_cache,
                v_cache,
                page_table,
                lens,
                **scores._asdict(),
                kv_starts=cache_leftpad,
                alibi_slopes=alibi_slopes,
                return_lse=True,
            )
            return out.transpose(1, 2), lse
        if cache_batch_idx is not None:
            k_cache, v_cache = (x[cache_batch_idx.long()] for x in cache)
        else:
            k_cache, v_cache = k_cache[:B], v_cache[:B]
        return dense(q, k_cache, v_cache, scores, lens, alibi_slopes, cache_leftpad)


def _positions(start: Tensor, n: int, moves: bool, rotary: Rotary) -> Tensor:
    """[B, n] int64, within the tables: `start` [B] and, if it moves, those behind it."""
    steps = torch.arange(n, device=start.device) * int(moves)
    positions = start.long()[:, None] + steps
    if not positions.is_cuda and int(positions.max()) >= rotary.cos.shape[0]:
        raise ValueError(
            f"rotary_cos has {rotary.cos.shape[0]} positions, position {int(positions.max())} is "
            "needed"
        )
    return positions.clamp(max=rotary.cos.shape[0] - 1)


def _append(
    cache: Pair,
    new: Pair,
    start: Tensor,
    batch_idx: Tensor | None,
    page_table: Tensor | None,
    room: int,
) -> None:
    """Writes new [B, Sn, Hkv, D] at `start` [B] of each sequence, but for those it does not fit."""
    B, n = new[0].shape[:2]
    if n > room:
        raise ValueError(f"k has {n} keys for a cache with room for {room}")
    start = start.long()
    fits = (start >= 0) & (start + n <= room)  # [B]
    if not fits.is_cuda and not bool(fits.all()):
        b = int((~fits).nonzero()[0])
        raise ValueError(
            f"k does not fit the cache: cache_seqlens[{b}] is {int(start[b])}, {n} keys are new, "
            f"and there is room for {room}"
        )
    # On a GPU, a sequence that has no room writes what is there already.
    at = start.clamp(min=0, max=room - n)[:, None] + torch.arange(n, device=start.device)
    if page_table is None:
        row = torch.arange(B, device=start.device) if batch_idx is None else batch_idx.long()
        places = (row[:, None].expand(-1, n), at)
    else:
        page = cache[0].shape[1]
        pages = page_table.long().gather(1, at // page)
        fits = fits & ((pages >= 0) & (pages < cache[0].shape[0])).all(1)
        places = (pages.clamp(min=0, max=cache[0].shape[0] - 1), at % page)
    for old, x in zip(cache, new, strict=True):
        old[places] = torch.where(fits[:, None, None, None], x.to(old.dtype), old[places])
