"""The backward kernel: five matrix products per pair of tiles, each computed once.

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ    Pᵀ = exp2(Sᵀ·scale - lse)    dSᵀ = Pᵀ∘(dPᵀ - delta)
    dV += Pᵀ·dO    dK += dSᵀ·Q    dQ += dS·K

A program owns BLOCK_KV = 128 keys and walks over the query tiles that see them. Two warpgroups of
64 keys hold dK and dV in registers. Scores are computed transposed, so that Pᵀ and dSᵀ are already
the left operands, in registers, of the products for dV and dK. Only dQ sums over all 128 keys: for
it dSᵀ goes through shared memory, and each warpgroup multiplies one half of the tile of dQ, which
is then added to sums in global memory (`backward_turns.py`).

The exponentials of a tile run under V·dOᵀ, its dS under Pᵀ·dO; then the warpgroups meet, and its dQ
leaves under dSᵀ·Q. What a step costs is shared memory: the products alone read it in four cycles of
five, so whatever else is read or written is placed under the two products that have their left
operand in registers, and fenced once a step. Further warps have one task each: to load tiles, to
wait for turns at dQ, to add to it, and where there is a mask, to look for what is not finite.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_strays import inspect
from lockstep.kernels.hopper.backward_tiles import STAGES, Tiles
from lockstep.kernels.hopper.backward_turns import Turns, add_parts, take_turns
from lockstep.kernels.hopper.backward_walk import assign
from lockstep.kernels.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # keys of a warpgroup: the height of a wgmma
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def produce(job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc, v_desc,
            dk_desc, dv_desc):  # fmt: skip
    """Partition of one warp: loads k, v and the query tiles, and stores dk and dv."""
    mbarrier.expect(tiles.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, job.kv_coordinates(), tiles.kv_full, tiles.k)
    tma_load(v_desc, job.kv_coordinates(), tiles.kv_full, tiles.v)
    tile = walk.first_tile
    t = tile * 0
    head = job.head * heads_per_kv
    for n in range(walk.n_steps):
        slot = n % STAGES
        row = job.q_coordinates(head, (job.first_q_tile + t) * walk.BLOCK_Q)
        if n >= STAGES:
            tiles.await_empty(slot)
        full = tiles.full.index(slot)
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
        tma_load(q_desc, row, full, tiles.q.index(slot))
        tma_load(stats_desc, [tile * (2 * walk.BLOCK_Q)], full, tiles.stats.index(slot))
        tma_load(dout_desc, row, full, tiles.dout.index(slot))
        tile, t = walk.next(tile, t)
        head = gl.where(t == 0, head + 1, head)
    mbarrier.wait(tiles.dkv_full, 0)
    tma_store(dk_desc, job.dkv_coordinates(), tiles.k)
    tma_store(dv_desc, job.dkv_coordinates(), tiles.v)
    tma_store_wait(0)


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
def consume(
    W: gl.constexpr, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """Partition of four warps: the keys from W·ROWS on, and one half of every tile of dQ.

    A cap or a scale that is not positive would bring scores of -inf back; unless HIDES_SCORES, it
    is the weights that are hidden."""
    BLOCK_Q: gl.constexpr = walk.BLOCK_Q
    MASKED: gl.constexpr = walk.HAS_LEFT or walk.HAS_RIGHT
    D: gl.constexpr = tiles.k.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    dk = gl.zeros([ROWS, D], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, D], gl.float32, acc_layout)
    k = tiles.matrix(tiles.k)
    own_k = k.slice(W * ROWS, ROWS, dim=0)
    own_v = tiles.matrix(tiles.v).slice(W * ROWS, ROWS, dim=0)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    # S and dP read shared memory in every cycle, dK in every other: lse2 is read under dK of the
    # step before, if the registers are there.
    EARLY: gl.constexpr = BLOCK_Q == 64
    ready = tiles.inspected if MASKED else tiles.full
    mbarrier.wait(tiles.kv_full, 0)
    mbarrier.wait(ready.index(0), 0, pred=walk.n_steps > 0)
    if EARLY:
        lse2 = tiles.stats.index(0).slice(0, BLOCK_Q).load(columns)
    t = walk.n_steps * 0
    for n in range(walk.n_steps):
        slot = n % STAGES
        stats = tiles.stats.index(slot)
        q = tiles.matrix(tiles.q.index(slot))
        dout = tiles.matrix(tiles.dout.index(slot))
        s = multiply_scores(own_k, q)
        dp = multiply_scores(own_v, dout)
        s = warpgroup_mma_wait(1, deps=(s,))
        if not EARLY:
            lse2 = stats.slice(0, BLOCK_Q).load(columns)
        if HIDES_SCORES:
            if walk.cuts(t):
                s = walk.hide(s, t, W * ROWS, -float("inf"))
            p, slope = weigh(s, gl.expand_dims(lse2, 0), scale_log2, cap_log2, CAPPED)
        else:
            p, slope = weigh(s, gl.expand_dims(lse2, 0), scale_log2, cap_log2, CAPPED)
            if walk.cuts(t):
                p = walk.hide(p, t, W * ROWS, 0.0)
                slope = walk.hide(slope, t, W * ROWS, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), left), dout, dv, is_async=True)

        dp = warpgroup_mma_wait(1, deps=(dp,))
        delta = stats.slice(BLOCK_Q, BLOCK_Q).load(columns)
        ds = p * (dp - gl.expand_dims(delta, 0))
        if CAPPED:
            ds = ds * slope
        ds = ds.to(dtype)
        ds_tile = tiles.ds.index(n % 2)
        ds_tile.slice(W * ROWS, ROWS, dim=1).permute((1, 0)).store(ds)
        # For dS, and for dQ of the step before.
        fence_async_shared()
        turns.announce(n - 1)
        tiles.meet()
        if MASKED:
            mbarrier.wait(tiles.k_inspected, 0, pred=n == 0)
        dq = multiply_dq(ds_tile, k, W)
        dk = warpgroup_mma(gl.convert_layout(ds, left), q, dk, is_async=True)

        turns.await_room(n)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        turns.leave(n, dq, W)
        ahead = (n + 1) % STAGES
        is_more = n + 1 < walk.n_steps
        mbarrier.wait(ready.index(ahead), ((n + 1) // STAGES) & 1, pred=is_more)
        if EARLY:
            lse2 = tiles.stats.index(ahead).slice(0, BLOCK_Q).load(columns)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        if n + STAGES < walk.n_steps:
            tiles.release(slot)
        t = walk.next_number(t)

    fence_async_shared()
    turns.announce(walk.n_steps - 1)
    # From here on nobody reads k.
    tiles.meet()
    if MASKED:
        # Whatever is not finite is NaN: `backward_strays`.
        dk += dk * 0.0
        dv += dv * 0.0
    own_v.store(dv.to(dtype))
    own_k.store((dk * scale).to(dtype))
    fence_async_shared()
    mbarrier.arrive(tiles.dkv_full, count=1)


@gluon.jit(
    do_not_specialize=[
        "turn_ptr", "ticket_ptr", "cu_q_ptr", "cu_kv_ptr", "kv_lens_ptr", "kv_slots", "q_slots",
        "n_heads", "heads_at_once", "Hkv", "heads_per_kv", "B", "Sq", "Skv", "left", "right",
        "kv_batch_rows",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, turn_ptr,
    ticket_ptr, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, scale, scale_log2, cap_log2, kv_slots, q_slots,
    n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left, right, kv_batch_rows,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    # Drawn in the order in which programs start to run.
    ticket = gl.atomic_add(ticket_ptr, 1)
    job, walk = assign(
        ticket, kv_slots, q_slots, n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left,
        right, kv_batch_rows, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT,
        HAS_EDGE, q_desc.block_shape[3], k_desc.block_shape[3],
    )  # fmt: skip
    tiles = Tiles.create(q_desc, dout_desc, stats_desc, k_desc, v_desc)
    turns = Turns.create(sums_desc)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if HAS_LEFT or HAS_RIGHT:
        gl.warp_specialize(
            [
                (consume, (0, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (produce, (job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc,
                           v_desc, dk_desc, dv_desc)),
                (take_turns, (turns, turn_ptr, walk)),
                (add_parts, (turns, sums_desc, turn_ptr, walk)),
                (inspect, (walk, tiles)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (produce, (job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc,
                           v_desc, dk_desc, dv_desc)),
                (take_turns, (turns, turn_ptr, walk)),
                (add_parts, (turns, sums_desc, turn_ptr, walk)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
