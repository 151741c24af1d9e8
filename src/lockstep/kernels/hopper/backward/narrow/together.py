"""Consumers that take each step together: for head dims above 64, and where loops are short.

    issue S, dP             S is waited for
    issue dV, in halves     exponentials run under dP and the first half, dS under the second
    barrier of both         dS of both is there
    issue dQ, dK            dQ is staged under dK

Shared memory is what limits a step here. S, dP and dQ read operands from it in every cycle, dV and
dK, with one operand in registers, in every other. All other reads and writes have to wait until
then, and with them the instructions that need their results. So lse is read under dK of the step
before, and dQ is written there and fenced only with dS of the next step. At head dims up to 64,
where a tile has 128 queries, products leave more cycles free and scores fewer registers: lse and
delta are read LATE, where they are needed.
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
    load_deltas,
    load_half,
    take_loop,
)
from lockstep.kernels.hopper.backward.narrow.tiles import STAGES
from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
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
    dtype: gl.constexpr = tiles.k_smem.dtype
    HALF: gl.constexpr = BLOCK_Q // 2
    # How many products there are of a tile's columns.
    D: gl.constexpr = tiles.D_COLUMNS
    DV: gl.constexpr = tiles.DV_COLUMNS
    ND: gl.constexpr = n_pieces(D)
    NDV: gl.constexpr = n_pieces(DV)
    LATE: gl.constexpr = BLOCK_Q != 64
    if not LATE:
        _, _, stats_smem = tiles.queries(slot_of(begin, STAGES))
        lse_left, lse_right = load_half(stats_smem, 0, HALF), load_half(stats_smem, HALF, HALF)
    tile = loop.first_tile
    t = loop.first_number()
    head = tile * 0
    for n in range(begin, end):
        slot = slot_of(n, STAGES)
        q, dout, stats_smem = tiles.queries(slot)
        k, v = tiles.keys(n, False)
        s = issue_scores(k.slice(W * ROWS, ROWS, dim=0), q, D)
        # All warps have read dS of the step before the last. Triton would add this barrier only
        # when the next dS is to be written and the other warpgroup waits for it.
        await_warps()
        dp = issue_scores(v.slice(W * ROWS, ROWS, dim=0), dout, DV)
        s = warpgroup_mma_wait(NDV, deps=(s,))
        s = scores.hide_products(s, loop, t, W * ROWS)
        s_left, s_right = halves(s)
        if LATE:
            lse_left = load_half(stats_smem, 0, HALF)
        log2_l = large.log2_l(tiles, slot, tile, 0, HALF, BLOCK_Q)
        p_left, slope_left = column_weights(
            scores, large, s_left, lse_left, log2_l, loop, tile, t, W * ROWS, 0
        )
        dv = add_products(dv, p_left.to(dtype), dout.slice(0, HALF, dim=0), DV)
        if LATE:
            lse_right = load_half(stats_smem, HALF, HALF)
            deltas = None
        else:
            deltas = load_deltas(stats_smem, HALF)
        log2_l = large.log2_l(tiles, slot, tile, HALF, HALF, BLOCK_Q)
        p_right, slope_right = column_weights(
            scores, large, s_right, lse_right, log2_l, loop, tile, t, W * ROWS, HALF
        )
        dv = add_products(dv, p_right.to(dtype), dout.slice(HALF, HALF, dim=0), DV)

        dp = warpgroup_mma_wait(2 * NDV, deps=(dp,))
        ds = find_ds(
            scores, p_left, p_right, slope_left, slope_right, dp, stats_smem, deltas, dtype
        )
        ds_tile = tiles.ds_tile(n)
        ds_tile.slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
        # For dS, and for dQ of the step before.
        fence_async_shared()
        dq_sums.publish(n - 1, n > begin)
        tiles.sync_consumers()
        dq = issue_dq(ds_tile, k, W, D)
        dk = add_products(dk, ds, q, D)

        dq_sums.wait_empty(n)
        dq = warpgroup_mma_wait(ND, deps=(dq,))
        ahead = slot_of(n + 1, STAGES)
        is_more = n + 1 < end
        if not is_more:
            tiles.release_keys()
        dq_sums.stage(n, dq, W)
        tiles.wait(n + 1, pred=is_more)
        if not LATE:
            _, _, stats_smem = tiles.queries(ahead)
            lse_left = load_half(stats_smem, 0, HALF)
            lse_right = load_half(stats_smem, HALF, HALF)
        sums = warpgroup_mma_wait(0, deps=dk + dv)
        dk, dv = sums[:ND], sums[ND:]
        if is_more:
            tiles.release(slot)
        tile, t, head = loop.next_in_group(tile, t, head)
    return dk, dv


@gluon.jit
def consume_together(
    W: gl.constexpr, queue, tiles, dq_sums, scores, large_ptr, MAY_BE_LARGE: gl.constexpr
):
    """`kernel.consume`"""
    n_loops = 0
    n_keys = 0  # how often keys have been loaded: a loop of no tile has none
    begin = 0
    while queue.has(n_loops):
        loop, end, is_large = begin_loop(W, n_loops, begin, n_keys, queue, tiles)
        if loop.BLOCK_Q == 64:
            # The last dv is staged where dS is going to be.
            mbarrier.wait(tiles.dkv_stored_bar, (n_loops & 1) ^ 1)
        dk, dv = begin_sums(W, n_loops, queue, tiles)
        dk, dv = take_loop(
            take_steps, W, begin, end, loop, is_large, tiles, dq_sums, scores, large_ptr, dk, dv,
            MAY_BE_LARGE,
        )  # fmt: skip

        if loop.BLOCK_Q != 64:
            # Those of the loop before, which may have been in the same place.
            mbarrier.wait(tiles.dkv_stored_bar, (n_loops & 1) ^ 1)
        end_loop(W, n_loops, end, loop, queue, tiles, dq_sums, dk, dv, scores.scale)
        begin = end
        n_keys += gl.minimum(loop.n_steps, 1)
        n_loops += 1
