"""dQ, summed in one fixed order: of the key tiles that see a query tile, the first adds first.

Every loop adds its parts of dQ to fp32 sums in global memory. The counter `turn[q_tile]` says how
many parts have been added to a query tile. A program waits until it equals the number of key tiles
before its own, adds its part, and only then increments it. So each sum has one order, whatever
runs when.

Waits are short: all loops begin at the last query tile, and tickets go round several heads, so
loops over the same tiles begin some time apart and stay so. Query heads that share keys take turns
at each tile: if one came after the other, a loop that a mask makes shorter would be done with a
head before a longer one is, and would have to wait at the next. And there is no deadlock: the keys
of a head are drawn in ascending order, and a program works on its tickets in the order it drew
them. So the lowest ticket that is not done is being worked on, and waits for none.

The consumers do not wait for the order. They write their parts to shared memory and go on. Two
warps, for every other part each, wait for the counter, have the copy engine add the part, and
increment the counter (`add_parts.py`).

When the last part of a query tile has been added, its sums may come back and leave as dQ
(`last_part.py`); where that would make some loops too long, a launch of its own does it
(`rows.finish_queries`): `call.is_finished_early`.

Where all sequences have a single key tile, a part is all of dQ (WHOLE). It is staged as dQ is, in
16 bits, and stored: there are no sums, no order, and no launch that reads them.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.narrow.tiles import CONSUMERS_AND_WARP, DQ_FULL, PARTS
from lockstep.kernels.hopper.common.accumulator import as_registers
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_add,
    tma_store,
)
from lockstep.kernels.hopper.common.named_barriers import arrive
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers


@gluon.constexpr_function
def rest_width(columns):
    """How many columns of dQ the second consumer multiplies, by those of a head: the first has 64.
    Up to 64 both have all columns, of one half of the rows each."""
    return 1 << (columns - 65).bit_length() if columns > 64 else 64


@aggregate
class DqSums:
    """Tiles of dQ on their way from the consumers to the sums. Named barriers from DQ_FULL on
    complete when both consumers have written a tile, `empty_bar` when the copy engine has read it.

    Slots are found by `%`: with `slot_of`, the kernel for D 128 without a mask was 3 to 4 %
    slower."""

    parts_smem: gl.shared_memory_descriptor  # [PARTS, 32, 256] fp32
    empty_bar: gl.shared_memory_descriptor  # [PARTS, 1]
    scale: gl.tensor
    back_bar: gl.shared_memory_descriptor  # [PARTS, 1]: sums of a tile are back
    WHOLE: gl.constexpr  # a part is all of dQ: parts_smem [2 · PARTS, 1, 1, 1, 64, 64], 16 bits
    FINISHED: gl.constexpr  # the last part of a tile makes dQ of its sums

    @gluon.constexpr_function
    def __init__(self, parts_smem, empty_bar, scale, back_bar, WHOLE, FINISHED):
        self.parts_smem = parts_smem
        self.empty_bar = empty_bar
        self.scale = scale
        self.back_bar = back_bar
        self.WHOLE = gl.constexpr(WHOLE)
        self.FINISHED = gl.constexpr(FINISHED)

    @gluon.jit
    def create(sums_desc, scale, WHOLE: gl.constexpr = False, FINISHED: gl.constexpr = False):
        if WHOLE:
            parts_smem = allocate_tiles(sums_desc, 2 * PARTS)
        else:
            shape: gl.constexpr = [PARTS, 32, 256]
            parts_smem = gl.allocate_shared_memory(gl.float32, shape, sums_desc.layout)
        empty_bar = barriers(PARTS, 1)
        back_bar = empty_bar
        if FINISHED:
            back_bar = barriers(PARTS, 1)
        return DqSums(parts_smem, empty_bar, scale, back_bar, WHOLE, FINISHED)

    @gluon.jit
    def wait_empty(self, n):
        """Consumer: wait until the n-th tile may be staged."""
        mbarrier.wait(self.empty_bar.index(n % PARTS), ((n // PARTS) & 1) ^ 1)

    @gluon.jit
    def stage(self, n, dq, half: gl.constexpr):
        """Consumer: write its accumulator [64, ·], its part of the n-th tile, to be added once it
        has been fenced and published.

        The sums keep the order of the registers (`as_registers`). So threads write 16 bytes side by
        side, and nothing is rearranged on the way; `rows.finish_queries` reads them back."""
        if self.WHOLE:
            half_smem = self.parts_smem.index(n % PARTS * 2 + half).reshape([64, 64])
            # Whatever is not finite is NaN, as `rows.finish_queries` has it.
            dq = (dq + dq * 0.0) * self.scale
            half_smem.slice(0, dq.shape[1], dim=1).store(dq.to(half_smem.dtype))
        else:
            part_smem = self.parts_smem.index(n % PARTS)
            part_smem.slice(half * 16, dq.shape[1] // 4, dim=0).store(as_registers(dq))

    @gluon.jit
    def publish(self, n, is_there):
        """Consumer: its half of the n-th tile, if it is there, may be added."""
        if is_there:
            arrive(DQ_FULL + n % PARTS, CONSUMERS_AND_WARP)


@gluon.jit
def await_sums(token):
    """Wait until what this warp had the copy engine write has been written, not only read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r",
        [token],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_part(sums_desc, tile, part_smem, is_first, COLUMNS: gl.constexpr):
    """Have the copy engine add a part to the sums of a tile, block by block."""
    ROWS: gl.constexpr = sums_desc.block_shape[0]
    N: gl.constexpr = (64 + rest_width(COLUMNS)) // (4 * ROWS)
    shape: gl.constexpr = [32 // ROWS, ROWS, 256]
    blocks = reinterpret(part_smem, gl.float32, shape, sums_desc.layout)
    if is_first:
        # The first part is stored, so that sums need not be set to 0 before.
        for i in gl.static_range(N):
            tma_store(sums_desc, [(tile * N + i) * ROWS, 0], blocks.index(i))
    else:
        for i in gl.static_range(N):
            tma_add(sums_desc, [(tile * N + i) * ROWS, 0], blocks.index(i))
