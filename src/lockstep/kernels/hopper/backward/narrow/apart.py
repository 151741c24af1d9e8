"""Consumers that run apart, for head dims up to 64.

    issue dP                        exponentials run under it
    issue dV, in halves             and under the first half; dS runs under the second
    issue dQ of the step before, dK dQ leaves under dK
    issue S, next tile

With 128 query rows there are twice as many exponentials for as many products, and two warpgroups
that computed them at the same time would leave the matrix units idle. So dQ is multiplied one step
later: by then dS of the other warpgroup has long been there, and neither has to wait for the other.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.narrow.tiles import DS_TILES, STAGES
from lockstep.kernels.hopper.backward.nonfinite import clean_keys
from lockstep.kernels.hopper.backward.products import (
    ROWS,
    LargeScores,
    add_product,
    derive_scores,
    finish,
    halves,
    hide_scores,
    load_half,
    multiply_dq,
    multiply_scores,
    weigh_columns,
    whole,
    zeros,
)
from lockstep.kernels.hopper.common.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.shared_memory import phase_of, slot_of


@gluon.jit
def take_steps(
    W: gl.constexpr, begin, end, loop, tiles, dq_sums, scale, unit, softcap, large,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """The steps of a loop: the sums dk and dv."""
    BLOCK_Q: gl.constexpr = loop.BLOCK_Q
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    dtype: gl.constexpr = tiles.k.dtype
    HALF: gl.constexpr = BLOCK_Q // 2
    dk, dv = zeros(tiles.k.shape[5]), zeros(tiles.k.shape[5])
    first_k, _ = tiles.keys(0, True)
    first_q = tiles.matrix(tiles.q.index(slot_of(begin, STAGES)))
    s = multiply_scores(first_k.slice(W * ROWS, ROWS, dim=0), first_q)
    s = warpgroup_mma_wait(0, deps=(s,))
    tile = loop.first_tile
    t = loop.first_number()
    for n in range(begin, end):
        slot = slot_of(n, STAGES)
        stats = tiles.stats.index(slot)
        q = tiles.matrix(tiles.q.index(slot))
        dout = tiles.matrix(tiles.dout.index(slot))
        k, v = tiles.keys(n, not MASKED)
        dp = multiply_scores(v.slice(W * ROWS, ROWS, dim=0), dout)
        s = hide_scores(s, loop, t, W * ROWS, HIDES_SCORES)
        s_left, s_right = halves(s)
        p_left, slope_left = weigh_columns(
            s_left, load_half(stats, 0, HALF), large, loop, tile, t, W * ROWS, 0,
            (scale, unit, softcap), CAPPED, HIDES_SCORES,
        )  # fmt: skip
        dv = add_product(dv, p_left.to(dtype), dout.slice(0, HALF, dim=0))
        p_right, slope_right = weigh_columns(
            s_right, load_half(stats, HALF, HALF), large, loop, tile, t, W * ROWS, HALF,
            (scale, unit, softcap), CAPPED, HIDES_SCORES,
        )  # fmt: skip
        dv = add_product(dv, p_right.to(dtype), dout.slice(HALF, HALF, dim=0))

        dp = warpgroup_mma_wait(2, deps=(dp,))
        dp_left, dp_right = halves(dp)
        # Read no earlier: registers are short while scores and dp are both there.
        delta = load_half(stats, BLOCK_Q, HALF)
        ds_left = derive_scores(p_left, dp_left, delta, slope_left, CAPPED)
        delta = load_half(stats, BLOCK_Q + HALF, HALF)
        ds_right = derive_scores(p_right, dp_right, delta, slope_right, CAPPED)
        ds = whole(ds_left.to(dtype), ds_right.to(dtype))
        ds_slot = slot_of(n, DS_TILES)
        mbarrier.wait(tiles.ds_empty.index(ds_slot), phase_of(n, DS_TILES) ^ 1)
        ds_tile = tiles.matrix(tiles.ds.index(ds_slot))
        ds_tile.slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
        # For dS, and for what was left of dQ in the step before.
        fence_async_shared()
        dq_sums.announce(n - 2, n > begin + 1)
        mbarrier.arrive(tiles.ds_full.index(ds_slot), count=1)
        # The first step has no step before it: what it multiplies instead goes nowhere.
        is_part = n > begin
        m = gl.where(is_part, n - 1, n)
        m_slot = slot_of(m, DS_TILES)
        mbarrier.wait(tiles.ds_full.index(m_slot), phase_of(m, DS_TILES), pred=is_part)
        dq = multiply_dq(tiles.matrix(tiles.ds.index(m_slot)), k, W)
        dk = add_product(dk, ds, q)

        dq_sums.await_room(m)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(tiles.ds_empty.index(m_slot), count=1, pred=is_part)
        dq_sums.leave(m, dq, W)
        ahead = slot_of(n + 1, STAGES)
        is_more = n + 1 < end
        mbarrier.wait(tiles.full.index(ahead), phase_of(n + 1, STAGES), pred=is_more)
        # After the last tile this multiplies what lies there, and nobody looks at it.
        s = multiply_scores(k.slice(W * ROWS, ROWS, dim=0), tiles.matrix(tiles.q.index(ahead)))
        s, dk, dv = warpgroup_mma_wait(0, deps=(s, dk, dv))
        if is_more:
            tiles.release(slot)
        tile, t = loop.next(tile, t)
    return dk, dv


@gluon.jit
def consume_apart(
    W: gl.constexpr, queue, tiles, dq_sums, large_ptr, scale, unit, softcap,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """`kernel.consume`"""
    MASKED: gl.constexpr = queue.HAS_LEFT or queue.HAS_RIGHT

    calls = 0
    keys = 0  # that have been loaded: loops of no tile have none
    begin = 0
    while queue.has(calls):
        loop, is_large = queue.read(calls)
        end = begin + loop.n_steps
        is_any = loop.n_steps > 0
        mbarrier.wait(tiles.kv_full, keys & 1, pred=is_any)
        first_slot = slot_of(begin, STAGES)
        mbarrier.wait(tiles.full.index(first_slot), phase_of(begin, STAGES), pred=is_any)
        if MASKED:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
            if is_any:
                clean_keys(W, tiles)
        if is_large:
            dk, dv = take_steps(
                W, begin, end, loop, tiles, dq_sums, scale, unit, softcap,
                LargeScores(large_ptr, True), CAPPED, HIDES_SCORES,
            )  # fmt: skip
        else:
            dk, dv = take_steps(
                W, begin, end, loop, tiles, dq_sums, scale, unit, softcap,
                LargeScores(large_ptr, False), CAPPED, HIDES_SCORES,
            )  # fmt: skip

        fence_async_shared()
        dq_sums.announce(end - 2, loop.n_steps > 1)
        m = gl.where(is_any, end - 1, end)
        m_slot = slot_of(m, DS_TILES)
        mbarrier.wait(tiles.ds_full.index(m_slot), phase_of(m, DS_TILES), pred=is_any)
        last_k, _ = tiles.keys(0, True)
        last_ds = tiles.matrix(tiles.ds.index(m_slot))
        dq = warpgroup_mma_wait(0, deps=(multiply_dq(last_ds, last_k, W),))
        if is_any:
            tiles.release_keys()
        mbarrier.arrive(tiles.ds_empty.index(m_slot), count=1, pred=is_any)
        dq_sums.await_room(m)
        dq_sums.leave(m, dq, W)
        # Those of the loop before, which may have been in the same place.
        mbarrier.wait(tiles.dkv_stored, (calls & 1) ^ 1)
        finish(W, end, loop, tiles, dq_sums, dk, dv, scale, MASKED)
        begin = end
        keys += gl.minimum(loop.n_steps, 1)
        calls += 1
