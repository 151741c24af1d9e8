"""How many bytes a rank receives from others, and holds: closed forms, exact for any sizes.

Tests count the bytes of real processes by wrapping the collectives, and hold these to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.distributed import heads
from lockstep.distributed.layout import Sharding, share

STATISTIC = 4  # bytes of m, l, delta and lse


@dataclass(frozen=True)
class Shape:
    """One call of context-parallel attention, over the whole sequence."""

    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    Dv: int
    element: int  # bytes of an element of q, k, v
    ranks: int
    balanced: bool = False
    uses_lse: bool = False
    has_sinks: bool = False

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.S, self.ranks, self.balanced)

    @property
    def key(self) -> int:
        """Bytes of a token's keys and values in one head."""
        return self.B * (self.D + self.Dv) * self.element

    @property
    def row(self) -> int:
        """Bytes of a token's q and dout in one head."""
        return self.key

    @property
    def out(self) -> int:
        return self.B * self.Dv * self.element

    @property
    def lse(self) -> int:
        return self.B * STATISTIC if self.uses_lse else 0


class Bytes(NamedTuple):
    """The bytes that one rank receives, or sends, in one call."""

    forward: int
    backward: int


def received(method: str, shape: Shape, rank: int) -> Bytes:
    """The bytes that a rank receives from others, without the agreement at the start of a call.

    Raises ValueError for an unknown method.
    """
    if method not in _RECEIVED:
        raise ValueError(f"method takes one of {', '.join(_RECEIVED)}, got {method!r}")
    return _RECEIVED[method](shape, rank)


def _gather(shape: Shape, rank: int) -> Bytes:
    # All shards are sent at the size of the largest.
    others = (shape.ranks - 1) * shape.sharding.largest
    keys = others * shape.Hkv * shape.key
    statistics = 2 * shape.B * STATISTIC
    rows = others * shape.Hq * (shape.row + shape.out + statistics + shape.lse)
    return Bytes(keys, keys + rows)


def _ring(shape: Shape, rank: int) -> Bytes:
    others = shape.S - shape.sharding.size(rank)
    keys = others * shape.Hkv * shape.key
    statistics = 3 * shape.B * STATISTIC
    rows = others * shape.Hq * (shape.row + statistics)
    sinks = others * len(share(shape.Hq, shape.ranks, rank)) * statistics if shape.has_sinks else 0
    return Bytes(keys, keys + rows + sinks)


def _heads(shape: Shape, rank: int) -> Bytes:
    parts = heads.divide(shape.Hq, shape.Hkv, shape.ranks, shape.S)
    mine, sharding = parts[rank], shape.sharding
    own = sharding.size(rank)
    others = shape.S - own
    q_heads, group = len(mine.q_heads), len(mine.group)
    statistics = 2 * shape.B * STATISTIC
    query = shape.B * shape.D * shape.element
    to_heads = others * (q_heads * query + len(mine.kv_heads) * shape.key)
    forward = to_heads + own * (shape.Hq - q_heads) * (shape.out + shape.lse)
    backward = others * group * (shape.out + shape.lse) + own * (shape.Hq - q_heads) * query
    # Keys of own tokens whose gradients this rank has summed itself.
    summed = sum(n for _, _, n in sharding.overlaps(rank, mine.keys)) * len(mine.kv_heads)
    backward += (own * shape.Hkv - summed) * shape.key
    if shape.Hkv < shape.ranks:
        forward += own * (shape.Hq - q_heads) * statistics
        backward += others * group * (query + shape.out + statistics)
    return Bytes(forward, backward)


_RECEIVED = {"heads": _heads, "gather": _gather, "ring": _ring}


def held(method: str, shape: Shape) -> Bytes:
    """About what the largest rank holds of other ranks' tokens at a time, besides its own shards.

    Raises ValueError for an unknown method.
    """
    largest = shape.sharding.largest
    statistics = 3 * shape.B * STATISTIC
    if method == "gather":
        keys = shape.S * shape.Hkv * shape.key
        return Bytes(keys, keys + shape.S * shape.Hq * (shape.row + shape.out + statistics))
    if method == "ring":
        # Three blocks: one that was just folded, one at work and one on its way.
        n = 3 * largest
        keys = n * shape.Hkv * shape.key
        return Bytes(keys, max(keys, n * shape.Hq * (shape.row + statistics)))
    if method == "heads":
        parts = heads.divide(shape.Hq, shape.Hkv, shape.ranks, shape.S)
        query = shape.B * shape.D * shape.element

        def boxes(part: heads.Part, rows: int) -> int:
            results = rows * (query + shape.out + statistics)
            return shape.S * (results + len(part.kv_heads) * shape.key)

        forward = max(boxes(part, len(part.q_heads)) for part in parts)
        backward = max(boxes(part, len(part.group)) for part in parts)
        return Bytes(forward, backward + shape.S * max(len(p.group) for p in parts) * shape.out)
    raise ValueError(f"method takes one of {', '.join(_RECEIVED)}, got {method!r}")
