"""Values that are not finite, in a kernel whose steps must not depend on them.

The tensor cores make NaN of 0 · NaN and 0 · inf, so a value that a row does not see would reach it.
Without constant time, rows that are not finite are computed again (`second_pass.py`). Here two
warps of their own, the *cleaner*, look at every block of values that the mask of a tile cuts,
before any consumer multiplies it: what is not finite in it becomes 0. A row that sees the key of
such a value is NaN in all columns, its lse is not, and no other row changes.

Where rows see all keys up to one of them, a consumer needs no more than the *first bad key* of a
tile: each warp that cleans leaves that of its part of all blocks that are cut. Under a window, each
key of a block has a *flag*, 0 or NaN, which consumers add to the weights of the rows that see it.

Every block goes through the cleaner, so that consumers need not know which are cut: they wait for
its barrier in place of that of the ring, and it has the slots and phases of the ring. Blocks that
are cut take the same steps, whatever they hold.
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
from lockstep.kernels.hopper.common.shared_memory import barriers, slot_of

NO_KEY = gl.constexpr(0x7FFFFFFF)  # beyond all
CLEANER_WARPS = gl.constexpr(2)
# First bad keys of so many tiles are kept: the cleaner is ahead of a consumer by no more than the
# blocks of a ring.
KEPT_TILES = gl.constexpr(8)
# 32-bit words of a row of a panel. Swizzling moves 16 bytes inside such a row, never to another.
_WORDS = gl.constexpr(32)
_ROWS = gl.constexpr(16)  # that are cleaned at once, a few registers for each thread


@aggregate
class Cleaned:
    """What was found in blocks that are cut; `clean_bar` completes when a block is clean."""

    # First bad keys [KEPT_TILES, CLEANER_WARPS] int32; under a window, flags of _ROWS keys
    # [STAGES · BLOCK_KV / _ROWS, _ROWS] fp32.
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
            shape: gl.constexpr = [STAGES * BLOCK_KV // _ROWS, _ROWS]
            found_smem = gl.allocate_shared_memory(gl.float32, shape, flat)
        else:
            found_smem = gl.allocate_shared_memory(gl.int32, [KEPT_TILES, CLEANER_WARPS], flat)
        return Cleaned(found_smem, barriers(STAGES, 1))

    @gluon.jit
    def wait(self, ring, i):
        """Wait until the i-th block of a ring of values is clean."""
        mbarrier.wait(self.clean_bar.index(ring.slot(i)), ring.phase(i))

    @gluon.jit
    def flags(self, ring, i, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
        """The flags of the i-th block, under a window."""
        self.wait(ring, i)
        flat: gl.constexpr = self.found_smem.layout
        flags = reinterpret(self.found_smem, gl.float32, [ring.STAGES, KEYS], flat)
        return flags.index(ring.slot(i)).load(LAYOUT)

    @gluon.jit
    def first_bad_key(self, tiles):
        """The first bad key of a tile by its number, all of whose blocks are clean."""
        all_of_them: gl.constexpr = gl.BlockedLayout([CLEANER_WARPS], [32], [gl.num_warps()], [0])
        return gl.min(self.found_smem.index(slot_of(tiles, KEPT_TILES)).load(all_of_them), 0)


@gluon.jit
def _both(a, b):
    return a & b


@gluon.jit
def _rows_of(tile):
    """A tile of values as 32-bit words [panels · keys / _ROWS, _ROWS, _WORDS]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    N: gl.constexpr = tile.shape[0] * tile.shape[1] // (2 * _WORDS * _ROWS)
    return reinterpret(tile, gl.int32, [N, _ROWS, _WORDS], flat)


@gluon.jit
def _clean_rows(rows, dtype: gl.constexpr):
    """Set what is not finite in _ROWS rows of a panel to 0. Returns words [_ROWS, 8], of which
    those of a row with such a value have bits that are not set."""
    # A thread has 16 bytes of a row, a warp four rows.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [CLEANER_WARPS, 1], [1, 0])
    words = rows.load(layout)
    is_finite = finite(words, dtype)
    rows.store(words & is_finite)
    return gl.reduce(is_finite.reshape([_ROWS, 8, _WORDS // 8]), 2, _both)


@gluon.jit
def _clean_panels(tile, j):
    """`_clean_rows` of the j-th rows of all panels of a tile."""
    PANELS: gl.constexpr = tile.shape[1] // (2 * _WORDS)
    rows = _rows_of(tile)
    found = _clean_rows(rows.index(j), tile.dtype)
    for panel in gl.static_range(1, PANELS):
        at = panel * (tile.shape[0] // _ROWS) + j
        found = found & _clean_rows(rows.index(at), tile.dtype)
    return found


@gluon.jit
def _clean(program, block, i, bad):
    """Clean `block` of a tile, the i-th in all. Returns the first bad keys [_ROWS, 8] of threads,
    `bad` before it; under a window, the flags of its keys are written."""
    values = program.v
    KEYS: gl.constexpr = program.schedule.BLOCK_KV
    tile = values.tile(i)
    slot = values.ring.slot(i)
    layout: gl.constexpr = bad.type.layout
    row = gl.expand_dims(gl.arange(0, _ROWS, gl.SliceLayout(1, layout)), 1)
    for j in range(KEYS // _ROWS):
        found = _clean_panels(tile, j)
        if tile.shape[1] < values.COLUMNS:
            rest = values.rest_smem.index(slot)
            found = found & _clean_panels(rest.reshape([rest.shape[3], rest.shape[4]]), j)
        found = gl.convert_layout(found, layout, assert_trivial=True)
        if program.schedule.HAS_LEFT:
            is_finite = gl.reduce(found, 1, _both) == -1
            flags = gl.where(is_finite, 0.0, float("nan"))
            program.cleaned.found_smem.index(slot * (KEYS // _ROWS) + j).store(flags)
        else:
            key = block * KEYS + j * _ROWS + row
            bad = gl.minimum(bad, gl.where(found == -1, NO_KEY, key))
    fence_async_shared()
    return bad


@gluon.jit
def _leave_first_bad_key(program, tiles, bad):
    """Leave the first bad key of a tile, of those [_ROWS, 8] of threads."""
    # Of every eight rows, a warp has four.
    of_warps = gl.min(bad.reshape([_ROWS // (4 * CLEANER_WARPS), CLEANER_WARPS, 4, 8]), 0)
    found_smem = program.cleaned.found_smem.index(slot_of(tiles, KEPT_TILES))
    found_smem.store(gl.min(of_warps.reshape([CLEANER_WARPS, 32]), 1))


@gluon.jit
def clean_blocks(program):
    """The cleaner: every block of values, in the order in which they come."""
    schedule = program.schedule
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [CLEANER_WARPS, 1], [1, 0])
    seen = 0
    tiles = 0
    tile = program.tile_queue.read(tiles)
    while tile.exists:
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        whole_begin, whole_end = schedule.inner_blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        bad = gl.full([_ROWS, 8], NO_KEY, gl.int32, layout)
        for block in range(begin, end):
            program.v.wait(seen)
            if (block < whole_begin) | (block >= whole_end):
                bad = _clean(program, block, seen, bad)
            if not schedule.HAS_LEFT:  # noqa: SIM102, Gluon evaluates all
                if block + 1 == end:
                    _leave_first_bad_key(program, tiles, bad)
            mbarrier.arrive(program.cleaned.clean_bar.index(program.v.ring.slot(seen)), count=1)
            seen += 1
        tiles += 1
        tile = program.tile_queue.read(tiles)
