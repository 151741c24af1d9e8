"""Attention to a cache of keys and values that first takes up new ones, in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.api import attention_paged, attention_varlen
from lockstep.flash_attn.conventions import Scores, bound_of, dense

Pair = tuple[Tensor, Tensor]


class Tokens(NamedTuple):
    """Tokens of several sequences, one after another."""

    x: Tensor  # [T, H, D]
    row: Tensor  # [T] int64: of which sequence
    place: Tensor  # [T] int64: which of its tokens here
    counts: Tensor  # [B] int64: how many each sequence has here

    @classmethod
    def of(cls, x: Tensor, offsets: Tensor | None = None) -> Tokens:
        """x is [B, n, H, D], or with `offsets` [B + 1] packed, [T, H, D]."""
        if offsets is None:
            B, n = x.shape[:2]
            offsets = torch.arange(B + 1, device=x.device) * n
            x = x.flatten(0, 1)
        offsets = offsets.long()
        at, last = torch.arange(x.shape[0], device=x.device), offsets.shape[0] - 2
        # Tokens after the last sequence count as its own: `_append` leaves them out.
        row = torch.searchsorted(offsets[1:], at, right=True).clamp(max=last)
        return cls(x, row, at - offsets[row], offsets.diff())


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

    def __call__(self, tokens: Tokens, start: Tensor, moves: bool = True) -> Tensor:
        """x [T, H, D] turned to `start` [B] of its sequences and, if it `moves`, the positions
        after it; dims after the rotary ones stay."""
        positions, n = start.long()[tokens.row], self.cos.shape[0]
        if moves:
            positions = positions + tokens.place
        if not positions.is_cuda and positions.numel() and int(positions.max()) >= n:
            raise ValueError(
                f"rotary_cos has {n} positions, position {int(positions.max())} is needed"
            )
        positions = positions.clamp(max=n - 1)
        x, pairs = tokens.x, self.cos.shape[1]
        cos, sin = (t[positions].unsqueeze(1).float() for t in (self.cos, self.sin))
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Tensor | None = None,
) -> Pair:
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq], or of packed queries [T, Hq, Dv] and [Hq, T].

    `fa2.flash_attn_with_kvcache` and that of `fa3` have the arguments.
    """
    k_cache, v_cache = cache
    B = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if page_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx is for caches without pages")
    # A cache without pages has one for each sequence.
    table = page_table
    if table is None:
        rows = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx
        table = rows[:, None].to(torch.int32)
    room = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = room
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device)
    lens = cache_seqlens
    first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
    with torch.no_grad():
        k, v = new
        if k is not None and v is not None:
            keys, values = (Tokens.of(x, cu_seqlens_k_new) for x in (k, v))
            if rotary is not None:
                keys = keys._replace(x=rotary(keys, first))
            _append(cache, (keys, values), cache_seqlens, table, room)
            lens = cache_seqlens + keys.counts
        elif k is not None or v is not None:
            raise ValueError("k and v belong together, got one of them")
        if rotary is not None:
            moves = scores.causal or scores.window is not None
            q = rotary(Tokens.of(q, cu_seqlens_q), first, moves).view(q.shape)
        lens = lens.to(torch.int32)
        options = {
            **scores._asdict(),
            "kv_starts": cache_leftpad,
            "alibi_slopes": alibi_slopes,
            "return_lse": True,
        }
        if cu_seqlens_q is not None:
            options |= {"page_table": table, "kv_lens": lens}
            options |= {"max_seqlen_q": bound_of(max_seqlen_q)}
            out, lse = attention_varlen(q, k_cache, v_cache, cu_seqlens_q, **options)
            return out, lse.transpose(0, 1)
        if page_table is not None:
            queries = q.transpose(1, 2)
            out, lse = attention_paged(queries, k_cache, v_cache, table, lens, **options)
            return out.transpose(1, 2), lse
        if cache_batch_idx is not None:
            k_cache, v_cache = (x[cache_batch_idx.long()] for x in cache)
        else:
            k_cache, v_cache = k_cache[:B], v_cache[:B]
        return dense(q, k_cache, v_cache, scores, lens, alibi_slopes, cache_leftpad)


def _append(
    cache: Pair, new: tuple[Tokens, Tokens], start: Tensor, table: Tensor, room: int
) -> None:
    """Writes new keys and values at `start` [B] of each sequence, but for those it does not fit."""
    tokens, page = new[0], cache[0].shape[1]
    if not tokens.x.shape[0]:
        return
    start, counts = start.long(), tokens.counts
    fits = (start >= 0) & (start + counts <= room)  # [B]
    if not fits.is_cuda and not bool(fits.all()):
        b = int((~fits).nonzero()[0])
        raise ValueError(
            f"k does not fit the cache: cache_seqlens[{b}] is {int(start[b])}, {int(counts[b])} "
            f"keys are new, and there is room for {room}"
        )
    at = (start[tokens.row] + tokens.place).clamp(min=0, max=room - 1)  # [T]
    pages = table.long()[tokens.row, at // page]
    fits = fits[tokens.row] & (tokens.place < counts[tokens.row])  # [T]
    fits = fits & (pages >= 0) & (pages < cache[0].shape[0])
    # The device alone knows which tokens fit. Those that do not repeat the write of the first that
    # does or, if there is none, write what is there already.
    source = torch.where(fits, torch.arange(len(fits), device=fits.device), fits.int().argmax())
    places = (pages[source].clamp(min=0, max=cache[0].shape[0] - 1), at[source] % page)
    for old, x in zip(cache, new, strict=True):
        old[places] = torch.where(fits.any(), x.x[source].to(old.dtype), old[places])
