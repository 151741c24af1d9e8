"""Steps of the consumers: the common part of both schedules, `together.py` and `apart.py`.

Scores and dS are transposed, keys by queries: so Pᵀ and dSᵀ are already the left operands, in
registers, of the products for dV and dK.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.cuts import load_sums, signal, store_sums
from lockstep.kernels.hopper.backward.narrow.dq_sums import rest_width
from lockstep.kernels.hopper.backward.narrow.tiles import STAGES
from lockstep.kernels.hopper.backward.nonfinite import (
    find_nonfinite,
    largest,
    overwrite_nonfinite,
    rewrite,
)
from lockstep.kernels.hopper.backward.shares import store_share
from lockstep.kernels.hopper.backward.turns import await_count
from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
)
from lockstep.kernels.hopper.common.pieces import empty_sums, multiply_all, nan_for_nonfinite


@aggregate
class LargeScores:
    """Where the weights of a loop with large scores come from: `rows.py`. A loop without any has
    none, and is not slowed down by it: it has code of its own. In constant time every loop is
    computed as if it had some, with m in place of lse2."""

    rows_ptr: gl.tensor  # m and log2 l of all tiles, [n_tiles, 2, BLOCK_Q]; see `log2_l`
    ANY: gl.constexpr
    CONSTANT_TIME: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows_ptr, ANY, CONSTANT_TIME=False):
        self.rows_ptr = rows_ptr
        self.ANY = gl.constexpr(ANY)
        self.CONSTANT_TIME = gl.constexpr(CONSTANT_TIME)

    @gluon.jit
    def weights(
        self, scores, s, lse2, log2_l, tile, first_column: gl.constexpr, BLOCK_Q: gl.constexpr
    ):  # fmt: skip
        """Weights of scores s of a tile, of columns from `first_column` on; lse2 is [1, ·]."""
        if self.CONSTANT_TIME:
            p = scores.exact_weights(s, lse2, log2_l)
        elif self.ANY:
            columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
            column = first_column + gl.arange(0, s.shape[1], columns)
            at = self.rows_ptr + tile.to(gl.int64) * (2 * BLOCK_Q) + column
            m = gl.expand_dims(gl.load(at), 0)
            log2_l = gl.expand_dims(gl.load(at + BLOCK_Q), 0)
            p = scores.exact_weights(s, m, log2_l)
        else:
            p = gl.exp2(s * scores.unit - lse2)
        return p

    @gluon.jit
    def log2_l(
        self, tiles, slot, tile, first: gl.constexpr, N: gl.constexpr, BLOCK_Q: gl.constexpr
    ):  # fmt: skip
        """log2 l of N rows of a tile in a slot, [1, N], in constant time: from shared memory, or,
        if that has no room, from statistics [n_tiles, 4, BLOCK_Q] at `rows_ptr`. 0 otherwise."""
        if not self.CONSTANT_TIME:
            found = 0
        elif tiles.STATS == 2:
            found = load_half(tiles.log2_l(slot), first, N)
        else:
            columns: gl.constexpr = gl.SliceLayout(0, accumulator(N))
            at = self.rows_ptr + tile.to(gl.int64) * (4 * BLOCK_Q) + (2 * BLOCK_Q + first)
            found = gl.expand_dims(gl.load(at + gl.arange(0, N, columns)), 0)
        return found


@gluon.jit
def column_weights(
    scores, large, s, lse2, log2_l, loop, tile, t, first_row: gl.constexpr,
    first_column: gl.constexpr,
):  # fmt: skip
    """Weights and slopes of columns from `first_column` on, after `Scores.hide_products`; weights
    of hidden pairs are 0."""
    s, slope = scores.finish(s)
    p = large.weights(scores, s, lse2, log2_l, tile, first_column, loop.BLOCK_Q)
    return scores.hide_weights(p, slope, loop, t, first_row, first_column)


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
def whole(left, right):
    """The accumulator of which `left` and `right` are the `halves`."""
    N: gl.constexpr = left.shape[1] * 2
    x = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, N])
    return gl.convert_layout(x, accumulator(N), assert_trivial=True)


@gluon.jit
def load_half(stats_smem, first: gl.constexpr, N: gl.constexpr):
    """Statistics of N rows from `first` on, as [1, N] in the layout of a half's columns."""
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(N))
    return gl.expand_dims(stats_smem.slice(first, N).load(columns), 0)


