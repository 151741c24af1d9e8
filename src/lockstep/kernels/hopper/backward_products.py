"""What consumers of the backwards compute with a tile, whatever its width and however they are
paired.

Scores and dS of keys are transposed, keys by queries: so Pᵀ and dSᵀ are already the left operands,
in registers, of the products for dV and dK.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_rows import STRAY
from lockstep.kernels.hopper.backward_tiles import STAGES
from lockstep.kernels.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
)

ROWS = gl.constexpr(64)  # of a warpgroup: the height of a wgmma
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def weigh(s, lse2, scale_log2, cap_log2, CAPPED: gl.constexpr):
    """Weights from raw products, and what a cap multiplies their gradients by; lse2 has a row or
    column for all."""
    if CAPPED:
        # tanh x = 1 - 2 / (1 + e^2x); exp2 may overflow to inf, which makes it 1.
        tanh = 1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * scale_log2 / cap_log2 * LOG2E)))
        slope = 1.0 - tanh * tanh
        s = tanh * cap_log2
    else:
        slope = s
        s = s * scale_log2
    return gl.exp2(s - lse2), slope


@gluon.jit
def weigh_seen(
    s, lse2, walk, t, first_row: gl.constexpr, scale_log2, cap_log2, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr, MAY_HAVE_STRAYS: gl.constexpr,
):  # fmt: skip
    """`weigh`, with 0 for pairs that the mask hides in the t-th tile of a walk; `first_row` is that
    of s in the program.

    A cap or a scale that is not positive would bring scores of -inf back; unless HIDES_SCORES, it
    is the weights that are hidden. If it is left to chance whether strays in q were replaced before
    s was multiplied, it is not left to chance what comes of it: who sees them weighs infinity."""
    if walk.cuts(t):
        if MAY_HAVE_STRAYS:
            s = gl.where(lse2 == STRAY, 0.0, s)
        if HIDES_SCORES:
            s = walk.hide(s, t, first_row, -float("inf"))
    p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
    if not HIDES_SCORES:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
        if walk.cuts(t):
            p = walk.hide(p, t, first_row, 0.0)
            slope = walk.hide(slope, t, first_row, 0.0)
    return p, slope


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
def add_product(sums, weights, tile):
    """sums + weights [ROWS, n] times a tile [n, columns], under way."""
    left: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
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
def finish(W: gl.constexpr, n, walk, tiles, turns, dk, dv, scale, MASKED: gl.constexpr):
    """The end of a walk, after `n` steps in all: announces the last tile of dQ that this consumer
    has left, and leaves dk and dv."""
    fence_async_shared()
    turns.announce(n - 1, walk.n_steps > 0)
    tiles.meet()
    if MASKED:
        # Whatever is not finite is NaN: `backward_strays`.
        dk += dk * 0.0
        dv += dv * 0.0
    tiles.leave(W, (n + 1) % STAGES, dk * scale, dv)
