"""What warps say to each other: tiles through a ring of shared memory, turns, failed tiles.

Slot `i % STAGES` of a ring holds the i-th tile sent since the kernel began. Two mbarriers guard
each slot: `full` completes when the bytes of a tile have landed, `empty` when every consumer has
let it go. A barrier's phase flips each time it completes, so the i-th tile waits for phase
`i // STAGES` modulo 2, and the producer, one round ahead, for the other one: waiting for the phase
before the first returns at once, so a fresh ring needs no priming.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier, tma_load
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE
from lockstep.kernels.hopper.common.shared_memory import (
    allocate_numbers,
    allocate_tiles,
    barriers,
)


@aggregate
class Channel:
    """`tiles` [STAGES, 1, 1, 1, rows, D] with barriers `full`, `empty` [STAGES, 1]."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, STAGES):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def create(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
        """A ring for tiles of `desc`, each awaited and released by CONSUMERS partitions."""
        tiles = allocate_tiles(desc, STAGES)
        full, empty = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
        return Channel(tiles, full, empty, STAGES)

    @gluon.jit
    def send(self, i, desc, coordinates):
        """Producer: load the i-th tile as soon as its slot is free."""
        slot = i % self.STAGES
        mbarrier.wait(self.empty.index(slot), ((i // self.STAGES) & 1) ^ 1)
        mbarrier.expect(self.full.index(slot), desc.block_type.nbytes)
        tma_load(desc, coordinates, self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def wait(self, i, pred=True):
        """Consumer: wait until the i-th tile is there."""
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def tile(self, i):
        """Where the i-th tile is, [rows, D]."""
        tile = self.tiles.index(i % self.STAGES)
        return tile.reshape([tile.shape[3], tile.shape[4]])

    @gluon.jit
    def release(self, i, CONSUMERS: gl.constexpr = 1):
        """Consumer: the i-th tile is done with, by so many of them."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=CONSUMERS)


@gluon.jit
def _either(a, b):
    return a | b


@aggregate
class FailedTiles:
    """What a second pass has to do: `wrong` [CONSUMERS, 1] int32 has bit i % 32 set if something in
    a consumer's i-th tile went wrong, and is written when `done` [1, 1] completes."""

    wrong: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, wrong, done, CONSUMERS):
        self.wrong = wrong
        self.done = done
        self.CONSUMERS = gl.constexpr(CONSUMERS)

    @gluon.jit
    def create(CONSUMERS: gl.constexpr):
        return FailedTiles(allocate_numbers(CONSUMERS), barriers(1, CONSUMERS), CONSUMERS)

    @gluon.jit
    def end(self, c: gl.constexpr, wrong):
        """Consumer `c` is through; `wrong` [ROWS] has the bits of each row."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        wrong = gl.reduce(wrong, 0, _either)
        self.wrong.index(c).store(gl.full([1], 0, gl.int32, one) | wrong)
        mbarrier.arrive(self.done.index(0), count=1)

    @gluon.jit
    def wrong_tiles(self):
        """The bits of all consumers; waits for all of them."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        mbarrier.wait(self.done.index(0), 0)
        wrong = gl.full([1], 0, gl.int32, one)
        for c in gl.static_range(self.CONSUMERS):
            wrong = wrong | self.wrong.index(c).load(one)
        return gl.reduce(wrong, 0, _either)


@gluon.constexpr_function
def _turn_asm(verb, consumer):
    # Two warpgroups meet at each barrier: the one that waits and the one before it.
    return f"bar.{verb} {FIRST_FREE.value + consumer}, 256; mov.u32 $0, $1;"


@gluon.jit
def await_turn(c: gl.constexpr, token):
    """Wait until the consumer before `c` has passed the turn on; `token` is any int32."""
    gl.inline_asm_elementwise(
        _turn_asm("sync", c), "=r,r", [token], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(c: gl.constexpr, token):
    """Give consumer `c` its turn, without waiting."""
    gl.inline_asm_elementwise(
        _turn_asm("arrive", c), "=r,r", [token], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_stores(token):
    """Wait until what this warpgroup stored by TMA is in memory; `token` is any int32.

    Gluon's own wait returns once shared memory has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;",
        "=r,r",
        [token],
        gl.int32,
        is_pure=False,
        pack=1,
    )
