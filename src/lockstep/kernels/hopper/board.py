"""The board: where the usher posts which tile is next, and everyone else reads it."""

from __future__ import annotations

from lockstep.kernels.hopper.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.schedule import Tile

# Tiles that may be on the board at once: that at work, and the next one.
SLOTS = gl.constexpr(2)
_FIELDS = gl.constexpr(9)


@aggregate
class Board:
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
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        fields = gl.allocate_shared_memory(gl.int32, [SLOTS * _FIELDS, 1], flat)
        posted = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        wiped = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(posted.index(i), count=1)
            mbarrier.init(wiped.index(i), count=READERS)
        return Board(fields, posted, wiped)

    @gluon.jit
    def post(self, n, tile):
        """Usher: the n-th tile, as soon as everyone has read the one SLOTS before it."""
        slot = n % SLOTS
        mbarrier.wait(self.wiped.index(slot), ((n // SLOTS) & 1) ^ 1)
        self._write(slot, 0, tile.exists.to(gl.int32))
        self._write(slot, 1, tile.head)
        self._write(slot, 2, tile.kv_head)
        self._write(slot, 3, tile.batch)
        self._write(slot, 4, tile.q_idx)
        self._write(slot, 5, tile.q_start)
        self._write(slot, 6, tile.kv_start)
        self._write(slot, 7, tile.len_q)
        self._write(slot, 8, tile.len_kv)
        mbarrier.arrive(self.posted.index(slot), count=1)

    @gluon.jit
    def read(self, n, READERS: gl.constexpr = 1):
        """The n-th tile, read for so many readers."""
        slot = n % SLOTS
        mbarrier.wait(self.posted.index(slot), (n // SLOTS) & 1)
        tile = Tile(
            self._read(slot, 0) != 0,
            self._read(slot, 1),
            self._read(slot, 2),
            self._read(slot, 3),
            self._read(slot, 4),
            self._read(slot, 5),
            self._read(slot, 6),
            self._read(slot, 7),
            self._read(slot, 8),
        )
        mbarrier.arrive(self.wiped.index(slot), count=READERS)
        return tile

    @gluon.jit
    def _write(self, slot, field: gl.constexpr, value):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.fields.index(slot * _FIELDS + field).store(gl.full([1], 0, gl.int32, one) + value)

    @gluon.jit
    def _read(self, slot, field: gl.constexpr):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.fields.index(slot * _FIELDS + field).load(one), 0)
