"""Values that are not finite, in a kernel whose steps must not depend on them.

The tensor cores make NaN of 0 · NaN and 0 · inf, so a value that a row does not see would reach it.
Without constant time, rows that are not finite are computed again (`second_pass.py`). Here two
warps of their own, the *cleaner*, look at every block of values that the mask of a tile cuts,
before any consumer multiplies it: what is not finite in it becomes 0. A row that sees the key of
such a value is NaN in all columns, its lse is not, and no other row changes.

Where rows see all keys up to one of them, a consumer needs no more than the *first bad key* of a
tile: each warp that cleans leaves that of its part of a block, and consumers keep the lowest of all
that they multiply. Under a window, each key has a *flag*, 0 or NaN, which consumers add to the
weights of the rows that see it.

Every block that is cut takes the same steps, whatever it holds. Cleaner and consumers count such
blocks, and the n-th has barrier n % PLACES. The one PLACES further on cannot be cleaned before all
consumers have released this one: no ring has more slots. The cleaner releases blocks of values as
consumers do, so that it is never a round of the ring behind them.
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
from lockstep.kernels.hopper.common.shared_memory import barriers, phase_of, slot_of

PLACES = gl.constexpr(8)
NO_KEY = gl.constexpr(0x7FFFFFFF)  # beyond all
CLEANER_WARPS = gl.constexpr(2)
# 32-bit words of a row of a panel. Swizzling moves 16 bytes inside such a row, never to another.
_WORDS = gl.constexpr(32)
_ROWS = gl.constexpr(16)  # that are cleaned at once, a few registers for each thread


@aggregate
class Cleaned:
    """What was found in blocks that are cut; `clean_bar` completes when a block is clean."""

    # First bad keys [PLACES, CLEANER_WARPS] int32; under a window, flags of _ROWS keys
    # [PLACES · BLOCK_KV / _ROWS, _ROWS] fp32.
    found_smem: gl.shared_memory_descriptor
    clean_bar: gl.shared_memory_descriptor  # [PLACES, 1]

    @gluon.constexpr_function
    def __init__(self, found_smem, clean_bar):
        self.found_smem = found_smem
        self.clean_bar = clean_bar

    @gluon.jit
    def create(BLOCK_KV: gl.constexpr, HAS_LEFT: gl.constexpr):
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        if HAS_LEFT:
            shape: gl.constexpr = [PLACES * BLOCK_KV // _ROWS, _ROWS]
            found_smem = gl.allocate_shared_memory(gl.float32, shape, flat)
        else:
            found_smem = gl.allocate_shared_memory(gl.int32, [PLACES, CLEANER_WARPS], flat)
        return Cleaned(found_smem, barriers(PLACES, 1))

    @gluon.jit
    def wait(self, n, pred=True):
        """Wait until the n-th block is clean."""
        mbarrier.wait(self.clean_bar.index(slot_of(n, PLACES)), phase_of(n, PLACES), pred=pred)

    @gluon.jit
    def flags(self, n, LAYOUT: gl.constexpr):
        """The flags of the n-th block, under a window."""
        self.wait(n)
        flat: gl.constexpr = self.found_smem.layout
        KEYS: gl.constexpr = self.found_smem.shape[0] * _ROWS // PLACES
        flags = reinterpret(self.found_smem, gl.float32, [PLACES, KEYS], flat)
        return flags.index(slot_of(n, PLACES)).load(LAYOUT)

    @gluon.jit
    def first_bad_key(self, n):
        """The first bad key of the n-th block, which is clean."""
        all_of_them: gl.constexpr = gl.BlockedLayout([CLEANER_WARPS], [32], [gl.num_warps()], [0])
        return gl.min(self.found_smem.index(slot_of(n, PLACES)).load(all_of_them), 0)


@aggregate
class Cuts:
    """What a consumer knows about blocks that are cut."""

    n: gl.tensor  # how many there were
    bad: gl.tensor  # the first bad key of those that it has multiplied in this tile

    @gluon.constexpr_function
    def __init__(self, n, bad):
        self.n = n
        self.bad = bad

    @gluon.jit
    def none(number):
        """Before the first tile; any number, which says what numbers are."""
        return Cuts(number * 0, number * 0)

    @gluon.jit
    def of_new_tile(self):
        """The same before anything of a tile is multiplied."""
        return Cuts(self.n, self.n * 0 + NO_KEY)

    @gluon.jit
    def with_product(self, program, is_cut, n):
        """The same with a block that has been awaited, the n-th if it is cut."""
        if program.build.CLEANS and not program.schedule.HAS_LEFT:
            bad = self.bad
            if is_cut:
                bad = gl.minimum(bad, program.cleaned.first_bad_key(n))
            return Cuts(self.n, bad)
        else:  # noqa: RET505, Gluon would go on and return both
            return self


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
def _clean(program, block, i, n):
    """Clean the n-th block that is cut, `block` of a tile and the i-th in all."""
    values = program.v
    KEYS: gl.constexpr = program.schedule.BLOCK_KV
    tile = values.tile(i)
    found_smem = program.cleaned.found_smem
    place = slot_of(n, PLACES)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [CLEANER_WARPS, 1], [1, 0])
    bad = gl.full([_ROWS, 8], NO_KEY, gl.int32, layout)
    row = gl.expand_dims(gl.arange(0, _ROWS, gl.SliceLayout(1, layout)), 1)
    for j in range(KEYS // _ROWS):
        found = _clean_panels(tile, j)
        if tile.shape[1] < values.COLUMNS:
            rest = values.rest_smem.index(values.ring.slot(i))
            found = found & _clean_panels(rest.reshape([rest.shape[3], rest.shape[4]]), j)
        found = gl.convert_layout(found, layout, assert_trivial=True)
        if program.schedule.HAS_LEFT:
            is_finite = gl.reduce(found, 1, _both) == -1
            flags = gl.where(is_finite, 0.0, float("nan"))
            found_smem.index(place * (KEYS // _ROWS) + j).store(flags)
        else:
            key = block * KEYS + j * _ROWS + row
            bad = gl.minimum(bad, gl.where(found == -1, NO_KEY, key))
    if not program.schedule.HAS_LEFT:
        # Of every eight rows, a warp has four.
        of_warps = gl.min(bad.reshape([_ROWS // (4 * CLEANER_WARPS), CLEANER_WARPS, 4, 8]), 0)
        found_smem.index(place).store(gl.min(of_warps.reshape([CLEANER_WARPS, 32]), 1))
    fence_async_shared()
    mbarrier.arrive(program.cleaned.clean_bar.index(place), count=1)


@gluon.jit
def clean_blocks(program):
    """The cleaner: every block of values, in the order in which they come."""
    schedule = program.schedule
    seen = 0
    n = 0
    tiles = 0
    tile = program.tile_queue.read(tiles)
    while tile.exists:
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        whole_begin, whole_end = schedule.inner_blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        for block in range(begin, end):
            program.v.wait(seen)
            if (block < whole_begin) | (block >= whole_end):
                _clean(program, block, seen, n)
                n += 1
            program.v.release(seen)
            seen += 1
        tiles += 1
        tile = program.tile_queue.read(tiles)


@gluon.jit
def count_cut(program, rows, block, cuts):
    """Consumer: `cuts` with one more block, if a mask cuts it."""
    n = cuts.n
    if program.build.CLEANS:
        n += rows.is_cut(block).to(gl.int32)
    return Cuts(n, cuts.bad)