@gluon.jit
def load_deltas(stats_smem, HALF: gl.constexpr):
    """delta of the left and of the right half of a tile's columns."""
    return load_half(stats_smem, 2 * HALF, HALF), load_half(stats_smem, 3 * HALF, HALF)


@gluon.jit
def find_ds(
    scores, p_left, p_right, slope_left, slope_right, dp, stats_smem, deltas, dtype: gl.constexpr
):  # fmt: skip
    """dS [ROWS, BLOCK_Q] in 16 bits from weights, slopes and dp; `deltas` are read here, each where
    it is needed, if they are None."""
    HALF: gl.constexpr = p_left.shape[1]
    dp_left, dp_right = halves(dp)
    delta = load_half(stats_smem, 2 * HALF, HALF) if deltas is None else deltas[0]
    ds_left = scores.gradient(p_left, dp_left, delta, slope_left)
    delta = load_half(stats_smem, 3 * HALF, HALF) if deltas is None else deltas[1]
    ds_right = scores.gradient(p_right, dp_right, delta, slope_right)
    return whole(ds_left.to(dtype), ds_right.to(dtype))


@gluon.jit
def issue_dq(ds, k, half: gl.constexpr, COLUMNS: gl.constexpr):
    """A consumer's part of dQ from ds [BLOCK_Q, BLOCK_KV] and k [BLOCK_KV, D], under way: 64 of its
    rows or, where BLOCK_Q is 64, all rows of 64 of the COLUMNS of k, or of those that are left."""
    WIDTH: gl.constexpr = rest_width(COLUMNS) if half == 1 else 64
    if ds.shape[0] == 64:
        k = k.slice(half * 64, WIDTH, dim=1)
    else:
        ds = ds.slice(half * 64, 64, dim=0)
    return warpgroup_mma(ds, k, zeros(WIDTH), use_acc=False, is_async=True)


@gluon.jit
def clean_keys(W: gl.constexpr, tiles, CONSTANT_TIME: gl.constexpr):
    """Replace what is not finite in one half of k and of v. On return both halves are clean."""
    k, v = tiles.keys(0, True)
    if CONSTANT_TIME:
        rewrite(k, W, 2, largest(k.dtype))
        rewrite(v, W, 2, 0)
        fence_async_shared()
        await_warps()
    elif gl.max(find_nonfinite(k, W, 2) | find_nonfinite(v, W, 2), 0) != 0:
        overwrite_nonfinite(k, W, 2, largest(k.dtype))
        overwrite_nonfinite(v, W, 2, 0)
        fence_async_shared()
        # Triton, which does not know of `sync_consumers`, would have warps wait in every step.
        await_warps()
    tiles.sync_consumers()


@gluon.jit
def begin_loop(W: gl.constexpr, n, begin, n_keys, queue, tiles):
    """The n-th loop of a consumer, whose steps begin with number `begin`, once its keys and first
    query tiles are there; where its steps end, and whether it has large scores. Keys were loaded
    `n_keys` times before."""
    loop, is_large = queue.read(n, queue.sizes.CUT)
    end = begin + loop.n_steps
    is_any = loop.n_steps > 0
    mbarrier.wait(tiles.kv_full_bar, n_keys & 1, pred=is_any)
    tiles.wait(begin, pred=is_any)
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    if MASKED:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
        if is_any:
            clean_keys(W, tiles, loop.CONSTANT_TIME)
    return loop, end, is_large


