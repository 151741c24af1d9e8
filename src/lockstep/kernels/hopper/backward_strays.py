"""Values that are not finite, taken out of the way of those who do not see them.

A hidden pair weighs 0, but 0 · NaN is NaN in a matrix product. So where there is a mask, whatever
is not finite in v becomes 0 in shared memory, and in tiles with hidden pairs in q and dO, too. In k
it becomes the largest number: a score of -inf, which other rows may have seen, stays out of reach.
Who sees it loses nothing: such rows have STRAY for lse2 (`backward_rows`), infinite weights for all
keys they see, and whatever is not finite in the end is NaN.

S may be multiplied while q and k are cleaned: what it is for those who see a stray makes no
difference, and for the others it is hidden.
"""

from __future__ import annotations

from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin

from lockstep.kernels.hopper.backward_tiles import STAGES
from lockstep.kernels.hopper.gluon_shim import fence_async_shared, gl, gluon, mbarrier

CHUNK = gl.constexpr(256)  # words that a warp looks at together, in its 24 registers
HUGE = gl.constexpr(1.0e38)


@builtin
def _in_chunks(tile, n, _semantic=None):
    """A tile as n chunks of words, whatever its layout. Gluon has had a public name since 3.9."""
    layout = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape = [_unwrap_if_constexpr(n), CHUNK.value]
    return _semantic.memdesc_reinterpret(tile, gl.int32, shape, layout)


@gluon.constexpr_function
def largest(dtype):
    """The bits of the largest number."""
    return 0x7F7F if dtype == gl.bfloat16 else 0x7BFF


@gluon.jit
def inspect(board, tiles):
    """Partition of one warp: says of each query tile that consumers may go on with it. From the
    first tile of a walk on v is clean; k, which they need for dQ only, is somewhat later."""
    dtype: gl.constexpr = tiles.k.dtype
    LARGEST: gl.constexpr = largest(dtype)
    calls = 0
    keys = 0  # that have been loaded: walks of no tile have none
    begin = 0
    while board.has(calls):
        walk = board.read(calls)
        t = walk.first_number()
        for n in range(begin, begin + walk.n_steps):
            slot = n % STAGES
            if n == begin:
                mbarrier.wait(tiles.kv_full, keys & 1)
                replace_strays(tiles.keys(0, True)[1], dtype, 0)
            mbarrier.wait(tiles.full.index(slot), (n // STAGES) & 1)
            if walk.cuts(t):  # noqa: SIM102, Gluon would evaluate both sides of an `and`
                if has_strays(tiles.stats.index(slot), walk.BLOCK_Q):
                    replace_strays(tiles.matrix(tiles.q.index(slot)), dtype, 0)
                    replace_strays(tiles.matrix(tiles.dout.index(slot)), dtype, 0)
            fence_async_shared()
            mbarrier.arrive(tiles.inspected.index(slot), count=1)
            if n == begin:
                replace_strays(tiles.keys(0, True)[0], dtype, LARGEST)
                fence_async_shared()
                mbarrier.arrive(tiles.k_inspected, count=1)
            t = walk.next_number(t)
        begin += walk.n_steps
        keys += gl.minimum(walk.n_steps, 1)
        calls += 1


@gluon.jit
def has_strays(stats, BLOCK_Q: gl.constexpr):
    """Whether any row has a q or dO that is not finite, by its lse2."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_Q // 32], [32], [gl.num_warps()], [0])
    return gl.max(gl.abs(stats.slice(0, BLOCK_Q).load(layout)), 0) > HUGE


@gluon.jit
def replace_strays(tile, dtype: gl.constexpr, value: gl.constexpr):
    """Set what is not finite in a tile [rows, D] of shared memory to a number with these bits,
    signs aside."""
    N: gl.constexpr = tile.shape[0] * tile.shape[1] // (2 * CHUNK)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    words = _in_chunks(tile, N)
    found = gl.full([CHUNK], 0, gl.int32, layout)
    for i in range(N):
        found = found | _strays(words.index(i).load(layout), dtype)
    if gl.max(found, 0) != 0:
        for i in range(N):
            chunk = words.index(i).load(layout)
            strays = _strays(chunk, dtype)
            words.index(i).store((chunk & ~(strays * 0x7FFF)) | (strays * value))


@gluon.jit
def _strays(words, dtype: gl.constexpr):
    """Of the two values in each word: bit 0 and bit 16 say which has an exponent of all ones."""
    if dtype == gl.bfloat16:
        carried = (words & 0x7F807F80) + 0x00800080
    else:
        carried = (words & 0x7C007C00) + 0x04000400
    return (carried >> 15) & 0x00010001
