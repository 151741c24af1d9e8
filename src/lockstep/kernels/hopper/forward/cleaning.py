"""Values that are not finite, in a kernel whose steps must not depend on them.

The tensor cores make NaN of 0 · NaN and 0 · inf, so a value that a row does not see would reach it.
Without constant time, rows that are not finite are computed again (`second_pass.py`). Here the last
two consumers look at every block of values that the mask of a tile cuts, each at one half of its
keys, before any consumer multiplies it: what is not finite in it becomes 0. A row that sees the key
of such a value is NaN in all columns, its lse is not, and no other row changes.

Where rows see all keys up to one of them, a consumer needs no more than the *first bad key* of a
tile: warps that clean leave that of their part of a block, and consumers keep the lowest of all
that they multiply. Under a window, each key has a *flag*, 0 or NaN, which consumers add to the
weights of the rows that see it.

Every block that is cut takes the same steps, whatever it holds. All consumers count such blocks,
and the n-th has barrier n % PLACES. The one PLACES further on cannot be cleaned before all
consumers have released this one: no ring has more slots.
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
CLEANERS = gl.constexpr(2)  # consumers, each for its part of the keys
# 32-bit words of a row of a panel. Swizzling moves 16 bytes inside such a row, never to another.
_WORDS = gl.constexpr(32)
_WARPS = gl.constexpr(4)


@aggregate
class Cleaned:
    """What was found in blocks that are cut; `clean_bar` completes when a block is clean."""

    # First bad keys [PLACES, 8] int32; under a window, flags [PLACES, BLOCK_KV] fp32.
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
            found_smem = gl.allocate_shared_memory(gl.float32, [PLACES, BLOCK_KV], flat)
        else:
            found_smem = gl.allocate_shared_memory(gl.int32, [PLACES, CLEANERS * _WARPS], flat)
        return Cleaned(found_smem, barriers(PLACES, CLEANERS))

    @gluon.jit
    def wait(self, n, pred=True):
        """Wait until the n-th block is clean."""
        mbarrier.wait(self.clean_bar.index(slot_of(n, PLACES)), phase_of(n, PLACES), pred=pred)

    @gluon.jit
    def flags(self, n, LAYOUT: gl.constexpr):
        """The flags of the n-th block, under a window."""
        self.wait(n)
        return self.found_smem.index(slot_of(n, PLACES)).load(LAYOUT)

    @gluon.jit
    def first_bad_key(self, n):
        """The first bad key of the n-th block, which is clean."""
        FOUND: gl.constexpr = CLEANERS * _WARPS
        all_of_them: gl.constexpr = gl.BlockedLayout([FOUND], [32], [_WARPS], [0])
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
            found = gl.minimum(self.bad, program.cleaned.first_bad_key(n))
            return Cuts(self.n, gl.where(is_cut, found, self.bad))
        else:  # noqa: RET505, Gluon would go on and return both
            return self


@gluon.jit
def _both(a, b):
    return a & b


@gluon.jit
def _half_of(tile, part: gl.constexpr):
    """One half of the keys of a tile of values, as 32-bit words [panels, BLOCK_KV / 2, _WORDS]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    KEYS: gl.constexpr = tile.shape[0]
    shape: gl.constexpr = [tile.shape[1] // (2 * _WORDS), KEYS, _WORDS]
    words = reinterpret(tile, gl.int32, shape, flat)
    return words.slice(part * (KEYS // CLEANERS), KEYS // CLEANERS, dim=1)


@gluon.jit
def _clean_half(tile, part: gl.constexpr):
    """Set what is not finite in one half of the keys of a tile of values to 0. Returns words
    [BLOCK_KV / 2, 8], of which those of a key with such a value have bits that are not set."""
    # A thread has 16 bytes of a row, a warp four rows.
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [1, _WARPS, 1], [2, 1, 0])
    half = _half_of(tile, part)
    words = half.load(layout)
    is_finite = finite(words, tile.dtype)
    half.store(words & is_finite)
    PANELS: gl.constexpr = words.shape[0]
    of_thread = is_finite.reshape([PANELS, words.shape[1], 8, _WORDS // 8])
    return gl.reduce(gl.reduce(of_thread, 3, _both), 0, _both)


@gluon.jit
def _first_bad_keys(found, first_key):
    """The first bad key that each warp [_WARPS] found from `first_key` on."""
    layout: gl.constexpr = found.type.layout
    key = first_key + gl.expand_dims(gl.arange(0, found.shape[0], gl.SliceLayout(1, layout)), 1)
    key = gl.where(found == -1, NO_KEY, key)
    # Of every 16 keys, a warp has four.
    of_warps = gl.min(key.reshape([key.shape[0] // 16, _WARPS, 4, 8]), 0)
    return gl.min(of_warps.reshape([_WARPS, 32]), 1)


@gluon.jit
def _clean(c: gl.constexpr, program, block, i, n):
    """Clean this consumer's part of the n-th block that is cut, `block` of a tile and the i-th in
    all."""
    part: gl.constexpr = c - (program.build.CONSUMERS - CLEANERS)
    KEYS: gl.constexpr = program.schedule.BLOCK_KV // CLEANERS
    if part >= 0:
        values = program.v
        values.wait(i)
        tile = values.tile(i)
        found = _clean_half(tile, part)
        if tile.shape[1] < values.COLUMNS:
            rest = values.rest_smem.index(values.ring.slot(i))
            found = found & _clean_half(rest.reshape([rest.shape[3], rest.shape[4]]), part)
        place = slot_of(n, PLACES)
        found_smem = program.cleaned.found_smem.index(place)
        if program.schedule.HAS_LEFT:
            is_finite = gl.reduce(found, 1, _both) == -1
            flags = gl.where(is_finite, 0.0, float("nan"))
            found_smem.slice(part * KEYS, KEYS, dim=0).store(flags)
        else:
            first_key = block * program.schedule.BLOCK_KV + part * KEYS
            found_smem.slice(part * _WARPS, _WARPS, dim=0).store(_first_bad_keys(found, first_key))
        fence_async_shared()
        mbarrier.arrive(program.cleaned.clean_bar.index(place), count=1)


@gluon.jit
def clean_if_cut(c: gl.constexpr, program, rows, block, i, cuts, CUT: gl.constexpr = None):
    """Consumer: clean its part of a block, the i-th in all, if a mask cuts it: `cuts` with this
    block. CUT says whether that is so; None, that the schedule has to be asked."""
    n = cuts.n
    if program.build.CLEANS:
        if CUT is None:
            if rows.is_cut(block):
                _clean(c, program, block, i, n)
                n += 1
        elif CUT:
            _clean(c, program, block, i, n)
            n += 1
    return Cuts(n, cuts.bad)
