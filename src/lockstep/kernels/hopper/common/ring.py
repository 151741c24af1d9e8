"""Rings of slots in shared memory, through which one partition passes tiles to others.

Slot `i % STAGES` holds the i-th item since the kernel began. Two mbarriers guard each slot: `full`
completes when an item is there, `empty` when every consumer has released it. A barrier's phase
flips each time it completes, so consumers of the i-th item wait for phase `i // STAGES` modulo 2,
and the producer, one round ahead, for the other one: waiting for the phase before the first returns
at once, so a new ring needs no priming.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier, tma_load
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers, phase_of, slot_of


@aggregate
class Ring:
    """The barriers of a ring. BY_BITS, STAGES is a power of two, and slots are found by `&` in
    place of `%`, which is a signed division."""

    full_bar: gl.shared_memory_descriptor  # [STAGES, 1]
    empty_bar: gl.shared_memory_descriptor  # [STAGES, 1]
    STAGES: gl.constexpr
    BY_BITS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full_bar, empty_bar, STAGES, BY_BITS):
        self.full_bar = full_bar
        self.empty_bar = empty_bar
        self.STAGES = gl.constexpr(STAGES)
        self.BY_BITS = gl.constexpr(BY_BITS)

    @gluon.jit
    def create(
        STAGES: gl.constexpr,
        CONSUMERS: gl.constexpr,
        PRODUCERS: gl.constexpr = 1,
        BY_BITS: gl.constexpr = False,
    ):
        """A ring whose items PRODUCERS partitions write and CONSUMERS partitions release."""
        full_bar, empty_bar = barriers(STAGES, PRODUCERS), barriers(STAGES, CONSUMERS)
        return Ring(full_bar, empty_bar, STAGES, BY_BITS)

    @gluon.jit
    def slot(self, i):
        """The slot of the i-th item."""
        return slot_of(i, self.STAGES) if self.BY_BITS else i % self.STAGES

    @gluon.jit
    def phase(self, i):
        """The parity of the phase that the i-th item completes of its slot's barriers."""
        return phase_of(i, self.STAGES) if self.BY_BITS else (i // self.STAGES) & 1

    @gluon.jit
    def full(self, i):
        """The barrier that completes when the i-th item is there."""
        return self.full_bar.index(self.slot(i))

    @gluon.jit
    def wait_empty(self, i):
        """Producer: wait until the slot of the i-th item may be written."""
        mbarrier.wait(self.empty_bar.index(self.slot(i)), self.phase(i) ^ 1)

    @gluon.jit
    def wait_full(self, i, pred=True):
        """Consumer: wait until the i-th item is there."""
        mbarrier.wait(self.full(i), self.phase(i), pred=pred)

    @gluon.jit
    def fill(self, i):
        """Producer: the i-th item has been written."""
        mbarrier.arrive(self.full(i), count=1)

    @gluon.jit
    def release(self, i, CONSUMERS: gl.constexpr = 1, pred=True):
        """Consumer: the i-th item is no longer needed, by so many of them."""
        mbarrier.arrive(self.empty_bar.index(self.slot(i)), count=CONSUMERS, pred=pred)


@aggregate
class TileRing:
    """A ring of tiles that the copy engine loads."""

    tiles_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, rows, D]
    ring: Ring

    @gluon.constexpr_function
    def __init__(self, tiles_smem, ring):
        self.tiles_smem = tiles_smem
        self.ring = ring

    @gluon.jit
    def create(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
        """A ring for tiles of `desc`, each of which CONSUMERS partitions wait for and release."""
        return TileRing(allocate_tiles(desc, STAGES), Ring.create(STAGES, CONSUMERS))

    @gluon.jit
    def send(self, i, desc, coordinates):
        """Producer: load the i-th tile as soon as its slot is empty."""
        self.ring.wait_empty(i)
        full = self.ring.full(i)
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, coordinates, full, self.tiles_smem.index(self.ring.slot(i)))

    @gluon.jit
    def wait(self, i, pred=True):
        """Consumer: wait until the i-th tile is there."""
        self.ring.wait_full(i, pred)

    @gluon.jit
    def tile(self, i):
        """Where the i-th tile is, [rows, D]."""
        tile = self.tiles_smem.index(self.ring.slot(i))
        return tile.reshape([tile.shape[3], tile.shape[4]])

    @gluon.jit
    def release(self, i, CONSUMERS: gl.constexpr = 1):
        """Consumer: the i-th tile is no longer needed, by so many of them."""
        self.ring.release(i, CONSUMERS)
