"""The board: where the producer of a backward program posts which walk is next."""

from __future__ import annotations

from lockstep.kernels.hopper.backward_walk import Walk
from lockstep.kernels.hopper.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.shared_memory import (
    allocate_numbers,
    barriers,
    read_number,
    write_number,
)

# Walks that may be on the board at once: that under way, and the next one.
SLOTS = gl.constexpr(2)
_FIELDS = gl.constexpr(8)


@aggregate
class Board:
    """`fields` [SLOTS · _FIELDS, 1] int32 of the walks; `posted` and `wiped` [SLOTS, 1] complete
    when a walk is there and when all partitions that walk have read it."""

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
        return Board(
            (allocate_numbers(SLOTS * _FIELDS), barriers(SLOTS, 1), barriers(SLOTS, READERS)),
            tiles_per_head, BLOCK_Q, BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE,
        )  # fmt: skip

    @gluon.jit
    def post(self, n, walk, is_large):
        """Producer: the n-th walk, and whether it has large scores, as soon as everyone has read the one SLOTS before it."""
        at = self._await_wiped(n)
        write_number(self.fields, at, walk.n_steps)
        write_number(self.fields, at + 1, walk.n_tiles)
        write_number(self.fields, at + 2, walk.first_tile)
        write_number(self.fields, at + 3, walk.low)
        write_number(self.fields, at + 4, walk.high)
        write_number(self.fields, at + 5, walk.room)
        write_number(self.fields, at + 6, walk.first_key)
        write_number(self.fields, at + 7, is_large)
        mbarrier.arrive(self.posted.index(n % SLOTS), count=1)

    @gluon.jit
    def close(self, n):
        """Producer: there is no n-th walk."""
        write_number(self.fields, self._await_wiped(n), -1)
        mbarrier.arrive(self.posted.index(n % SLOTS), count=1)

    @gluon.jit
    def _await_wiped(self, n):
        """The first field of the n-th walk, when it may be written."""
        mbarrier.wait(self.wiped.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
        return n % SLOTS * _FIELDS

    @gluon.jit
    def has(self, n):
        """Wait until it is known whether there is an n-th walk."""
        mbarrier.wait(self.posted.index(n % SLOTS), (n // SLOTS) & 1)
        return read_number(self.fields, n % SLOTS * _FIELDS) >= 0

    @gluon.jit
    def read(self, n):
        """The n-th walk, which is there, and whether it has large scores."""
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
        walk = Walk(
            (first_tile, n_steps, n_tiles, self.tiles_per_head), (low, high, room, first_key),
            self.BLOCK_Q, self.BLOCK_KV, self.HAS_LEFT, self.HAS_RIGHT, self.HAS_EDGE,
        )  # fmt: skip
        return walk, is_large
