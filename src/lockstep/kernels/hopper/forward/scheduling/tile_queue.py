"""The tile queue: the scheduler warp writes which tile is next, all other warps read it.

Where programs draw their tiles, the producer says when the next one is wanted: when few blocks of
its tile are left to be sent. A program that drew as soon as there is room in the queue would hold
two or three tiles that others are free for."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.common.mailbox import Mailbox
from lockstep.kernels.hopper.common.shared_memory import barriers
from lockstep.kernels.hopper.forward.scheduling.tile import Keys, Tile


@aggregate
class TileQueue:
    mailbox: Mailbox
    wish_bar: gl.shared_memory_descriptor  # [1, 1]
    PARTS: gl.constexpr  # keys of a tile may have parts

    @gluon.constexpr_function
    def __init__(self, mailbox, wish_bar, PARTS=False):
        self.mailbox = mailbox
        self.wish_bar = wish_bar
        self.PARTS = gl.constexpr(PARTS)

    @gluon.jit
    def create(READERS: gl.constexpr, DRAWN: gl.constexpr, PARTS: gl.constexpr):
        mailbox = Mailbox.create(14 if PARTS else 9, READERS)
        # Where it is not used, any may stand for it.
        wish_bar = mailbox.ring.full_bar
        if DRAWN:
            wish_bar = barriers(1, 1)
        return TileQueue(mailbox, wish_bar, PARTS)

    @gluon.jit
    def wish(self):
        """Producer: the tile behind the one at work is wanted; once for each tile."""
        mbarrier.arrive(self.wish_bar.index(0), count=1)

    @gluon.jit
    def await_wish(self, n):
        """Scheduler warp: wait until the n-th tile is wanted."""
        mbarrier.wait(self.wish_bar.index(0), (n - 1) & 1)

    @gluon.jit
    def post(self, n, tile):
        """Scheduler warp: the n-th tile."""
        numbers = (
            tile.exists.to(gl.int32), tile.head, tile.kv_head, tile.batch, tile.q_idx,
            tile.q_start, tile.kv_start, tile.len_q, tile.len_kv,
        )  # fmt: skip
        if self.PARTS:
            keys = tile.keys
            numbers = numbers + (  # noqa: RUF005, Gluon does not unpack
                keys.part, keys.n_parts, keys.slot, keys.first_block, keys.end_block
            )  # fmt: skip
        self.mailbox.post(n, numbers)

    @gluon.jit
    def read(self, n, READERS: gl.constexpr = 1):
        """The n-th tile, read for so many readers."""
        self.mailbox.wait(n)
        exists = self.mailbox.field(n, 0)
        keys = Keys.every(exists)
        if self.PARTS:
            keys = Keys(
                self.mailbox.field(n, 9),
                self.mailbox.field(n, 10),
                self.mailbox.field(n, 11),
                self.mailbox.field(n, 12),
                self.mailbox.field(n, 13),
            )
        tile = Tile(
            exists != 0,
            self.mailbox.field(n, 1),
            self.mailbox.field(n, 2),
            self.mailbox.field(n, 3),
            self.mailbox.field(n, 4),
            self.mailbox.field(n, 5),
            self.mailbox.field(n, 6),
            self.mailbox.field(n, 7),
            self.mailbox.field(n, 8),
            keys,
        )
        self.mailbox.release(n, READERS)
        return tile
