"""dQ, summed in one fixed order, as for narrow heads (`narrow/dq_sums.py`).

A tile of dQ has three chunks of 64 columns. Each consumer has one chunk and one half of the middle
one, a memory of its own for them, and a warp that adds them. Both warps of a program increment the
counter of a query tile, so it says how many halves have been added.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.medium.tiles import CONSUMER_AND_WARP, DQ_FULL
from lockstep.kernels.hopper.backward.narrow.dq_sums import await_sums
from lockstep.kernels.hopper.backward.turns import await_count
from lockstep.kernels.hopper.common.accumulator import as_registers
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_store,
    tma_store_wait,
)
from lockstep.kernels.hopper.common.named_barriers import arrive, await_all
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers

SUMS_ROWS = gl.constexpr(48)  # of 256 numbers, of a tile


@aggregate
class DqSums:
    """Tiles of dQ on their way from the consumers to the sums. Named barriers from DQ_FULL on
    complete when a consumer has written its half, `empty_bar` when the copy engine has read it."""

    chunk_smem: gl.shared_memory_descriptor  # [2, 16, 256] fp32: a chunk of each consumer
    middle_smem: gl.shared_memory_descriptor  # [2, 8, 256] fp32: its half of the middle one
    empty_bar: gl.shared_memory_descriptor  # [2, 1]

    @gluon.constexpr_function
    def __init__(self, chunk_smem, middle_smem, empty_bar):
        self.chunk_smem = chunk_smem
        self.middle_smem = middle_smem
        self.empty_bar = empty_bar

    @gluon.jit
    def create(chunk_desc, middle_desc):
        return DqSums(allocate_tiles(chunk_desc, 2), allocate_tiles(middle_desc, 2), barriers(2, 1))

    @gluon.jit
    def wait_empty(self, n, W: gl.constexpr):
        """Consumer: wait until its half of the n-th tile may be staged."""
        mbarrier.wait(self.empty_bar.index(W), (n & 1) ^ 1)

    @gluon.jit
    def stage_chunk(self, chunk, W: gl.constexpr):
        """Consumer: write an accumulator [64, 64], to be added once it has been fenced and
        published."""
        self.chunk_smem.index(W).store(as_registers(chunk))

    @gluon.jit
    def stage_middle(self, middle, W: gl.constexpr):
        """Consumer: write its other one [64, 32] likewise."""
        self.middle_smem.index(W).store(as_registers(middle))

    @gluon.jit
    def publish(self, W: gl.constexpr, is_there):
        """Consumer: its half of a tile, if it is there, may be added."""
        if is_there:
            arrive(DQ_FULL + W, CONSUMER_AND_WARP)


@gluon.jit
def add_halves(W: gl.constexpr, queue, dq_sums, chunk_desc, middle_desc, turn_ptr):
    """Partition of one warp: adds the halves of consumer W, each once it is there and all parts
    before it have been added."""
    calls = 0
    while queue.has(calls):
        loop, _ = queue.read(calls)
        tile = loop.first_tile
        t = loop.first_number()
        head = tile * 0
        for n in range(loop.n_steps):
            turn = loop.turn(t)
            await_count(turn_ptr + tile, 2 * turn, True)
            await_all(DQ_FULL + W, CONSUMER_AND_WARP)
            chunk_smem = dq_sums.chunk_smem.index(W)
            middle_smem = dq_sums.middle_smem.index(W)
            chunk_row = tile * SUMS_ROWS + W * 32
            middle_row = tile * SUMS_ROWS + 16 + W * 8
            if turn == 0:
                # The first part is stored, so that sums need not be set to 0 before.
                tma_store(chunk_desc, [chunk_row, 0], chunk_smem)
                tma_store(middle_desc, [middle_row, 0], middle_smem)
            else:
                tma_add(chunk_desc, [chunk_row, 0], chunk_smem)
                tma_add(middle_desc, [middle_row, 0], middle_smem)
            tma_store_wait(0)
            mbarrier.arrive(dq_sums.empty_bar.index(W), count=1)
            await_sums(n)
            gl.atomic_add(turn_ptr + tile, 1, sem="release", scope="gpu")
            tile, t, head = loop.next_in_group(tile, t, head)
        calls += 1
