"""The steps of the consumers: 64 keys of each, and 64 queries, which have weights in halves.

    for both halves of the queries
        issue dP                weights are computed under it
        issue dV                dS is computed under it
        issue dK
    barrier of both             dS of both is there
    issue dQ, in two pieces     the first runs behind dK, and is staged under the second
    issue S, next tile          the second is staged under it

dK and dV of 64 keys are 160 registers of a thread. Scores and gradients of scores of 64 queries
would be 64 more, which is too much.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.medium.tiles import STAGES
from lockstep.kernels.hopper.backward.narrow.steps import halves, load_half
from lockstep.kernels.hopper.backward.nonfinite import (
    find_nonfinite,
    largest,
    overwrite_nonfinite,
    rewrite,
)
from lockstep.kernels.hopper.common.accumulator import ROWS, add_product, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.shared_memory import slot_of

HALF = gl.constexpr(32)  # queries with gradients of scores at a time


@gluon.jit
def issue_scores(W: gl.constexpr, n, slot, tiles):
    """Sᵀ [ROWS, BLOCK_Q], under way."""
    q, q_rest, _ = tiles.queries(slot)
    k, k_rest, _ = tiles.keys(n)
    keys = k.slice(W * ROWS, ROWS, dim=0)
    s = warpgroup_mma(
        keys, q.permute((1, 0)), zeros(q.shape[0]), use_acc=False, is_async=True
    )  # fmt: skip
    keys = k_rest.slice(W * ROWS, ROWS, dim=0)
    return warpgroup_mma(keys, q_rest.permute((1, 0)), s, is_async=True)


@gluon.jit
def hide_products(scores, s, loop, t, first_row: gl.constexpr, first_column: gl.constexpr):
    """`Scores.hide_products` of some columns."""
    if scores.HIDES_SCORES:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
        if loop.cuts(t):
            s = loop.hide(s, t, first_row, -float("inf"), first_column)
    return s


@gluon.jit
def weights_and_slopes(scores, s, stats_smem, loop, t, W: gl.constexpr, first: gl.constexpr):
    """Weights and slopes of the queries from `first` on."""
    BLOCK_Q: gl.constexpr = loop.BLOCK_Q
    m = load_half(stats_smem, first, HALF)
    log2_l = load_half(stats_smem, 2 * BLOCK_Q + first, HALF)
    s = hide_products(scores, s, loop, t, W * ROWS, first)
    s, slope = scores.finish(s)
    p = scores.exact_weights(s, m, log2_l)
    return scores.hide_weights(p, slope, loop, t, W * ROWS, first)


@gluon.jit
def issue_chunk(W: gl.constexpr, n, tiles):
    """The chunk of dQ [64, 64] that is this consumer's alone, under way."""
    k, k_rest, _ = tiles.keys(n)
    keys = k.slice(0, 64, dim=1) if W == 0 else k_rest
    return warpgroup_mma(tiles.ds_tile(n), keys, zeros(64), use_acc=False, is_async=True)


@gluon.jit
def issue_middle(W: gl.constexpr, n, tiles):
    """Its half [64, 32] of the middle chunk, under way."""
    k, _, _ = tiles.keys(n)
    keys = k.slice(64 + W * 32, 32, dim=1)
    return warpgroup_mma(tiles.ds_tile(n), keys, zeros(32), use_acc=False, is_async=True)


@gluon.jit
def issue_dp(W: gl.constexpr, first: gl.constexpr, n, slot, tiles):
    """dPᵀ [ROWS, HALF] of the queries from `first` on, under way."""
    _, _, dout = tiles.queries(slot)
    _, _, v = tiles.keys(n)
    dout = dout.slice(first, HALF, dim=0).permute((1, 0))
    values = v.slice(W * ROWS, ROWS, dim=0)
    return warpgroup_mma(values, dout, zeros(HALF), use_acc=False, is_async=True)


@gluon.jit
def take_half(
    W: gl.constexpr, first: gl.constexpr, n, t, slot, s, dp, dv, loop, tiles, scores, is_ds_read
):  # fmt: skip
    """The queries from `first` on in the n-th step, of which s is there and dp under way: dv with
    their product, under way, and dS, which is also stored, once it `is_ds_read`."""
    dtype: gl.constexpr = tiles.k_smem.dtype
    _, _, dout = tiles.queries(slot)
    stats_smem = tiles.stats_smem.index(slot)
    p, slope = weights_and_slopes(scores, s, stats_smem, loop, t, W, first)
    dv = add_product(dv, p.to(dtype), dout.slice(first, HALF, dim=0))
    # One matrix less from here on.
    p = p * slope if scores.CAPPED else p
    delta = load_half(stats_smem, loop.BLOCK_Q + first, HALF)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = (p * (dp - delta)).to(dtype)
    if not is_ds_read:
        tiles.wait_ds_read(W)
    to = tiles.ds_tile(n).slice(first, HALF, dim=0).slice(W * ROWS, ROWS, dim=1)
    to.permute((1, 0)).store(ds)
    return dv, ds


@gluon.jit
def add_to_dk(dk, dk_rest, ds, tiles, slot, first: gl.constexpr):
    """Both pieces of dk with the product of the queries from `first` on, under way."""
    q, q_rest, _ = tiles.queries(slot)
    return (
        add_product(dk, ds, q.slice(first, HALF, dim=0)),
        add_product(dk_rest, ds, q_rest.slice(first, HALF, dim=0)),
    )


