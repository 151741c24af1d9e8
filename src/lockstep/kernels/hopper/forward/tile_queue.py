"""The tile queue: the scheduler warp writes which tile is next, all other warps read it."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.common.shared_memory import (
    allocate_numbers,
    barriers,
    read_number,
    write_number,
)
from lockstep.kernels.hopper.forward.schedule import Tile

# Tiles that may be in the queue at once: that at work, and the next one.
SLOTS = gl.constexpr(2)
_FIELDS = gl.constexpr(9)


@aggregate
class TileQueue:
    """`fields` [SLOTS · _FIELDS, 1] int32 of the tiles; `posted` and `wiped` [SLOTS, 1] complete
    when a tile is there and when READERS have read it."""

    fields: gl.shared_memory_descriptor
    posted: gl.shared_memory_descriptor
    wiped: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, fields, posted, wiped):
        self.fields = fields
        self.posted = posted
        self.wiped = wiped

    @gluon.jit
    def create(READERS: gl.constexpr):
        fields = allocate_numbers(SLOTS * _FIELDS)
        posted, wiped = barriers(SLOTS, 1), barriers(SLOTS, READERS)
        return TileQueue(fields, posted, wiped)

    @gluon.jit
    def post(self, n, tile):
        """Scheduler warp: the n-th tile, as soon as everyone has read the one SLOTS before it."""
        slot = n % SLOTS
        mbarrier.wait(self.wiped.index(slot), ((n // SLOTS) & 1) ^ 1)
        at = slot * _FIELDS
        write_number(self.fields, at, tile.exists.to(gl.int32))
        write_number(self.fields, at + 1, tile.head)
        write_number(self.fields, at + 2, tile.kv_head)
        write_number(self.fields, at + 3, tile.batch)
        write_number(self.fields, at + 4, tile.q_idx)
        write_number(self.fields, at + 5, tile.q_start)
        write_number(self.fields, at + 6, tile.kv_start)
        write_number(self.fields, at + 7, tile.len_q)
        write_number(self.fields, at + 8, tile.len_kv)
        mbarrier.arrive(self.posted.index(slot), count=1)

    @gluon.jit
    def read(self, n, READERS: gl.constexpr = 1):
        """The n-th tile, read for so many readers."""
        slot = n % SLOTS
        mbarrier.wait(self.posted.index(slot), (n // SLOTS) & 1)
        at = slot * _FIELDS
        tile = Tile(
            read_number(self.fields, at) != 0,
            read_number(self.fields, at + 1),
            read_number(self.fields, at + 2),
            read_number(self.fields, at + 3),
            read_number(self.fields, at + 4),
            read_number(self.fields, at + 5),
            read_number(self.fields, at + 6),
            read_number(self.fields, at + 7),
            read_number(self.fields, at + 8),
        )
        mbarrier.arrive(self.wiped.index(slot), count=READERS)
        return tile
