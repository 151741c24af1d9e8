"""dQ for head dims above 128: a program owns 128 queries and loops over the keys they see.

    S = Q·Kᵀ    P = exp2(S·scale - lse)    dP = dO·Vᵀ    dS = P∘(dP - delta)    dQ += dS·K

Two warpgroups of 64 queries need nothing of each other: dS is already the left operand, in
registers, of the product for dQ. The exponentials of a tile run under dO·Vᵀ.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.nonfinite import largest
from lockstep.kernels.hopper.backward.products import ROWS, derive_scores, weigh_seen
from lockstep.kernels.hopper.backward.wide.key_loop import assign
from lockstep.kernels.hopper.backward.wide.tiles import (
    Ring,
    add_products,
    multiply_rows,
    no_sums,
    pieces_of,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.shared_memory import barriers


@aggregate
class Program:
    """What the warps of a program share."""

    q: Ring  # dq in the end
    dout: Ring
    k: Ring
    v: Ring
    inspected: gl.shared_memory_descriptor  # of tiles of k and v with hidden pairs
    dq_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, dout, k, v, inspected, dq_full):
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.inspected = inspected
        self.dq_full = dq_full

    @gluon.jit
    def create(
        q_desc, dout_desc, k_desc, v_desc, ND: gl.constexpr, NDV: gl.constexpr,
        K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, MASKED: gl.constexpr,
    ):  # fmt: skip
        # Whoever inspects tiles has to be done with them, too.
        READERS: gl.constexpr = 3 if MASKED else 2
        return Program(
            Ring.create(q_desc, ND, 1, 1),
            Ring.create(dout_desc, NDV, 1, 1),
            Ring.create(k_desc, ND, K_STAGES, READERS),
            Ring.create(v_desc, NDV, V_STAGES, READERS),
            barriers(V_STAGES, 1),
            barriers(1, 2).index(0),
        )


@gluon.jit
def consume(
    W: gl.constexpr, query_tile, loop, program, stats_ptr, scale, unit, softcap,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """Partition of four warps: the queries from W·ROWS on."""
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    dq = no_sums(program.q.N)
    program.q.wait(0)
    program.k.wait(0, pred=loop.n_steps > 0)
    s = warpgroup_mma_wait(0, deps=(multiply_rows(program.q, 0, W * ROWS, program.k, 0),))
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    r = gl.arange(0, ROWS, rows)
    is_row = query_tile.q_idx + W * ROWS + r < query_tile.len_q
    # `rows`: m of a tile, then its delta and log2 l.
    stats_ptr += (query_tile.stats_tile + query_tile.q_idx // ROWS + W).to(gl.int64) * (4 * ROWS)
    m = gl.expand_dims(gl.load(stats_ptr + r, mask=is_row, other=float("inf")), 1)
    log2_l = gl.expand_dims(gl.load(stats_ptr + 2 * ROWS + r, mask=is_row, other=0.0), 1)
    delta = gl.expand_dims(gl.load(stats_ptr + ROWS + r, mask=is_row, other=0.0), 1)
    program.dout.wait(0)
    for n in range(loop.n_steps):
        is_cut = loop.cuts(n)
        program.v.wait(n)
        if MASKED:
            slot = n % program.v.STAGES
            phase = (n // program.v.STAGES) & 1
            mbarrier.wait(program.inspected.index(slot), phase, pred=is_cut)
        dp = multiply_rows(program.dout, 0, W * ROWS, program.v, n)
        p, slope = weigh_seen(
            s, m, log2_l, loop, n, W * ROWS, (scale, unit, softcap), CAPPED, HIDES_SCORES, MASKED
        )
        dp = warpgroup_mma_wait(0, deps=(dp,))
        program.v.release(n)
        ds = derive_scores(p, dp, delta, slope, CAPPED)
        dq = add_products(dq, ds, program.k, n)
        program.k.wait(n + 1, pred=n + 1 < loop.n_steps)
        # After the last tile this multiplies what lies there, and nobody looks at it.
        s = multiply_rows(program.q, 0, W * ROWS, program.k, n + 1)
        s, dq = settle(s, dq)
        program.k.release(n)
    scale += loop.nan_if_bad()
    for p in gl.static_range(pieces_of(program.q.N)):
        x = dq[p]
        # Whatever is not finite is NaN.
        x += x * 0.0
        own = program.q.piece(0, p).slice(W * ROWS, ROWS, dim=0)
        own.store((x * scale).to(own.dtype))
    fence_async_shared()
    mbarrier.arrive(program.dq_full, count=1)


@gluon.jit
def produce(query_tile, loop, program, q_desc, dout_desc, k_desc, v_desc, dq_desc):
    """Partition of one warp: loads all tiles and stores dq."""
    program.q.send(0, q_desc, query_tile.q_coordinates())
    if loop.n_steps > 0:
        program.k.send(0, k_desc, query_tile.kv_coordinates(loop.first_tile * loop.BLOCK_KV))
    program.dout.send(0, dout_desc, query_tile.q_coordinates())
    for n in range(loop.n_steps):
        kv_idx = (loop.first_tile + n) * loop.BLOCK_KV
        program.v.send(n, v_desc, query_tile.kv_coordinates(kv_idx))
        if n + 1 < loop.n_steps:
            program.k.send(n + 1, k_desc, query_tile.kv_coordinates(kv_idx + loop.BLOCK_KV))
    mbarrier.wait(program.dq_full, 0)
    program.q.store(dq_desc, query_tile.q_coordinates())
    tma_store_wait(0)


@gluon.jit
def inspect(loop, program):
    """Partition of one warp: takes what is not finite out of key tiles with hidden pairs."""
    LARGEST: gl.constexpr = largest(program.k.main.dtype)
    for n in range(loop.n_steps):
        program.k.wait(n)
        program.v.wait(n)
        if loop.cuts(n):
            program.v.replace_nonfinite(n, 0)
            program.k.replace_nonfinite(n, LARGEST)
            fence_async_shared()
        mbarrier.arrive(program.inspected.index(n % program.v.STAGES), count=1)
        program.k.release(n)
        program.v.release(n)


@gluon.jit(
    do_not_specialize=[
        "stats_ptr", "bounds_ptr", "kv_lens_ptr", "q_slots", "stats_slots", "Hq",
        "heads_per_kv", "B", "Sq", "Skv", "left", "right", "kv_batch_rows",
    ]
)  # fmt: skip
def queries_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, stats_ptr, bounds_ptr, kv_lens_ptr, scale,
    unit, softcap, q_slots, stats_slots, Hq, heads_per_kv, B, Sq, Skv, left, right,
    kv_batch_rows,
    ND: gl.constexpr, NDV: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    # Under a causal mask the last queries of a head see most, so they begin.
    pid = gl.program_id(0)
    query_tile, loop = assign(
        q_slots - 1 - pid % q_slots, pid // q_slots, stats_slots, Hq, heads_per_kv, B, Sq,
        Skv, left, right, kv_batch_rows, bounds_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT,
        HAS_RIGHT, HAS_EDGE, k_desc.block_shape[3],
    )  # fmt: skip
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    program = Program.create(q_desc, dout_desc, k_desc, v_desc, ND, NDV, K_STAGES, V_STAGES, MASKED)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if MASKED:
        gl.warp_specialize(
            [
                (consume, (0, query_tile, loop, program, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, query_tile, loop, program, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (produce, (query_tile, loop, program, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
                (inspect, (loop, program)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, query_tile, loop, program, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, query_tile, loop, program, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (produce, (query_tile, loop, program, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
