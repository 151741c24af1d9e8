"""Query rows on their way to shared memory.

All SMs begin to read keys at the same time, and what is asked for behind these comes later, also
from L2. So queries are asked for before the first keys are. Of tiles of up to 128 columns they are
prefetched into L2 (`prefetch.py`), so that keys wait for nothing. Those of more columns are asked
for by the consumer, and the producer waits for it once.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    async_copy,
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
)
from lockstep.kernels.hopper.common.shared_memory import barriers
from lockstep.kernels.hopper.decode.head_columns import power_of_two


@aggregate
class Queries:
    """Shared memory for the query rows of a run."""

    tile: gl.shared_memory_descriptor  # [rows, ·]
    asked_bar: gl.shared_memory_descriptor  # [1, 1]: the consumer has asked for those of a run
    ORDER: gl.constexpr  # "prefetched", "asked for first" or "with keys"

    @gluon.constexpr_function
    def __init__(self, tile, asked_bar, ORDER):
        self.tile = tile
        self.asked_bar = asked_bar
        self.ORDER = gl.constexpr(ORDER)

    @gluon.jit
    def create(dtype: gl.constexpr, N: gl.constexpr, D: gl.constexpr, ORDER: gl.constexpr):
        """Room for N rows."""
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        tile = gl.allocate_shared_memory(dtype, [N, power_of_two(D)], layout)
        asked_bar = tile  # in place of none
        if ORDER == "asked for first":
            asked_bar = barriers(1, 1)
        return Queries(tile, asked_bar, ORDER)

    @gluon.jit
    def await_first(self, n):
        """Producer: before it asks for keys of the n-th run, the consumer has asked for the queries
        of the first."""
        if self.ORDER == "asked for first":
            mbarrier.wait(self.asked_bar.index(0), 0, pred=n == 0)

    @gluon.jit
    def load(self, rows, sizes, run, FEW: gl.constexpr = 0, THERE: gl.constexpr = ROWS):
        """Consumer: the queries of a run, where products read them; THERE rows, if it has no
        more."""
        # Of the run before, warps that are behind may still read here.
        await_warps()
        rows.copy_queries(sizes, run, self.tile, FEW, THERE)
        async_copy.commit_group()
        if self.ORDER == "asked for first":
            await_warps()
            mbarrier.arrive(self.asked_bar.index(0), count=1)
        async_copy.wait_group(0)
        fence_async_shared()
        await_warps()