@gluon.jit
def begin_sums(W: gl.constexpr, n, queue, tiles):
    """dk and dv when the n-th loop begins: 0, or the sums of the span before."""
    D: gl.constexpr = tiles.D_COLUMNS
    DV: gl.constexpr = tiles.DV_COLUMNS
    dk, dv = empty_sums(D), empty_sums(DV)
    if queue.sizes.CUT:
        signals = queue.signals_before(n)
        if signals > 0:
            await_count(queue.signals_at(n), signals, True)
            block_ptr = queue.sums_ptr(n) + W * ROWS * (D + DV)
            dk = load_sums(block_ptr, 0, D)
            dv = load_sums(block_ptr, D, DV)
    return dk, dv


@gluon.jit
def take_loop(
    take_steps: gl.constexpr, W: gl.constexpr, begin, end, loop, is_large, tiles, dq_sums, scores,
    large_ptr, dk, dv, MAY_BE_LARGE: gl.constexpr,
):  # fmt: skip
    """The sums dk and dv after the steps of a loop, by `take_steps` of a schedule."""
    if not MAY_BE_LARGE:
        # In constant time all loops are computed as large ones, and this is known beforehand.
        large = LargeScores(large_ptr, loop.CONSTANT_TIME, loop.CONSTANT_TIME)
        dk, dv = take_steps(W, begin, end, loop, tiles, dq_sums, scores, large, dk, dv)
    elif is_large:
        dk, dv = take_steps(
            W, begin, end, loop, tiles, dq_sums, scores, LargeScores(large_ptr, True), dk, dv
        )
    else:
        dk, dv = take_steps(
            W, begin, end, loop, tiles, dq_sums, scores, LargeScores(large_ptr, False), dk, dv
        )
    return dk, dv


@gluon.jit
def end_loop(W: gl.constexpr, n, end, loop, queue, tiles, dq_sums, dk, dv, scale):
    """The end of the n-th loop, after `end` steps in all: publishes the last tile of dQ that this
    consumer has staged, and stages dk and dv; those of one share of several go to memory as they
    are, and those of a span that another one follows."""
    D: gl.constexpr = tiles.D_COLUMNS
    DV: gl.constexpr = tiles.DV_COLUMNS
    fence_async_shared()
    dq_sums.publish(end - 1, loop.n_steps > 0)
    tiles.sync_consumers()
    if queue.sizes.SHARED:
        if loop.share >= 0:
            nan_if_bad = loop.nan_if_bad()
            number = loop.share * 2 + W
            dk = multiply_all(dk, 1.0 + nan_if_bad)
            dv = multiply_all(dv, 1.0 + nan_if_bad)
            store_share(queue.sizes.shares_ptr, number, dk, 0, D, D + DV)
            store_share(queue.sizes.shares_ptr, number, dv, D, DV, D + DV)
            tiles.publish_dkv()
        else:
            stage_gradients(W, end, loop, tiles, dk, dv, scale)
    elif queue.sizes.CUT:
        # The same number; but nothing that was computed from it stays in registers through a loop.
        n += end >> 30
        if queue.goes_on(n):
            block_ptr = queue.sums_ptr(n) + W * ROWS * (D + DV)
            store_sums(block_ptr, dk, 0, D)
            store_sums(block_ptr, dv, D, DV)
            signal(queue.signals_at(n))
            tiles.publish_dkv()
        else:
            stage_gradients(W, end, loop, tiles, dk, dv, scale)
        queue.release(n)
    else:
        stage_gradients(W, end, loop, tiles, dk, dv, scale)


@gluon.jit
def stage_gradients(W: gl.constexpr, n, loop, tiles, dk, dv, scale):
    """dk and dv of all queries that see the keys, to be stored."""
    if loop.HAS_LEFT or loop.HAS_RIGHT:
        # Whatever is not finite is NaN: `nonfinite.py`.
        dk = nan_for_nonfinite(dk)
        dv = nan_for_nonfinite(dv)
    nan_if_bad = loop.nan_if_bad()
    dk = multiply_all(dk, scale + nan_if_bad)
    dv = multiply_all(dv, 1.0 + nan_if_bad)
    tiles.stage_dkv(W, (n + 1) % STAGES, dk, dv)
