"""What warps say to each other: tiles through a ring of shared memory, and turns.

Slot `i % STAGES` of a ring holds the i-th tile sent since the kernel began. Two mbarriers guard
each slot: `full` completes when the bytes of a tile have landed, `empty` when every consumer has
let it go. A barrier's phase flips each time it completes, so the i-th tile waits for phase
`i // STAGES` modulo 2, and the producer, one round ahead, for the other one: waiting for the phase
before the first returns at once, so a fresh ring needs no priming.
"""

from __future__ import annotations

from lockstep.kernels.hopper.gluon_shim import aggregate, gl, gluon, mbarrier, tma_load

# Named barriers below 8 belong to the compiler.
_FIRST_TURN = gl.constexpr(8)


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
        tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
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
    def release(self, i, pred=True):
        """Consumer: the i-th tile is done with."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1, pred=pred)


@gluon.constexpr_function
def _turn_asm(verb, consumer):
    # Two warpgroups meet at each barrier: the one that waits and the one before it.
    return f"bar.{verb} {_FIRST_TURN.value + consumer}, 256; mov.u32 $0, $1;"


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
