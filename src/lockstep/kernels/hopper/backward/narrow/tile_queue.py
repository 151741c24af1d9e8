"""The tile queue: the producer writes which loop over query tiles is next, other warps read it."""

from __future__ import annotations

from lockstep.kernels.hopper.backward.query_loop import QueryLoop
from lockstep.kernels.hopper.backward.sizes import Sizes
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.mailbox import Mailbox


@aggregate
class TileQueue:
    mailbox: Mailbox
    sizes: Sizes

    @gluon.constexpr_function
    def __init__(self, mailbox, sizes):
        self.mailbox = mailbox
        self.sizes = sizes

    @gluon.jit
    def create(READERS: gl.constexpr, sizes):
        FIELDS: gl.constexpr = 16 if sizes.SHARED or sizes.CUT or sizes.LAYOUT == "varlen" else 8
        return TileQueue(Mailbox.create(FIELDS, READERS), sizes)

    @gluon.jit
    def post(self, n, loop, key_tile, is_large, SIZE: gl.constexpr = 0):
        """Producer: the n-th loop, over queries that see a key tile, and whether it has large
        scores; where loops may be cut, sums of one have SIZE numbers."""
        numbers = (
            loop.n_steps,
            loop.n_tiles,
            loop.first_tile,
            loop.low,
            loop.high,
            loop.room,
            loop.first_key,
            is_large,
        )
        if self.sizes.SHARED:
            numbers = numbers + (loop.heads_per_kv, loop.share)  # noqa: RUF005, Gluon does not unpack
        elif self.sizes.LAYOUT == "varlen":
            numbers = numbers + (n, n)  # noqa: RUF005
        if self.sizes.LAYOUT == "varlen":
            rows = (key_tile.first_q_tile, key_tile.q_start, key_tile.len_q)
            numbers = numbers + rows
        if self.sizes.CUT:
            numbers = numbers + self.sizes.carried(loop.share, SIZE)
        self.mailbox.post(n, numbers)

    @gluon.jit
    def close(self, n):
        """Producer: there is no n-th loop."""
        self.mailbox.post(n, (-1,))

    @gluon.jit
    def has(self, n):
        """Wait until it is known whether there is an n-th loop."""
        self.mailbox.wait(n)
        return self.mailbox.field(n, 0) >= 0

    @gluon.jit
    def read(self, n, KEPT: gl.constexpr = False):
        """The n-th loop, which is there, and whether it has large scores. If the message is KEPT,
        there is more to read, and it is released later."""
        n_steps = self.mailbox.field(n, 0)
        n_tiles = self.mailbox.field(n, 1)
        first_tile = self.mailbox.field(n, 2)
        low = self.mailbox.field(n, 3)
        high = self.mailbox.field(n, 4)
        room = self.mailbox.field(n, 5)
        first_key = self.mailbox.field(n, 6)
        is_large = self.mailbox.field(n, 7) != 0
        heads = self.sizes.heads_per_kv
        share = first_key
        if self.sizes.SHARED:
            heads = self.mailbox.field(n, 8)
            share = self.mailbox.field(n, 9)
        if not KEPT:
            self.mailbox.release(n)
        tiles = (first_tile, n_steps, n_tiles)
        bounds = (low, high, room, first_key)
        return QueryLoop(tiles, bounds, heads, share, self.sizes), is_large

    @gluon.jit
    def rows(self, n, WANTED: gl.constexpr):
        """Where the queries of the n-th loop lie, if they are packed: its first tile, the first row
        of its sequence, and how many that has."""
        if WANTED and self.sizes.LAYOUT == "varlen":
            rows = (self.mailbox.field(n, 10), self.mailbox.field(n, 11), self.mailbox.field(n, 12))
        else:
            rows = (n, n, n)
        return rows

    # What consumers know of a cut is read where it is needed: in registers, it would cost each step
    # of all loops.

    @gluon.jit
    def signals_before(self, n):
        """How many signals there are when the sums are there that the n-th loop begins with; 0 if
        it begins with none."""
        return self.mailbox.field(n, 8)

    @gluon.jit
    def goes_on(self, n):
        """Whether the n-th loop leaves its sums to another span."""
        return self.mailbox.field(n, 9) != 0

    @gluon.jit
    def sums_ptr(self, n):
        """Where the sums of the n-th loop are, those of the first consumer first."""
        address = as_address(self.mailbox.field(n, 10), self.mailbox.field(n, 11))
        return gl.multiple_of(address.to(gl.pointer_type(gl.float32), bitcast=True), 16)

    @gluon.jit
    def signals_at(self, n):
        """The address of their number."""
        return as_address(self.mailbox.field(n, 12), self.mailbox.field(n, 13))

    @gluon.jit
    def release(self, n):
        """A message that was KEPT may be written over."""
        self.mailbox.release(n)


@gluon.jit
def as_address(low, high):
    """An address of 64 bits from two numbers."""
    return (high.to(gl.int64) << 32) | low.to(gl.uint32, bitcast=True).to(gl.int64)
