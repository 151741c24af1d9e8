"""Values that are not finite, in a kernel whose steps must not depend on them.

The tensor cores make NaN of 0 · NaN and 0 · inf, so a value that a row does not see would reach it.
Without constant time, rows that are not finite are computed again (`second_pass.py`). Here two more
warps, the inspectors, look at every block of values that the mask of a tile cuts, each at one half
of its keys, before consumers multiply it: what is not finite in it becomes 0, and the *flag* of its
key NaN. Consumers make the weight NaN where a row sees such a key. So a row that sees a value that
is not finite in such a block is NaN in all columns, its lse is not, and no other row changes.

Every block that is cut takes the same steps, whatever it holds. Each inspector is a partition of
one warp: warps of one partition would have to wait for each other before every store.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.finite_words import finite
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from lockstep.kernels.hopper.common.shared_memory import barriers

INSPECTORS = gl.constexpr(2)
# A panel has rows of 128 bytes: swizzling moves 16 of them inside a row, never to another.
_ROW_WORDS = gl.constexpr(32)
# Rows that a warp looks at together, 16 bytes of each by one thread; and how many such chunks are
# in flight, for which a thread has registers.
_ROWS, _CHUNKS = gl.constexpr(4), gl.constexpr(2)


@aggregate
class Flags:
    """Flags of the keys in each slot of the ring of values; `clean_bar` completes when a block has
    been inspected."""

    flags_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_KV] fp32
    clean_bar: gl.shared_memory_descriptor  # [STAGES, 1]

    @gluon.constexpr_function
    def __init__(self, flags_smem, clean_bar):
        self.flags_smem = flags_smem
        self.clean_bar = clean_bar

    @gluon.jit
    def create(STAGES: gl.constexpr, BLOCK_KV: gl.constexpr):
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        flags_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_KV], flat)
        return Flags(flags_smem, barriers(STAGES, INSPECTORS))

    @gluon.jit
    def read(self, ring, i, LAYOUT: gl.constexpr):
        """Consumer: the flags of the i-th block, once it has been inspected."""
        slot = ring.slot(i)
        mbarrier.wait(self.clean_bar.index(slot), ring.phase(i))
        return self.flags_smem.index(slot).load(LAYOUT)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.constexpr_function
def _bits(step):
    """Bits `step` and 16 + step of an int32."""
    bits = 0x00010001 << step
    return bits - (1 << 32) if bits >> 31 else bits


@gluon.jit
def _clean_panels(tile, part: gl.constexpr, found):
    """Set what is not finite in one half of values [BLOCK_KV, ·] to 0; `found` has bits i and
    16 + i set if any was in the i-th step."""
    IN_PANEL: gl.constexpr = tile.shape[0] // _ROWS
    STEPS: gl.constexpr = IN_PANEL // INSPECTORS
    PANELS: gl.constexpr = tile.shape[1] // (2 * _ROW_WORDS)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = found.type.layout
    words = reinterpret(tile, gl.int32, [PANELS * IN_PANEL, _ROWS, _ROW_WORDS], flat)
    for panel in gl.static_range(PANELS):
        for first in gl.static_range(0, STEPS, _CHUNKS):
            # All loads come before the stores, which might be to the same place for all Triton
            # knows.
            cleaned = ()
            for i in gl.static_range(first, first + _CHUNKS):
                chunk = words.index(panel * IN_PANEL + part * STEPS + i).load(layout)
                is_finite = finite(chunk, tile.dtype)
                found = found | (~is_finite & _bits(i))
                cleaned = cleaned + (chunk & is_finite,)  # noqa: RUF005, Gluon does not unpack
            for i in gl.static_range(first, first + _CHUNKS):
                words.index(panel * IN_PANEL + part * STEPS + i).store(cleaned[i - first])
    return found


@gluon.jit
def clean(ring, i, part: gl.constexpr, flags_smem):
    """Set what is not finite in one half of the i-th tile of values to 0, and the flags [BLOCK_KV]
    of its keys."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [_ROWS, 8], [1, 1], [1, 0])
    found = gl.full([_ROWS, _ROW_WORDS], 0, gl.int32, by_row)
    tile = ring.tile(i)
    found = _clean_panels(tile, part, found)
    if tile.shape[1] < ring.COLUMNS:
        rest = ring.rest_smem.index(ring.ring.slot(i))
        found = _clean_panels(rest.reshape([rest.shape[3], rest.shape[4]]), part, found)
    bits = gl.reduce(found | (found >> 16), 1, _either)  # [_ROWS]
    # The eight threads that have a row take the flags of a step, or of two, each.
    STEPS: gl.constexpr = tile.shape[0] // (_ROWS * INSPECTORS)
    by_step: gl.constexpr = gl.BlockedLayout([STEPS // 8, 1], [8, _ROWS], [1, 1], [0, 1])
    bits = gl.convert_layout(bits, gl.SliceLayout(0, by_step), assert_trivial=True)
    step = gl.arange(0, STEPS, gl.SliceLayout(1, by_step))
    found = (gl.expand_dims(bits, 0) >> gl.expand_dims(step, 1)) & 1
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flags = reinterpret(flags_smem, gl.float32, [INSPECTORS, STEPS, _ROWS], flat)
    flags.index(part).store(gl.where(found != 0, float("nan"), 0.0))


@gluon.jit
def inspect(part: gl.constexpr, program):
    """Partition of one warp: every block of every tile, in the order of the producer."""
    schedule = program.schedule
    seen = 0
    tiles = 0
    tile = program.tile_queue.read(tiles)
    while tile.exists:
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        inner_begin, inner_end = schedule.inner_blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        for block in range(begin, end):
            program.v.wait(seen)
            slot = program.v.ring.slot(seen)
            if (block < inner_begin) | (block >= inner_end):
                clean(program.v, seen, part, program.flags.flags_smem.index(slot))
                fence_async_shared()
            mbarrier.arrive(program.flags.clean_bar.index(slot), count=1)
            program.v.release(seen)
            seen += 1
        tiles += 1
        tile = program.tile_queue.read(tiles)
