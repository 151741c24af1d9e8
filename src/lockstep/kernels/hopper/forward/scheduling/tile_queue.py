"""The tile queue: the scheduler warp writes which tile is next, all other warps read it."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.mailbox import Mailbox
from lockstep.kernels.hopper.forward.scheduling.tile import Tile


@aggregate
class TileQueue:
    mailbox: Mailbox

    @gluon.constexpr_function
    def __init__(self, mailbox):
        self.mailbox = mailbox

    @gluon.jit
    def create(READERS: gl.constexpr):
        return TileQueue(Mailbox.create(9, READERS))

    @gluon.jit
    def post(self, n, tile):
        """Scheduler warp: the n-th tile."""
        self.mailbox.post(
            n,
            (
                tile.exists.to(gl.int32),
                tile.head,
                tile.kv_head,
                tile.batch,
                tile.q_idx,
                tile.q_start,
                tile.kv_start,
                tile.len_q,
                tile.len_kv,
            ),
        )

    @gluon.jit
    def read(self, n, READERS: gl.constexpr = 1):
        """The n-th tile, read for so many readers."""
        self.mailbox.wait(n)
        tile = Tile(
            self.mailbox.field(n, 0) != 0,
            self.mailbox.field(n, 1),
            self.mailbox.field(n, 2),
            self.mailbox.field(n, 3),
            self.mailbox.field(n, 4),
            self.mailbox.field(n, 5),
            self.mailbox.field(n, 6),
            self.mailbox.field(n, 7),
            self.mailbox.field(n, 8),
        )
        self.mailbox.release(n, READERS)
        return tile
