"""The backward kernel: five matrix products per pair of tiles, each computed once.

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ    Pᵀ = exp2(Sᵀ·scale - lse)    dSᵀ = Pᵀ∘(dPᵀ - delta)
    dV += Pᵀ·dO    dK += dSᵀ·Q    dQ += dS·K

A program owns BLOCK_KV = 128 keys and walks over the query tiles that see them. Two warpgroups of
64 keys hold dK and dV in registers. Scores are computed transposed, so that Pᵀ and dSᵀ are already
the left operands, in registers, of the products for dV and dK. Only dQ sums over all 128 keys: for
it dSᵀ goes through shared memory, and each warpgroup multiplies one half of the tile of dQ, which
is then added to sums in global memory (`backward_turns.py`).

The exponentials of a tile run under V·dOᵀ, its dS under Pᵀ·dO, its way out of dQ under dSᵀ·Q.
Three more warps have one task each: to load tiles, to wait for turns at dQ, to add to it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_turns import Turns, add_parts, take_turns
from lockstep.kernels.hopper.backward_walk import Job, Walk, find_sequence
from lockstep.kernels.hopper.gluon_shim import (
    aggregate,
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
STAGES = gl.constexpr(2)
LOG2E = gl.constexpr(1.4426950408889634)


@aggregate
class Tiles:
    """All that lies in shared memory. `stats` holds lse2 and delta of a query tile."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    dout: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor  # [STAGES, 2 * BLOCK_Q] fp32
    k: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_KV, D], dk in the end
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # [2, BLOCK_KV, BLOCK_Q]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    dout_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    dkv_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, rings, single):
        self.q = tiles[0]
        self.dout = tiles[1]
        self.stats = tiles[2]
        self.k = tiles[3]
        self.v = tiles[4]
        self.ds = tiles[5]
        self.q_full = rings[0]
        self.q_empty = rings[1]
        self.dout_full = rings[2]
        self.dout_empty = rings[3]
        self.ds_full = rings[4]
        self.kv_full = single[0]
        self.dkv_full = single[1]

    @gluon.jit
    def create(q_desc, dout_desc, stats_desc, k_desc, v_desc):
        dtype: gl.constexpr = q_desc.dtype
        BLOCK_Q: gl.constexpr = q_desc.block_shape[3]
        BLOCK_KV: gl.constexpr = k_desc.block_shape[3]
        barrier: gl.constexpr = mbarrier.MBarrierLayout()
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, BLOCK_Q], dtype)
        # Both are [STAGES, 1, 1, 1, BLOCK_Q, D].
        ring: gl.constexpr = [STAGES, 1, 1, 1, BLOCK_Q, q_desc.block_shape[4]]
        q = gl.allocate_shared_memory(dtype, ring, q_desc.layout)
        dout = gl.allocate_shared_memory(dtype, ring, dout_desc.layout)
        stats = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_Q], stats_desc.layout)
        k = gl.allocate_shared_memory(dtype, k_desc.block_shape, k_desc.layout)
        v = gl.allocate_shared_memory(dtype, v_desc.block_shape, v_desc.layout)
        ds = gl.allocate_shared_memory(dtype, [2, BLOCK_KV, BLOCK_Q], ds_layout)
        q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        dout_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
        dkv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
        for i in gl.static_range(STAGES):
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=2)
            mbarrier.init(dout_full.index(i), count=1)
            mbarrier.init(dout_empty.index(i), count=2)
        for i in gl.static_range(2):
            mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(kv_full, count=1)
        mbarrier.init(dkv_full, count=2)
        return Tiles(
            (q, dout, stats, k, v, ds),
            (q_full, q_empty, dout_full, dout_empty, ds_full),
            (kv_full, dkv_full),
        )

    @gluon.jit
    def matrix(self, tile):
        """A tile as [rows, D]."""
        return tile.reshape([tile.shape[3], tile.shape[4]])


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
        emptied = ((n // STAGES) & 1) ^ 1
        row = job.q_coordinates(head, (job.last_q_tile - t) * walk.BLOCK_Q)
        mbarrier.wait(tiles.q_empty.index(slot), emptied)
        full = tiles.q_full.index(slot)
        mbarrier.expect(full, q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
        tma_load(q_desc, row, full, tiles.q.index(slot))
        tma_load(stats_desc, [tile * (2 * walk.BLOCK_Q)], full, tiles.stats.index(slot))
        mbarrier.wait(tiles.dout_empty.index(slot), emptied)
        mbarrier.expect(tiles.dout_full.index(slot), dout_desc.block_type.nbytes)
        tma_load(dout_desc, row, tiles.dout_full.index(slot), tiles.dout.index(slot))
        tile, t = walk.next(tile, t)
        head = gl.where(t == 0, head + 1, head)
    mbarrier.wait(tiles.dkv_full, 0)
    tma_store(dk_desc, job.dkv_coordinates(), tiles.k)
    tma_store(dv_desc, job.dkv_coordinates(), tiles.v)
    tma_store_wait(0)


@gluon.jit
def weigh(s, lse2, scale_log2, cap_log2, CAPPED: gl.constexpr):
    """Weights [ROWS, BLOCK_Q] from raw products, and what a cap multiplies their gradients by."""
    if CAPPED:
        # tanh x = 1 - 2 / (1 + e^2x); exp2 may overflow to inf, which makes it 1.
        tanh = 1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * scale_log2 / cap_log2 * LOG2E)))
        slope = 1.0 - tanh * tanh
        s = tanh * cap_log2
    else:
        slope = s
        s = s * scale_log2
    return gl.exp2(s - gl.expand_dims(lse2, 0)), slope


