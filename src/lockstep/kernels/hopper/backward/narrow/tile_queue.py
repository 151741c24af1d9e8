"""The tile queue: the producer of a backward program writes which key tile is next."""

from __future__ import annotations

from lockstep.kernels.hopper.backward.query_loop import QueryLoop
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.common.shared_memory import (
    allocate_numbers,
    barriers,
    read_number,
    write_number,
)

# Loops that may be in the queue at once: that under way, and the next one.
SLOTS = gl.constexpr(2)
_FIELDS = gl.constexpr(8)


@aggregate
class TileQueue:
    """`fields` [SLOTS · _FIELDS, 1] int32 of the loops; `posted` and `wiped` [SLOTS, 1] complete
    when a loop is there and when all partitions that loop have read it."""

    fields: gl.shared_memory_descriptor
    posted: gl.shared_memory_descriptor
    wiped: gl.shared_memory_descriptor
    tiles_per_head: gl.tensor
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_EDGE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, memory, tiles_per_head, BLOCK_Q, BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE):
        self.fields = memory[0]
        self.posted = memory[1]
        self.wiped = memory[2]
        self.tiles_per_head = tiles_per_head
        self.BLOCK_Q = gl.constexpr(BLOCK_Q)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_EDGE = gl.constexpr(HAS_EDGE)

    @gluon.jit
    def create(
        READERS: gl.constexpr, tiles_per_head, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
        HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    ):  # fmt: skip
        return TileQueue(
            (allocate_numbers(SLOTS * _FIELDS), barriers(SLOTS, 1), barriers(SLOTS, READERS)),
            tiles_per_head, BLOCK_Q, BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE,
        )  # fmt: skip

    @gluon.jit
    def post(self, n, loop, is_large):
        """Producer: the n-th loop, and whether it has large scores, as soon as everyone has read
        the one SLOTS before it."""
        at = self._await_wiped(n)
        write_number(self.fields, at, loop.n_steps)
        write_number(self.fields, at + 1, loop.n_tiles)
        write_number(self.fields, at + 2, loop.first_tile)
        write_number(self.fields, at + 3, loop.low)
        write_number(self.fields, at + 4, loop.high)
        write_number(self.fields, at + 5, loop.room)
        write_number(self.fields, at + 6, loop.first_key)
        write_number(self.fields, at + 7, is_large)
        mbarrier.arrive(self.posted.index(n % SLOTS), count=1)

    @gluon.jit
    def close(self, n):
        """Producer: there is no n-th loop."""
        write_number(self.fields, self._await_wiped(n), -1)
        mbarrier.arrive(self.posted.index(n % SLOTS), count=1)

    @gluon.jit
    def _await_wiped(self, n):
        """The first field of the n-th loop, when it may be written."""
        mbarrier.wait(self.wiped.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
        return n % SLOTS * _FIELDS

    @gluon.jit
    def has(self, n):
        """Wait until it is known whether there is an n-th loop."""
        mbarrier.wait(self.posted.index(n % SLOTS), (n // SLOTS) & 1)
        return read_number(self.fields, n % SLOTS * _FIELDS) >= 0

    @gluon.jit
    def read(self, n):
        """The n-th loop, which is there, and whether it has large scores."""
        at = n % SLOTS * _FIELDS
        n_steps = read_number(self.fields, at)
        n_tiles = read_number(self.fields, at + 1)
        first_tile = read_number(self.fields, at + 2)
        low = read_number(self.fields, at + 3)
        high = read_number(self.fields, at + 4)
        room = read_number(self.fields, at + 5)
        first_key = read_number(self.fields, at + 6)
        is_large = read_number(self.fields, at + 7) != 0
        mbarrier.arrive(self.wiped.index(n % SLOTS), count=1)
        loop = QueryLoop(
            (first_tile, n_steps, n_tiles, self.tiles_per_head), (low, high, room, first_key),
            self.BLOCK_Q, self.BLOCK_KV, self.HAS_LEFT, self.HAS_RIGHT, self.HAS_EDGE,
        )  # fmt: skip
        return loop, is_large
