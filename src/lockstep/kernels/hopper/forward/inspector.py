"""Values that are not finite, in a kernel whose steps must not depend on them.

The tensor cores make NaN of 0 · NaN and 0 · inf, so a value that a row does not see would reach it.
Without constant time, rows that are not finite are computed again (`second_pass.py`). Here two more
warps, the inspectors, look at every block of values that the mask of a tile cuts, each at one half
of its keys, before consumers multiply it: what is not finite in it becomes 0. A row that sees the
key of such a value is NaN in all columns, its lse is not, and no other row changes.

Where rows see all keys up to one of them, consumers need no more than the *first bad key* of a
tile. Inspectors leave that of all blocks so far beside each block, and consumers read it with the
last one. Under a window, each key has a *flag*, 0 or NaN, which consumers add to the weights of the
rows that see it.

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
NO_KEY = gl.constexpr(0x7FFFFFFF)  # beyond all
# A panel has rows of 128 bytes: swizzling moves 16 of them inside a row, never to another.
_ROW_WORDS = gl.constexpr(32)
# Rows that a warp looks at together, 16 bytes of each by one thread; and how many such chunks are
# in flight, for which a thread has registers.
_ROWS, _CHUNKS = gl.constexpr(4), gl.constexpr(4)


@aggregate
class Flags:
    """What inspectors found, for each slot of the ring of values; `clean_bar` completes when a
    block has been inspected."""

    # First bad keys [STAGES · INSPECTORS, 1] int32; under a window, flags [STAGES, BLOCK_KV] fp32.
    found_smem: gl.shared_memory_descriptor
    clean_bar: gl.shared_memory_descriptor  # [STAGES, 1]

    @gluon.constexpr_function
    def __init__(self, found_smem, clean_bar):
        self.found_smem = found_smem
        self.clean_bar = clean_bar

    @gluon.jit
    def create(STAGES: gl.constexpr, BLOCK_KV: gl.constexpr, HAS_LEFT: gl.constexpr):
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        if HAS_LEFT:
            found_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_KV], flat)
        else:
            found_smem = gl.allocate_shared_memory(gl.int32, [STAGES * INSPECTORS, 1], flat)
        return Flags(found_smem, barriers(STAGES, INSPECTORS))

    @gluon.jit
    def await_clean(self, ring, i):
        """Consumer: the i-th block has been inspected."""
        mbarrier.wait(self.clean_bar.index(ring.slot(i)), ring.phase(i))

    @gluon.jit
    def read(self, ring, i, LAYOUT: gl.constexpr):
        """Consumer, under a window: the flags of the i-th block, once it has been inspected."""
        self.await_clean(ring, i)
        return self.found_smem.index(ring.slot(i)).load(LAYOUT)

    @gluon.jit
    def first_bad_key(self, ring, i):
        """Consumer: the first bad key of the i-th block, which has been inspected, and of those
        before it in its tile."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        first = NO_KEY
        for part in gl.static_range(INSPECTORS):
            found = self.found_smem.index(ring.slot(i) * INSPECTORS + part).load(layout)
            first = gl.minimum(first, gl.max(found, 0))
        return first


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
def clean(ring, i, part: gl.constexpr):
    """Set what is not finite in one half of the i-th tile of values to 0. Returns bits [_ROWS]: the
    i-th is set where the i-th step found such values in the row of each."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [_ROWS, 8], [1, 1], [1, 0])
    found = gl.full([_ROWS, _ROW_WORDS], 0, gl.int32, by_row)
    tile = ring.tile(i)
    found = _clean_panels(tile, part, found)
    if tile.shape[1] < ring.COLUMNS:
        rest = ring.rest_smem.index(ring.ring.slot(i))
        found = _clean_panels(rest.reshape([rest.shape[3], rest.shape[4]]), part, found)
    return gl.reduce(found | (found >> 16), 1, _either)


@gluon.jit
def first_bad_key(bits, part: gl.constexpr, BLOCK_KV: gl.constexpr):
    """The first key of one half of a block that `clean` found bad, counted from the block's."""
    STEPS: gl.constexpr = BLOCK_KV // (_ROWS * INSPECTORS)
    bits = bits & 0xFFFF
    # The number of the lowest bit is the exponent of that bit as a float.
    lowest = (bits & -bits).to(gl.float32).to(gl.int32, bitcast=True)
    step = (lowest >> 23) - 127
    row = gl.arange(0, _ROWS, bits.type.layout)
    return gl.min(gl.where(bits == 0, NO_KEY, (part * STEPS + step) * _ROWS + row), 0)


@gluon.jit
def store_flags(bits, part: gl.constexpr, flags_smem):
    """The flags [BLOCK_KV] of one half of the keys of a block, from what `clean` returned."""
    # The eight threads that have a row take the flags of a step, or of two, each.
    STEPS: gl.constexpr = flags_smem.shape[0] // (_ROWS * INSPECTORS)
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
    BLOCK_KV: gl.constexpr = schedule.BLOCK_KV
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    seen = 0
    tiles = 0
    tile = program.tile_queue.read(tiles)
    while tile.exists:
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        inner_begin, inner_end = schedule.inner_blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        first = end * 0 + NO_KEY
        for block in range(begin, end):
            program.v.wait(seen)
            slot = program.v.ring.slot(seen)
            if (block < inner_begin) | (block >= inner_end):
                bits = clean(program.v, seen, part)
                if schedule.HAS_LEFT:
                    store_flags(bits, part, program.flags.found_smem.index(slot))
                else:
                    found = first_bad_key(bits, part, BLOCK_KV)
                    # NO_KEY stays what it is.
                    found = gl.where(found == NO_KEY, found, block * BLOCK_KV + found)
                    first = gl.minimum(first, found)
                fence_async_shared()
            if not schedule.HAS_LEFT:
                found_smem = program.flags.found_smem.index(slot * INSPECTORS + part)
                found_smem.store(gl.full([1], first, gl.int32, one))
            mbarrier.arrive(program.flags.clean_bar.index(slot), count=1)
            program.v.release(seen)
            seen += 1
        tiles += 1
        tile = program.tile_queue.read(tiles)