@gluon.jit
def consume(
    W: gl.constexpr, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED: gl.constexpr
):  # fmt: skip
    """Partition of four warps: the keys from W·ROWS on, and one half of every tile of dQ."""
    BLOCK_Q: gl.constexpr = walk.BLOCK_Q
    D: gl.constexpr = tiles.k.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    no_s = gl.zeros([ROWS, BLOCK_Q], gl.float32, s_layout)
    no_dq = gl.zeros([64, 64], gl.float32, dq_layout)
    dk = gl.zeros([ROWS, D], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, D], gl.float32, acc_layout)
    k = tiles.matrix(tiles.k)
    own_k = k.slice(W * ROWS, ROWS, dim=0)
    own_v = tiles.matrix(tiles.v).slice(W * ROWS, ROWS, dim=0)

    t = walk.n_steps * 0
    mbarrier.wait(tiles.kv_full, 0)
    mbarrier.wait(tiles.q_full.index(0), 0, pred=walk.n_steps > 0)
    q = tiles.matrix(tiles.q.index(0))
    s = warpgroup_mma(own_k, q.permute((1, 0)), no_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for n in range(walk.n_steps):
        slot = n % STAGES
        stats = tiles.stats.index(slot)
        dout = tiles.matrix(tiles.dout.index(slot))
        mbarrier.wait(tiles.dout_full.index(slot), (n // STAGES) & 1)
        dp = warpgroup_mma(own_v, dout.permute((1, 0)), no_s, use_acc=False, is_async=True)
        lse2 = stats.slice(0, BLOCK_Q).load(columns)
        if CAPPED:
            # A cap would bring what is hidden back, so it is hidden from the weights instead.
            p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
            if walk.cuts(t):
                p = gl.where(walk.hide(no_s, t, W * ROWS) == 0.0, p, 0.0)
        else:
            if walk.cuts(t):
                s = walk.hide(s, t, W * ROWS)
            p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
        p_left = gl.convert_layout(p.to(dtype), left)
        dv = warpgroup_mma(p_left, dout, dv, is_async=True)

        dp = warpgroup_mma_wait(1, deps=(dp,))
        # Read no earlier: registers are short while scores and dp are both there.
        delta = stats.slice(BLOCK_Q, BLOCK_Q).load(columns)
        ds = p * (dp - gl.expand_dims(delta, 0))
        if CAPPED:
            ds = ds * slope
        ds = ds.to(dtype)
        all_ds = tiles.ds.index(n & 1)
        all_ds.slice(W * ROWS, ROWS, dim=0).store(ds)
        fence_async_shared()
        # Whoever has arrived here is done with the buffer of the step before: two are enough.
        mbarrier.arrive(tiles.ds_full.index(n & 1), count=1)
        mbarrier.wait(tiles.ds_full.index(n & 1), (n >> 1) & 1)
        if BLOCK_Q == 64:
            ds_half, k_half = all_ds.permute((1, 0)), k.slice(W * 64, 64, dim=1)
        else:
            ds_half, k_half = all_ds.slice(W * 64, 64, dim=1).permute((1, 0)), k
        dq = warpgroup_mma(ds_half, k_half, no_dq, use_acc=False, is_async=True)
        q = tiles.matrix(tiles.q.index(slot))
        dk = warpgroup_mma(gl.convert_layout(ds, left), q, dk, is_async=True)

        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(tiles.dout_empty.index(slot), count=1)
        turns.give(n, dq, W)

        ahead = (n + 1) % STAGES
        is_more = n + 1 < walk.n_steps
        mbarrier.wait(tiles.q_full.index(ahead), ((n + 1) // STAGES) & 1, pred=is_more)
        # After the last tile this multiplies what lies there, and nobody looks at it.
        q = tiles.matrix(tiles.q.index(ahead))
        s = warpgroup_mma(own_k, q.permute((1, 0)), no_s, use_acc=False, is_async=True)
        s, dk, dv = warpgroup_mma_wait(0, deps=(s, dk, dv))
        mbarrier.arrive(tiles.q_empty.index(slot), count=1)
        t = walk.next_number(t)

    own_v.store(dv.to(dtype))
    # The other warpgroup may still read k for its dQ.
    mbarrier.arrive(tiles.ds_full.index(walk.n_steps & 1), count=1)
    mbarrier.wait(tiles.ds_full.index(walk.n_steps & 1), (walk.n_steps >> 1) & 1)
    own_k.store((dk * scale).to(dtype))
    fence_async_shared()
    mbarrier.arrive(tiles.dkv_full, count=1)


@gluon.jit
def assign(
    ticket_ptr, kv_slots, q_slots, n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left,
    right, kv_batch_rows, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, LAYOUT: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """The keys of this program. Tickets are drawn in the order in which programs start to run."""
    ticket = gl.atomic_add(ticket_ptr, 1)
    first_head = ticket // (kv_slots * heads_at_once) * heads_at_once
    heads = gl.minimum(heads_at_once, n_heads - first_head)
    ticket -= first_head * kv_slots
    slot = ticket // heads
    head = first_head + ticket % heads
    if LAYOUT == "varlen":
        batch = find_sequence(slot, cu_kv_ptr, B, BLOCK_KV)
        q_start = gl.load(cu_q_ptr + batch).to(gl.int32)
        kv_start = gl.load(cu_kv_ptr + batch).to(gl.int32)
        len_q = gl.load(cu_q_ptr + batch + 1).to(gl.int32) - q_start
        len_kv = gl.load(cu_kv_ptr + batch + 1).to(gl.int32) - kv_start
        kv_tile = slot - kv_start // BLOCK_KV - batch
        tile = head * heads_per_kv * q_slots + q_start // BLOCK_Q + batch
    else:
        batch = head // Hkv
        head = head % Hkv
        q_start = batch * 0
        kv_start = batch * 0
        len_q = Sq
        len_kv = Skv
        if LAYOUT == "kv_lens":
            kv_start = batch * kv_batch_rows
            len_kv = gl.load(kv_lens_ptr + batch).to(gl.int32)
        kv_tile = slot
        tile = (batch * Hkv + head) * heads_per_kv * q_slots

    kv_idx = kv_tile * BLOCK_KV
    diagonal = len_kv - len_q
    begin = kv_idx * 0
    end = len_q
    if HAS_RIGHT:
        begin = gl.maximum(kv_idx - diagonal - right, 0)
    if HAS_LEFT:
        last_key = gl.minimum(kv_idx + BLOCK_KV, len_kv) - 1
        end = gl.minimum(end, last_key - diagonal + left + 1)
    end = gl.where(kv_idx < len_kv, gl.maximum(end, 0), 0)
    last_q_tile = gl.cdiv(end, BLOCK_Q) - 1
    n_tiles = gl.maximum(last_q_tile - begin // BLOCK_Q + 1, 0)
    corner = kv_idx - diagonal - last_q_tile * BLOCK_Q  # first key - first query of the last tile
    walk = Walk(
        (
            tile + last_q_tile, n_tiles * heads_per_kv, n_tiles, q_slots, kv_tile,
            -left - corner, right - corner, len_kv - kv_idx,
        ),
        BLOCK_Q, BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE,
    )  # fmt: skip
    place = (batch, head, kv_idx, last_q_tile)
    return Job(place, (q_start, kv_start, len_q, len_kv), LAYOUT), walk


@gluon.jit(
    do_not_specialize=[
        "kv_slots", "q_slots", "n_heads", "heads_at_once", "Hkv", "heads_per_kv", "B", "Sq", "Skv",
        "left", "right", "kv_batch_rows", "cu_q_ptr", "cu_kv_ptr", "kv_lens_ptr",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, turn_ptr,
    ticket_ptr, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, scale, scale_log2, cap_log2, kv_slots, q_slots,
    n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left, right, kv_batch_rows,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    job, walk = assign(
        ticket_ptr, kv_slots, q_slots, n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left,
        right, kv_batch_rows, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT,
        HAS_EDGE, q_desc.block_shape[3], k_desc.block_shape[3],
    )  # fmt: skip
    tiles = Tiles.create(q_desc, dout_desc, stats_desc, k_desc, v_desc)
    turns = Turns.create(sums_desc, 2)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    gl.warp_specialize(
        [
            (consume, (0, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED)),
            (consume, (1, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED)),
            (produce, (job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc,
                       v_desc, dk_desc, dv_desc)),
            (take_turns, (turns, turn_ptr, walk)),
            (add_parts, (turns, sums_desc, turn_ptr, walk)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