@gluon.jit
def take_steps(W: gl.constexpr, s, begin, end, loop, tiles, dq_sums, scores):
    """The steps of a loop, s being the scores of the first: the sums dk, in two pieces, and dv."""
    dk, dk_rest = zeros(128), zeros(64)
    dv = zeros(128)
    t = loop.first_number()
    head = t * 0
    for n in range(begin, end):
        slot = slot_of(n, STAGES)
        dp = issue_dp(W, 0, n, slot, tiles)
        # For dQ of the step before.
        fence_async_shared()
        dq_sums.publish(W, n > begin)
        # All warps have read dS of the step before.
        await_warps()
        s_left, s_right = halves(s)
        dv, ds = take_half(W, 0, n, t, slot, s_left, dp, dv, loop, tiles, scores, n == begin)
        dk, dk_rest = add_to_dk(dk, dk_rest, ds, tiles, slot, 0)
        # Its left operand takes no registers any more.
        dv = warpgroup_mma_wait(2, deps=(dv,))
        dp = issue_dp(W, HALF, n, slot, tiles)
        dv, ds = take_half(W, HALF, n, t, slot, s_right, dp, dv, loop, tiles, scores, True)
        dk, dk_rest = add_to_dk(dk, dk_rest, ds, tiles, slot, HALF)
        fence_async_shared()
        tiles.sync_consumers()
        dv = warpgroup_mma_wait(2, deps=(dv,))
        chunk = issue_chunk(W, n, tiles)
        is_more = n + 1 < end
        dq_sums.wait_empty(n, W)
        chunk, dk, dk_rest, dv = warpgroup_mma_wait(0, deps=(chunk, dk, dk_rest, dv))
        if is_more:
            tiles.release(slot)
        middle = issue_middle(W, n, tiles)
        dq_sums.stage_chunk(chunk, W)
        tiles.wait(n + 1, pred=is_more)
        # After the last tile this multiplies whatever is in the slot; the result is not used.
        s = issue_scores(W, n, slot_of(n + 1, STAGES), tiles)
        middle = warpgroup_mma_wait(2, deps=(middle,))
        if is_more:
            tiles.release_ds(W)
        dq_sums.stage_middle(middle, W)
        s = warpgroup_mma_wait(0, deps=(s,))
        _, t, head = loop.next_in_group(t, t, head)
    return dk, dk_rest, dv


@gluon.jit
def clean(W: gl.constexpr, first, second, value: gl.constexpr, CONSTANT_TIME: gl.constexpr):
    """Replace what is not finite in one half of two tiles, or of one that is given twice."""
    if CONSTANT_TIME:
        rewrite(first, W, 2, value)
        rewrite(second, W, 2, value)
        fence_async_shared()
        await_warps()
    elif gl.max(find_nonfinite(first, W, 2) | find_nonfinite(second, W, 2), 0) != 0:
        overwrite_nonfinite(first, W, 2, value)
        overwrite_nonfinite(second, W, 2, value)
        fence_async_shared()
        # `narrow/steps.py` says why.
        await_warps()


@gluon.jit
def begin_loop(W: gl.constexpr, n_loops, n_keys, begin, loop, tiles):
    """The scores of a loop's first step, once its keys and first query tiles are there, and clean.
    Keys were loaded `n_keys` times before."""
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    is_any = loop.n_steps > 0
    k, k_rest, v = tiles.keys(0)
    mbarrier.wait(tiles.k_full_bar, n_keys & 1, pred=is_any)
    tiles.wait(begin, pred=is_any)
    if MASKED:  # noqa: SIM102
        if is_any:
            clean(W, k, k_rest, largest(k.dtype), loop.CONSTANT_TIME)
            tiles.sync_consumers()
    s = issue_scores(W, begin, slot_of(begin, STAGES), tiles)
    # The last dk is staged where dS is going to be.
    mbarrier.wait(tiles.dkv_stored_bar, (n_loops & 1) ^ 1)
    mbarrier.wait(tiles.v_full_bar, n_keys & 1, pred=is_any)
    s = warpgroup_mma_wait(0, deps=(s,))
    if MASKED:  # noqa: SIM102
        if is_any:
            clean(W, v, v, 0, loop.CONSTANT_TIME)
            tiles.sync_consumers()
    return s


@gluon.jit
def end_loop(W: gl.constexpr, n, loop, tiles, dq_sums, dk, dk_rest, dv, scale):
    """The end of a loop, after `n` steps in all: publishes the last tile of dQ that this consumer
    has staged, and stages dk and dv."""
    slot = slot_of(n + 1, STAGES)
    fence_async_shared()
    if loop.n_steps > 0:
        tiles.release(slot)
    dq_sums.publish(W, loop.n_steps > 0)
    tiles.sync_consumers()
    if loop.HAS_LEFT or loop.HAS_RIGHT:
        # Whatever is not finite is NaN: `nonfinite.py`.
        dk += dk * 0.0
        dk_rest += dk_rest * 0.0
        dv += dv * 0.0
    nan_if_bad = loop.nan_if_bad()
    scale += nan_if_bad
    tiles.stage_dkv(W, slot, dk * scale, dk_rest * scale, dv * (1.0 + nan_if_bad))


@gluon.jit
def consume(W: gl.constexpr, queue, tiles, dq_sums, scores):
    """Partition of four warps: the keys from W·ROWS on, and one half of every tile of dQ."""
    n_loops = 0
    n_keys = 0  # how often keys have been loaded: a loop of no tile has none
    begin = 0
    while queue.has(n_loops):
        loop, _ = queue.read(n_loops)
        end = begin + loop.n_steps
        s = begin_loop(W, n_loops, n_keys, begin, loop, tiles)
        dk, dk_rest, dv = take_steps(W, s, begin, end, loop, tiles, dq_sums, scores)
        end_loop(W, end, loop, tiles, dq_sums, dk, dk_rest, dv, scores.scale)
        begin = end
        n_keys += gl.minimum(loop.n_steps, 1)
        n_loops += 1
