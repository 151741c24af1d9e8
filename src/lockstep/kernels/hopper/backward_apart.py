"""Consumers that run apart, for head dims up to 64.

    issue dP                        exponentials run under it
    issue dV                        dS runs under it
    issue dQ of the step before, dK dQ leaves under dK
    issue S, next tile

With 128 query rows there are twice as many exponentials for as many products, and two warpgroups
that computed them at the same time would leave the matrix units idle. So dQ is multiplied one step
later: by then dS of the other warpgroup has long been there, and neither has to wait for the other.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_products import (
    ROWS,
    accumulator,
    add_product,
    derive_scores,
    finish,
    multiply_dq,
    multiply_scores,
    weigh_seen,
    zeros,
)
from lockstep.kernels.hopper.backward_strays import clean_keys, clean_queries
from lockstep.kernels.hopper.backward_tiles import STAGES
from lockstep.kernels.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)


@gluon.jit
def consume_apart(
    W: gl.constexpr, board, tiles, turns, scale, scale_log2, cap_log2, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """`backward_kernel.consume`"""
    BLOCK_Q: gl.constexpr = board.BLOCK_Q
    MASKED: gl.constexpr = board.HAS_LEFT or board.HAS_RIGHT
    D: gl.constexpr = tiles.k.shape[5]
    dtype: gl.constexpr = tiles.k.dtype
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_Q))

    calls = 0
    keys = 0  # that have been loaded: walks of no tile have none
    begin = 0
    while board.has(calls):
        walk = board.read(calls)
        end = begin + walk.n_steps
        is_any = walk.n_steps > 0
        dk, dv = zeros(D), zeros(D)
        mbarrier.wait(tiles.kv_full, keys & 1, pred=is_any)
        mbarrier.wait(tiles.full.index(begin % STAGES), (begin // STAGES) & 1, pred=is_any)
        t = walk.first_number()
        if MASKED:
            if is_any:
                clean_keys(W, tiles)
            if walk.cuts(t) & is_any:
                clean_queries(W, tiles, begin % STAGES, columns)
        first_k, _ = tiles.keys(0, True)
        first_q = tiles.matrix(tiles.q.index(begin % STAGES))
        s = multiply_scores(first_k.slice(W * ROWS, ROWS, dim=0), first_q)
        s = warpgroup_mma_wait(0, deps=(s,))
        for n in range(begin, end):
            slot = n % STAGES
            stats = tiles.stats.index(slot)
            q = tiles.matrix(tiles.q.index(slot))
            dout = tiles.matrix(tiles.dout.index(slot))
            k, v = tiles.keys(n, not MASKED)
            dp = multiply_scores(v.slice(W * ROWS, ROWS, dim=0), dout)
            lse2 = gl.expand_dims(stats.slice(0, BLOCK_Q).load(columns), 0)
            p, slope = weigh_seen(
                s, lse2, walk, t, W * ROWS, scale_log2, cap_log2, CAPPED, HIDES_SCORES, False
            )
            dv = add_product(dv, p.to(dtype), dout)

            dp = warpgroup_mma_wait(1, deps=(dp,))
            # Read no earlier: registers are short while scores and dp are both there.
            delta = stats.slice(BLOCK_Q, BLOCK_Q).load(columns)
            ds = derive_scores(p, dp, gl.expand_dims(delta, 0), slope, CAPPED).to(dtype)
            mbarrier.wait(tiles.ds_empty.index(n % 2), ((n // 2) & 1) ^ 1)
            ds_tile = tiles.matrix(tiles.ds.index(n % 2))
            ds_tile.slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
            # For dS, and for what was left of dQ in the step before.
            fence_async_shared()
            turns.announce(n - 2, n > begin + 1)
            mbarrier.arrive(tiles.ds_full.index(n % 2), count=1)
            # The first step has no step before it: what it multiplies instead goes nowhere.
            is_part = n > begin
            m = gl.where(is_part, n - 1, n)
            mbarrier.wait(tiles.ds_full.index(m % 2), (m // 2) & 1, pred=is_part)
            dq = multiply_dq(tiles.matrix(tiles.ds.index(m % 2)), k, W)
            dk = add_product(dk, ds, q)

            turns.await_room(m)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            mbarrier.arrive(tiles.ds_empty.index(m % 2), count=1, pred=is_part)
            turns.leave(m, dq, W)
            ahead = (n + 1) % STAGES
            is_more = n + 1 < end
            mbarrier.wait(tiles.full.index(ahead), ((n + 1) // STAGES) & 1, pred=is_more)
            t = walk.next_number(t)
            if MASKED:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
                if walk.cuts(t) & is_more:
                    clean_queries(W, tiles, ahead, columns)
            # After the last tile this multiplies what lies there, and nobody looks at it.
            s = multiply_scores(k.slice(W * ROWS, ROWS, dim=0), tiles.matrix(tiles.q.index(ahead)))
            s, dk, dv = warpgroup_mma_wait(0, deps=(s, dk, dv))
            if is_more:
                tiles.release(slot)

        fence_async_shared()
        turns.announce(end - 2, walk.n_steps > 1)
        m = gl.where(is_any, end - 1, end)
        mbarrier.wait(tiles.ds_full.index(m % 2), (m // 2) & 1, pred=is_any)
        last_k, _ = tiles.keys(0, True)
        last_ds = tiles.matrix(tiles.ds.index(m % 2))
        dq = warpgroup_mma_wait(0, deps=(multiply_dq(last_ds, last_k, W),))
        if is_any:
            tiles.release_keys()
        mbarrier.arrive(tiles.ds_empty.index(m % 2), count=1, pred=is_any)
        turns.await_room(m)
        turns.leave(m, dq, W)
        # Those of the walk before, which may have been in the same place.
        mbarrier.wait(tiles.dkv_stored, (calls & 1) ^ 1)
        finish(W, end, walk, tiles, turns, dk, dv, scale, MASKED)
        begin = end
        keys += gl.minimum(walk.n_steps, 1)
        calls += 1
