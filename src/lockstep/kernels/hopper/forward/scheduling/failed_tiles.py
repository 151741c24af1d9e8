"""Tiles that need a second pass: consumers report them, the scheduler warp sends them again."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.common.shared_memory import allocate_numbers, barriers


@gluon.jit
def _either(a, b):
    return a | b


@aggregate
class FailedTiles:
    """A consumer's number has bit i % 32 set if rows of its i-th tile failed. All are written when
    `done_bar` completes."""

    bits_smem: gl.shared_memory_descriptor  # [CONSUMERS, 1] int32
    done_bar: gl.shared_memory_descriptor  # [1, 1]
    CONSUMERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, bits_smem, done_bar, CONSUMERS):
        self.bits_smem = bits_smem
        self.done_bar = done_bar
        self.CONSUMERS = gl.constexpr(CONSUMERS)

    @gluon.jit
    def create(CONSUMERS: gl.constexpr):
        return FailedTiles(allocate_numbers(CONSUMERS), barriers(1, CONSUMERS), CONSUMERS)

    @gluon.jit
    def report(self, c: gl.constexpr, failed):
        """Consumer `c`, after its last tile; `failed` [ROWS] has the bits of each row."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        bits = gl.reduce(failed, 0, _either)
        self.bits_smem.index(c).store(gl.full([1], 0, gl.int32, one) | bits)
        mbarrier.arrive(self.done_bar.index(0), count=1)

    @gluon.jit
    def collect(self):
        """The bits of all consumers; waits for all of them."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        mbarrier.wait(self.done_bar.index(0), 0)
        bits = gl.full([1], 0, gl.int32, one)
        for c in gl.static_range(self.CONSUMERS):
            bits = bits | self.bits_smem.index(c).load(one)
        return gl.reduce(bits, 0, _either)


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
