"""Consumers that take each step together, for head dims above 64.

    issue S, dP             S is waited for
    issue dV, in halves     exponentials run under dP and the first half, dS under the second
    meet                    dS of both is there
    issue dQ, dK            dQ leaves under dK

It is shared memory that a step takes time for here. S, dP and dQ read operands in every cycle, dV
and dK, with one operand in registers, in every other. Whatever else is read or written has to wait
until then, and whoever waits for it with it: so lse is read under dK of the step before, and dQ is
written there and fenced only with dS of the next step.
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
    await_warps,
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
    dtype: gl.constexpr = tiles.k.dtype
    HALF: gl.constexpr = BLOCK_Q // 2
    dk, dv = zeros(tiles.k.shape[5]), zeros(tiles.k.shape[5])
    stats = tiles.stats.index(slot_of(begin, STAGES))
    lse_left, lse_right = load_half(stats, 0, HALF), load_half(stats, HALF, HALF)
    tile = loop.first_tile
    t = loop.first_number()
    for n in range(begin, end):
        slot = slot_of(n, STAGES)
        stats = tiles.stats.index(slot)
        q = tiles.matrix(tiles.q.index(slot))
        dout = tiles.matrix(tiles.dout.index(slot))
        k, v = tiles.keys(n, False)
        s = multiply_scores(k.slice(W * ROWS, ROWS, dim=0), q)
        # Everyone has read dS of the step before the last. Triton would see to it only when the
        # next one is to be written and the other warpgroup waits for it.
        await_warps()
        dp = multiply_scores(v.slice(W * ROWS, ROWS, dim=0), dout)
        s = warpgroup_mma_wait(1, deps=(s,))
        s = hide_scores(s, loop, t, W * ROWS, HIDES_SCORES)
        s_left, s_right = halves(s)
        p_left, slope_left = weigh_columns(
            s_left, lse_left, large, loop, tile, t, W * ROWS, 0, (scale, unit, softcap), CAPPED,
            HIDES_SCORES,
        )  # fmt: skip
        dv = add_product(dv, p_left.to(dtype), dout.slice(0, HALF, dim=0))
        delta_left = load_half(stats, BLOCK_Q, HALF)
        delta_right = load_half(stats, BLOCK_Q + HALF, HALF)
        p_right, slope_right = weigh_columns(
            s_right, lse_right, large, loop, tile, t, W * ROWS, HALF, (scale, unit, softcap),
            CAPPED, HIDES_SCORES,
        )  # fmt: skip
        dv = add_product(dv, p_right.to(dtype), dout.slice(HALF, HALF, dim=0))

        dp = warpgroup_mma_wait(2, deps=(dp,))
        dp_left, dp_right = halves(dp)
        ds_left = derive_scores(p_left, dp_left, delta_left, slope_left, CAPPED)
        ds_right = derive_scores(p_right, dp_right, delta_right, slope_right, CAPPED)
        ds = whole(ds_left.to(dtype), ds_right.to(dtype))
        ds_tile = tiles.matrix(tiles.ds.index(slot_of(n, DS_TILES)))
        ds_tile.slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
        # For dS, and for dQ of the step before.
        fence_async_shared()
        dq_sums.announce(n - 1, n > begin)
        tiles.meet()
        dq = multiply_dq(ds_tile, k, W)
        dk = add_product(dk, ds, q)

        dq_sums.await_room(n)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        ahead = slot_of(n + 1, STAGES)
        is_more = n + 1 < end
        if not is_more:
            tiles.release_keys()
        dq_sums.leave(n, dq, W)
        mbarrier.wait(tiles.full.index(ahead), phase_of(n + 1, STAGES), pred=is_more)
        stats = tiles.stats.index(ahead)
        lse_left, lse_right = load_half(stats, 0, HALF), load_half(stats, HALF, HALF)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        if is_more:
            tiles.release(slot)
        tile, t = loop.next(tile, t)
    return dk, dv


@gluon.jit
def consume_together(
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
        # The last dv lies where dS is going to be.
        mbarrier.wait(tiles.dkv_stored, (calls & 1) ^ 1)
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

        finish(W, end, loop, tiles, dq_sums, dk, dv, scale, MASKED)
        begin = end
        keys += gl.minimum(loop.n_steps, 1)
        calls += 1
