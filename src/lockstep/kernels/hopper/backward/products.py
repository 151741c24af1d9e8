"""What consumers of the backwards compute with a tile, whatever its width and however they are
paired.

Scores and dS of keys are transposed, keys by queries: so Pᵀ and dSᵀ are already the left operands,
in registers, of the products for dV and dK.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.narrow.tiles import STAGES
from lockstep.kernels.hopper.backward.rows import NONFINITE
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
)

ROWS = gl.constexpr(64)  # of a warpgroup: the height of a wgmma
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def finish_scores(s, scale, softcap, CAPPED: gl.constexpr, RAW: gl.constexpr):
    """Scores from raw products, and what a cap multiplies their gradients by. RAW ones are left as
    they are."""
    slope = s
    if CAPPED:
        # tanh x = 1 - 2 / (1 + e^2x); exp2 may overflow to inf, which makes it 1.
        half = 1.0 / (1.0 + gl.exp2(s * (scale / softcap * 2.0 * LOG2E)))
        tanh = 1.0 - 2.0 * half
        slope = 1.0 - tanh * tanh
        s = tanh * softcap
    elif not RAW:
        s = s * scale
    return s, slope


@gluon.jit
def weigh_exactly(s, m, log2_l, unit):
    """Weights of scores of any size: the difference to m, where it is small, is exact. m and log2_l
    have a row or column for all."""
    return gl.exp2((s - m) * unit - log2_l)


@aggregate
class LargeScores:
    """Where the weights of a loop with large scores come from: `rows`. A loop without has
    none, and is not slowed down by it: it has a loop of its own."""

    rows_ptr: gl.tensor  # m and log2 l of all tiles, [n_tiles, 2, BLOCK_Q]
    ANY: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows_ptr, ANY):
        self.rows_ptr = rows_ptr
        self.ANY = gl.constexpr(ANY)

    @gluon.jit
    def weigh(self, s, lse2, tile, unit, first_column: gl.constexpr, BLOCK_Q: gl.constexpr):
        """Weights of scores of a tile, of columns from `first_column` on; lse2 has a column for
        all."""
        if self.ANY:
            columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
            column = first_column + gl.arange(0, s.shape[1], columns)
            at = self.rows_ptr + tile.to(gl.int64) * (2 * BLOCK_Q) + column
            m = gl.expand_dims(gl.load(at), 0)
            log2_l = gl.expand_dims(gl.load(at + BLOCK_Q), 0)
            p = weigh_exactly(s, m, log2_l, unit)
        else:
            p = gl.exp2(s * unit - lse2)
        return p


@gluon.jit
def hide_scores(s, loop, t, first_row: gl.constexpr, HIDES_SCORES: gl.constexpr, m=None):
    """Raw products, with -inf for pairs that the mask hides in the t-th tile of a loop; `first_row`
    is that of s in the program.

    A cap or a scale that is not positive would bring such scores back; unless HIDES_SCORES, it is
    the weights that are hidden. Values in q that are not finite may or may not have been replaced
    before s was multiplied; by `m` the result is the same: keys that see them have infinite
    weights."""
    if loop.cuts(t):
        if m is not None:
            s = gl.where(m == NONFINITE, 0.0, s)
        if HIDES_SCORES:
            s = loop.hide(s, t, first_row, -float("inf"))
    return s


@gluon.jit
def weigh_columns(
    s, lse2, large, loop, tile, t, first_row: gl.constexpr, first_column: gl.constexpr, scales,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """Weights of columns from `first_column` on, behind `hide_scores`; 0 for hidden pairs."""
    scale, unit, softcap = scales
    s, slope = finish_scores(s, scale, softcap, CAPPED, HIDES_SCORES)
    p = large.weigh(s, lse2, tile, unit, first_column, loop.BLOCK_Q)
    return hide_weights(p, slope, loop, t, first_row, first_column, HIDES_SCORES)


@gluon.jit
def hide_weights(
    p, slope, loop, t, first_row: gl.constexpr, first_column: gl.constexpr,
    HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """0 for hidden pairs, unless `hide_scores` has seen to it."""
    if not HIDES_SCORES:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
        if loop.cuts(t):
            p = loop.hide(p, t, first_row, 0.0, first_column)
            slope = loop.hide(slope, t, first_row, 0.0, first_column)
    return p, slope


@gluon.jit
def weigh_seen(
    s, m, log2_l, loop, t, first_row: gl.constexpr, scales, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr, MAY_BE_NONFINITE: gl.constexpr,
):  # fmt: skip
    """Weights of raw products of any size, for all columns; 0 for hidden pairs."""
    scale, unit, softcap = scales
    s = hide_scores(s, loop, t, first_row, HIDES_SCORES, m if MAY_BE_NONFINITE else None)
    s, slope = finish_scores(s, scale, softcap, CAPPED, HIDES_SCORES)
    p = weigh_exactly(s, m, log2_l, unit)
    return hide_weights(p, slope, loop, t, first_row, 0, HIDES_SCORES)


@gluon.jit
def derive_scores(p, dp, delta, slope, CAPPED: gl.constexpr):
    """dS from weights and dP of one shape; delta has a row or column for all."""
    ds = p * (dp - delta)
    return ds * slope if CAPPED else ds


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product [ROWS, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def zeros(columns: gl.constexpr):
    """Sums [ROWS, columns] of no products."""
    layout: gl.constexpr = accumulator(columns)
    return gl.zeros([ROWS, columns], gl.float32, layout)


@gluon.jit
def halves(x):
    """The left and the right half of an accumulator [ROWS, n]: its first registers, its last."""
    N: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([ROWS, 2, N]).permute((0, 2, 1)).split()
    layout: gl.constexpr = accumulator(N)
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def load_half(stats, first: gl.constexpr, N: gl.constexpr):
    """Numbers of rows, [1, N] from `first` on, as a half has its columns."""
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(N))
    return gl.expand_dims(stats.slice(first, N).load(columns), 0)


@gluon.jit
def whole(left, right):
    """What `halves` has taken apart."""
    N: gl.constexpr = left.shape[1] * 2
    x = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, N])
    return gl.convert_layout(x, accumulator(N), assert_trivial=True)


@gluon.jit
def add_product(sums, weights, tile):
    """sums + weights [ROWS, n] times a tile [n, columns], under way."""
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator(tile.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(weights, left), tile, sums, is_async=True)


@gluon.jit
def multiply_scores(own, queries):
    """own [ROWS, D] times queries [BLOCK_Q, D] transposed, under way."""
    nothing = zeros(queries.shape[0])
    return warpgroup_mma(own, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def multiply_dq(ds, k, half: gl.constexpr):
    """One half [64, 64] of dQ from ds [BLOCK_Q, BLOCK_KV] and k [BLOCK_KV, D], under way: of its
    columns where BLOCK_Q is 64, else of its rows."""
    if ds.shape[0] == 64:
        k = k.slice(half * 64, 64, dim=1)
    else:
        ds = ds.slice(half * 64, 64, dim=0)
    return warpgroup_mma(ds, k, zeros(64), use_acc=False, is_async=True)


@gluon.jit
def finish(W: gl.constexpr, n, loop, tiles, dq_sums, dk, dv, scale, MASKED: gl.constexpr):
    """The end of a loop, after `n` steps in all: announces the last tile of dQ that this consumer
    has left, and leaves dk and dv."""
    fence_async_shared()
    dq_sums.announce(n - 1, loop.n_steps > 0)
    tiles.meet()
    if MASKED:
        # Whatever is not finite is NaN: `nonfinite.py`.
        dk += dk * 0.0
        dv += dv * 0.0
    nan_if_bad = loop.nan_if_bad()
    tiles.leave(W, (n + 1) % STAGES, dk * (scale + nan_if_bad), dv * (1.0 + nan_if_bad))
