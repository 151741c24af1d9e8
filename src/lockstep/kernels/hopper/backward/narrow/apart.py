"""Consumers that run apart, for head dims up to 64 unless loops are short.

    issue dP                        exponentials run under it
    issue dV, in halves             and under the first half; dS runs under the second
    issue dQ of the step before, dK dQ is staged under dK
    issue S, next tile

With 128 query rows there are twice as many exponentials for as many products, and two warpgroups
that computed them at the same time would leave the matrix units idle. So dQ is multiplied one step
later: by then dS of the other warpgroup has long been there, and neither has to wait for the other.
A loop costs two products more than it needs, which is too much for one of a few steps.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.narrow.steps import (
    begin_loop,
    begin_sums,
    column_weights,
    end_loop,
    find_ds,
    halves,
    issue_dq,
    load_half,
    take_loop,
)
from lockstep.kernels.hopper.backward.narrow.tiles import STAGES
from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import add_products, issue_scores, n_pieces
from lockstep.kernels.hopper.common.shared_memory import slot_of


@gluon.jit
def take_steps(W: gl.constexpr, begin, end, loop, tiles, dq_sums, scores, large, dk, dv):
    """The steps of a loop: the sums dk and dv."""
    BLOCK_Q: gl.constexpr = loop.BLOCK_Q
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    dtype: gl.constexpr = tiles.k_smem.dtype
    HALF: gl.constexpr = BLOCK_Q // 2
    # How many products there are of a tile's columns.
    D: gl.constexpr = tiles.D_COLUMNS
    DV: gl.constexpr = tiles.DV_COLUMNS
    ND: gl.constexpr = n_pieces(D)
    NDV: gl.constexpr = n_pieces(DV)
    first_k, _ = tiles.keys(0, True)
    first_q, _, _ = tiles.queries(slot_of(begin, STAGES))
    s = issue_scores(first_k.slice(W * ROWS, ROWS, dim=0), first_q, D)
    s = warpgroup_mma_wait(0, deps=(s,))
    tile = loop.first_tile
    t = loop.first_number()
    head = tile * 0
    log2_left = large.log2_l(tiles, 0, tile, 0, HALF, BLOCK_Q)
    for n in range(begin, end):
        slot = slot_of(n, STAGES)
        q, dout, stats_smem = tiles.queries(slot)
        k, v = tiles.keys(n, not MASKED)
        dp = issue_scores(v.slice(W * ROWS, ROWS, dim=0), dout, DV)
        log2_right = large.log2_l(tiles, slot, tile, HALF, HALF, BLOCK_Q)
        s = scores.hide_products(s, loop, t, W * ROWS)
        s_left, s_right = halves(s)
        lse = load_half(stats_smem, 0, HALF)
        p_left, slope_left = column_weights(
            scores, large, s_left, lse, log2_left, loop, tile, t, W * ROWS, 0
        )
        dv = add_products(dv, p_left.to(dtype), dout.slice(0, HALF, dim=0), DV)
        lse = load_half(stats_smem, HALF, HALF)
        p_right, slope_right = column_weights(
            scores, large, s_right, lse, log2_right, loop, tile, t, W * ROWS, HALF
        )
        dv = add_products(dv, p_right.to(dtype), dout.slice(HALF, HALF, dim=0), DV)

        dp = warpgroup_mma_wait(2 * NDV, deps=(dp,))
        # Registers are short while scores and dp are both there: delta is read no earlier.
        ds = find_ds(scores, p_left, p_right, slope_left, slope_right, dp, stats_smem, None, dtype)
        tiles.ds.wait_empty(n)
        tiles.ds_tile(n).slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
        # For dS, and for dQ that was staged in the step before.
        fence_async_shared()
        dq_sums.publish(n - 2, n > begin + 1)
        tiles.ds.fill(n)
        # The first step has no step before it: the product it issues instead is not used.
        is_part = n > begin
        m = gl.where(is_part, n - 1, n)
        tiles.ds.wait_full(m, pred=is_part)
        dq = issue_dq(tiles.ds_tile(m), k, W, D)
        dk = add_products(dk, ds, q, D)

        dq_sums.wait_empty(m)
        dq = warpgroup_mma_wait(ND, deps=(dq,))
        tiles.ds.release(m, pred=is_part)
        dq_sums.stage(m, dq, W)
        ahead = slot_of(n + 1, STAGES)
        is_more = n + 1 < end
        tiles.wait(n + 1, pred=is_more)
        next_q, _, _ = tiles.queries(ahead)
        # The last tile once more, if there is none ahead.
        next_tile, _next_t, _next_head = loop.next_in_group(tile, t, head)
        next_tile = gl.where(is_more, next_tile, tile)
        log2_left = large.log2_l(tiles, ahead, next_tile, 0, HALF, BLOCK_Q)
        # After the last tile this multiplies whatever is in the slot; the result is not used.
        s = issue_scores(k.slice(W * ROWS, ROWS, dim=0), next_q, D)
        sums = warpgroup_mma_wait(0, deps=(s,) + dk + dv)  # noqa: RUF005, Gluon does not unpack
        s, dk, dv = sums[0], sums[1 : 1 + ND], sums[1 + ND :]
        if is_more:
            tiles.release(slot)
        tile, t, head = loop.next_in_group(tile, t, head)
    return dk, dv


@gluon.jit
def consume_apart(
    W: gl.constexpr, queue, tiles, dq_sums, scores, large_ptr, MAY_BE_LARGE: gl.constexpr
):
    """`kernel.consume`"""
    n_loops = 0
    n_keys = 0  # how often keys have been loaded: a loop of no tile has none
    begin = 0
    while queue.has(n_loops):
        loop, end, is_large = begin_loop(W, n_loops, begin, n_keys, queue, tiles)
        dk, dv = begin_sums(W, n_loops, queue, tiles)
        dk, dv = take_loop(
            take_steps, W, begin, end, loop, is_large, tiles, dq_sums, scores, large_ptr, dk, dv,
            MAY_BE_LARGE,
        )  # fmt: skip
        is_any = loop.n_steps > 0
        fence_async_shared()
        dq_sums.publish(end - 2, loop.n_steps > 1)
        m = gl.where(is_any, end - 1, end)
        tiles.ds.wait_full(m, pred=is_any)
        last_k, _ = tiles.keys(0, True)
        dq = issue_dq(tiles.ds_tile(m), last_k, W, tiles.D_COLUMNS)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        if is_any:
            tiles.release_keys()
        tiles.ds.release(m, pred=is_any)
        dq_sums.wait_empty(m)
        dq_sums.stage(m, dq, W)
        # Those of the loop before, which may have been in the same place.
        mbarrier.wait(tiles.dkv_stored_bar, (n_loops & 1) ^ 1)
        end_loop(W, n_loops, end, loop, queue, tiles, dq_sums, dk, dv, scores.scale)
        begin = end
        n_keys += gl.minimum(loop.n_steps, 1)
        n_loops += 1
