"""What consumers of the backward compute with a tile, however they are paired.

Scores and dS are transposed, keys by queries: so Pᵀ and dSᵀ are already the left operands, in
registers, of the products for dV and dK.
"""

from __future__ import annotations

from lockstep.kernels.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
)

ROWS = gl.constexpr(64)  # keys of a warpgroup: the height of a wgmma
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
    s, lse2, walk, t, first_key: gl.constexpr, scale_log2, cap_log2, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """`weigh`, with 0 for pairs that the mask hides in the t-th tile of a walk; lse2 [BLOCK_Q].

    A cap or a scale that is not positive would bring scores of -inf back; unless HIDES_SCORES, it
    is the weights that are hidden."""
    lse2 = gl.expand_dims(lse2, 0)
    if HIDES_SCORES:
        if walk.cuts(t):
            s = walk.hide(s, t, first_key, -float("inf"))
        p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
    else:
        p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
        if walk.cuts(t):
            p = walk.hide(p, t, first_key, 0.0)
            slope = walk.hide(slope, t, first_key, 0.0)
    return p, slope


@gluon.jit
def derive_scores(p, dp, delta, slope, CAPPED: gl.constexpr):
    """dS from weights and dP [ROWS, BLOCK_Q]; delta [BLOCK_Q]."""
    ds = p * (dp - gl.expand_dims(delta, 0))
    return ds * slope if CAPPED else ds


@gluon.jit
def multiply_scores(own, queries):
    """own [ROWS, D] times queries [BLOCK_Q, D] transposed, under way."""
    BLOCK_Q: gl.constexpr = queries.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    nothing = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    return warpgroup_mma(own, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def multiply_dq(ds, k, half: gl.constexpr):
    """One half [64, 64] of dQ from ds [BLOCK_Q, BLOCK_KV] and k [BLOCK_KV, D], under way: of its
    columns where BLOCK_Q is 64, else of its rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, layout)
    if ds.shape[0] == 64:
        k = k.slice(half * 64, 64, dim=1)
    else:
        ds = ds.slice(half * 64, 64, dim=0)
    return warpgroup_mma(ds, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def finish(W: gl.constexpr, walk, tiles, turns, dk, dv, scale, MASKED: gl.constexpr):
    """The end of a consumer: announces the last tile of dQ it has left, and leaves dk and dv."""
    fence_async_shared()
    turns.announce(walk.n_steps - 1)
    # From here on nobody reads k.
    tiles.meet()
    if MASKED:
        # Whatever is not finite is NaN: `backward_strays`.
        dk += dk * 0.0
        dv += dv * 0.0
    k, v = tiles.keys(0, True)
    v.slice(W * ROWS, ROWS, dim=0).store(dv.to(v.dtype))
    k.slice(W * ROWS, ROWS, dim=0).store((dk * scale).to(k.dtype))
    fence_async_shared()
    mbarrier.arrive(tiles.dkv_full, count=1)
