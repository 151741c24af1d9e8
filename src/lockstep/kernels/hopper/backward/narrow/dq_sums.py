"""Adding up dQ in one fixed order: key tiles take turns at a query tile, the first one first.

Every loop adds its part of dQ to fp32 sums in global memory. `turn[q_tile]` counts the parts that
have arrived. A program waits until it counts the key tiles before its own, adds, and only then
counts itself. So each sum has one order, whatever runs when.

Nobody waits for long. All loops begin at the last query tile, and tickets go round several heads:
loops over the same tiles begin some time apart and stay so. And nobody waits forever: the keys of a
head are handed out in ascending order, and a program goes through its tickets as it drew them. So
whoever has the lowest ticket that is not done is at it, and waits for no one.

The warpgroups with the matrix products see none of this. They leave their part in shared memory
and go on; two warps, for every other part each, wait for the turn, have the copy engine add the
part and pass the turn on (`add_parts`).
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin

from lockstep.kernels.hopper.backward.narrow.tiles import CONSUMERS_AND_WARP, PARTS, STAGED
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
)
from lockstep.kernels.hopper.common.named_barriers import arrive, await_all
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers


@builtin
def _tma_add(desc, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory. Gluon has had a name for it since 3.8."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, tile.handle)


@aggregate
class DqSums:
    """`parts` [PARTS, 32, 256] fp32 are tiles of dQ on their way out. Named barriers from STAGED on
    complete when the consumers have written one, `drained` when it has been read.

    Slots are found by `%`: with `slot_of`, the kernel for D 128 without a mask was 3 to 4 %
    slower."""

    parts: gl.shared_memory_descriptor
    drained: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, parts, drained):
        self.parts = parts
        self.drained = drained

    @gluon.jit
    def create(sums_desc):
        return DqSums(allocate_tiles(sums_desc, PARTS), barriers(PARTS, 1))

    @gluon.jit
    def await_room(self, n):
        """Consumer: wait until the n-th tile may be left."""
        mbarrier.wait(self.drained.index(n % PARTS), ((n // PARTS) & 1) ^ 1)

    @gluon.jit
    def leave(self, n, dq, half: gl.constexpr):
        """Consumer: leave its accumulator [64, 64], one half of the n-th tile, to be added once it
        has been fenced and announced.

        The sums keep the order of the registers: four of thread 0, of thread 1, … of 128 threads,
        then their next four. So threads write 16 bytes side by side, and nothing is rearranged on
        the way; `rows.finish_queries` reads them back.
        """
        # Row 16·warp + 8·i + lane // 4, column 8·j + 2·(lane % 4) + k: register 4·j + 2·i + k.
        dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256])
        self.parts.index(n % PARTS).slice(half * 16, 16, dim=0).store(dq)

    @gluon.jit
    def announce(self, n, is_there):
        """Consumer: its half of the n-th tile, if it is there, may be added."""
        if is_there:
            arrive(STAGED + n % PARTS, CONSUMERS_AND_WARP)


@gluon.jit
def _await_count(count_ptr, count):
    """Spin until the counter holds `count`; what was written before it got there is visible."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; "
        "AGAIN: ld.acquire.gpu.global.u32 $0, [$1]; setp.ne.u32 p, $0, $2; @p bra AGAIN; "
        "fence.proxy.async.global; }",
        "=r,l,r",
        [count_ptr.to(gl.int64), count],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await_sums(token):
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
def add_parts(W: gl.constexpr, queue, dq_sums, sums_desc, turn_ptr):
    """Partition of one warp: adds every PARTS-th part when its turn has come and it is there."""
    calls = 0
    begin = 0
    while queue.has(calls):
        loop, _ = queue.read(calls)
        tile = loop.first_tile
        t = loop.first_number()
        for n in range(begin, begin + loop.n_steps):
            if n % PARTS == W:
                turn = loop.turn(t)
                _await_count(turn_ptr + tile, turn)
                await_all(STAGED + W, CONSUMERS_AND_WARP)
                part = dq_sums.parts.index(W)
                if turn == 0:
                    # Whoever comes first stores, so that nobody has to set the sums to 0 before.
                    tma_store(sums_desc, [tile * 32, 0], part)
                else:
                    _tma_add(sums_desc, [tile * 32, 0], part)
                tma_store_wait(0)
                mbarrier.arrive(dq_sums.drained.index(W), count=1)
                _await_sums(n)
                gl.atomic_add(turn_ptr + tile, 1, sem="release", scope="gpu")
            tile, t = loop.next(tile, t)
        begin += loop.n_steps
        calls += 1
