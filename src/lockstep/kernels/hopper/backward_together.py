"""Consumers that take each step together, for head dims above 64.

    issue S, dP             S is waited for
    issue dV                exponentials have run under dP, dS runs under dV
    meet                    dS of both is there
    issue dQ, dK            dQ leaves under dK

It is shared memory that a step takes time for here. S, dP and dQ read operands in every cycle, dV
and dK, with one operand in registers, in every other. Whatever else is read or written has to wait
until then, and whoever waits for it with it: so lse is read under dK of the step before, and dQ is
written there and fenced only with dS of the next step.
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
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)


@gluon.jit
def consume_together(
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
        lse2 = tiles.stats.index(begin % STAGES).slice(0, BLOCK_Q).load(columns)
        t = walk.first_number()
        if MASKED:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
            if is_any:
                clean_keys(W, tiles)
        # The last dv lies where dS is going to be.
        mbarrier.wait(tiles.dkv_stored, (calls & 1) ^ 1)
        for n in range(begin, end):
            slot = n % STAGES
            stats = tiles.stats.index(slot)
            q = tiles.matrix(tiles.q.index(slot))
            dout = tiles.matrix(tiles.dout.index(slot))
            k, v = tiles.keys(n, False)
            s = multiply_scores(k.slice(W * ROWS, ROWS, dim=0), q)
            # Everyone has read dS of the step before the last. Triton would see to it only when the
            # next one is to be written and the other warpgroup waits for it.
            await_warps()
            if MASKED:  # noqa: SIM102
                if walk.cuts(t):
                    clean_queries(W, tiles, slot, columns)
            dp = multiply_scores(v.slice(W * ROWS, ROWS, dim=0), dout)
            s = warpgroup_mma_wait(1, deps=(s,))
            p, slope = weigh_seen(
                s, gl.expand_dims(lse2, 0), walk, t, W * ROWS, scale_log2, cap_log2, CAPPED,
                HIDES_SCORES, MASKED,
            )  # fmt: skip
            dv = add_product(dv, p.to(dtype), dout)

            dp = warpgroup_mma_wait(1, deps=(dp,))
            delta = stats.slice(BLOCK_Q, BLOCK_Q).load(columns)
            ds = derive_scores(p, dp, gl.expand_dims(delta, 0), slope, CAPPED).to(dtype)
            ds_tile = tiles.matrix(tiles.ds.index(n % 2))
            ds_tile.slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
            # For dS, and for dQ of the step before.
            fence_async_shared()
            turns.announce(n - 1, n > begin)
            tiles.meet()
            dq = multiply_dq(ds_tile, k, W)
            dk = add_product(dk, ds, q)

            turns.await_room(n)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            ahead = (n + 1) % STAGES
            is_more = n + 1 < end
            if not is_more:
                tiles.release_keys()
            turns.leave(n, dq, W)
            mbarrier.wait(tiles.full.index(ahead), ((n + 1) // STAGES) & 1, pred=is_more)
            lse2 = tiles.stats.index(ahead).slice(0, BLOCK_Q).load(columns)
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            if is_more:
                tiles.release(slot)
            t = walk.next_number(t)

        finish(W, end, walk, tiles, turns, dk, dv, scale, MASKED)
        begin = end
        keys += gl.minimum(walk.n_steps, 1)
        calls += 1
