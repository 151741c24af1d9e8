"""Values that are not finite: how they are kept from rows and keys that do not see them.

A hidden pair has the weight 0, but 0 · NaN is NaN in a matrix product. So where there is a mask,
whatever is not finite in v becomes 0 in shared memory, and in tiles with hidden pairs in q and dO,
too. In k it becomes the largest number: a score of -inf, which other rows may have seen, stays out
of reach. Rows that see such a value lose nothing by it: they have NONFINITE for m (`rows.py`), and
with it infinite weights for all keys they see, and whatever is not finite in the end is NaN.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.finite_words import finite
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, reinterpret

HUGE = gl.constexpr(1.0e38)
# The signs of both values in a word.
_SIGNS = gl.constexpr(-0x7FFF8000)


@gluon.jit
def _in_chunks(tile, N: gl.constexpr, WORDS: gl.constexpr):
    """A tile as N chunks of 32-bit words, whatever its layout."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(tile, gl.int32, [N, WORDS], flat)


@gluon.constexpr_function
def largest(dtype):
    """The bits of the largest number of a 16-bit dtype."""
    return 0x7F7F if dtype == gl.bfloat16 else 0x7BFF


@gluon.jit
def has_nonfinite(stats, BLOCK_Q: gl.constexpr):
    """A warp: whether any row has a q or dO that is not finite, by its m."""
    PER_LANE: gl.constexpr = BLOCK_Q // 32
    layout: gl.constexpr = gl.BlockedLayout([PER_LANE], [32], [1], [0])
    is_nonfinite = gl.abs(stats.slice(0, BLOCK_Q).load(layout)) > HUGE
    # The maximum of integers is one instruction with one result for the warp. One by shuffles could
    # differ between lanes, for all that ptxas knows, and then every loop of the kernel, in any
    # partition, would gather the lanes of its warp.
    return gl.max(is_nonfinite.to(gl.int32), 0) != 0


@gluon.jit
def replace_nonfinite(tile, value: gl.constexpr, CONSTANT_TIME: gl.constexpr):
    """Set what is not finite in a tile [rows, D] of shared memory to a number with these bits,
    signs aside."""
    if CONSTANT_TIME:
        rewrite(tile, 0, 1, value)
    elif gl.max(find_nonfinite(tile, 0, 1), 0) != 0:
        overwrite_nonfinite(tile, 0, 1, value)


@gluon.constexpr_function
def _chunk(num_warps):
    """Words that a partition looks at together: few enough for a warp with 24 registers."""
    return max(256, 128 * num_warps)


@gluon.jit
def find_nonfinite(tile, part: gl.constexpr, PARTS: gl.constexpr):
    """Words of which some is not 0 if this of PARTS parts of a tile has a value that is not
    finite."""
    CHUNK: gl.constexpr = _chunk(gl.num_warps())
    N: gl.constexpr = tile.shape[0] * tile.shape[1] // (2 * PARTS * CHUNK)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    words = _in_chunks(tile, PARTS * N, CHUNK)
    found = gl.full([CHUNK], 0, gl.int32, layout)
    for i in range(part * N, part * N + N):
        found = found | _carry(words.index(i).load(layout), tile.dtype)
    return _nonfinite(found)


@gluon.jit
def overwrite_nonfinite(tile, part: gl.constexpr, PARTS: gl.constexpr, value: gl.constexpr):
    """Set what is not finite in one of PARTS parts of a tile to a number with these bits, signs
    aside."""
    CHUNK: gl.constexpr = _chunk(gl.num_warps())
    N: gl.constexpr = tile.shape[0] * tile.shape[1] // (2 * PARTS * CHUNK)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    words = _in_chunks(tile, PARTS * N, CHUNK)
    for i in range(part * N, part * N + N):
        chunk = words.index(i).load(layout)
        nonfinite = _nonfinite(_carry(chunk, tile.dtype))
        words.index(i).store((chunk & ~(nonfinite * 0x7FFF)) | (nonfinite * value))


@gluon.jit
def rewrite(tile, part: gl.constexpr, PARTS: gl.constexpr, value: gl.constexpr):
    """`overwrite_nonfinite` in constant time: its words are all written, whatever they hold."""
    CHUNK: gl.constexpr = _chunk(gl.num_warps())
    N: gl.constexpr = tile.shape[0] * tile.shape[1] // (2 * PARTS * CHUNK)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    words = _in_chunks(tile, PARTS * N, CHUNK)
    for i in range(part * N, part * N + N):
        chunk = words.index(i).load(layout)
        is_finite = finite(chunk, tile.dtype)
        kept = chunk & (is_finite | _SIGNS)
        words.index(i).store(kept | (~is_finite & (value * 0x00010001)))


@gluon.jit
def _carry(words, dtype: gl.constexpr):
    """Words whose bits 15 and 31 say which of the two values in each has an exponent of all
    ones."""
    if dtype == gl.bfloat16:
        carried = (words & 0x7F807F80) + 0x00800080
    else:
        carried = (words & 0x7C007C00) + 0x04000400
    return carried


@gluon.jit
def _nonfinite(carried):
    """The same in bit 0 and bit 16, and nothing else."""
    return (carried >> 15) & 0x00010001
