"""dQ for head dims above 128: a program owns 128 queries and loops over the key tiles they see.

    S = Q·Kᵀ    P = exp2(S·scale - lse)    dP = dO·Vᵀ    dS = P∘(dP - delta)    dQ += dS·K

Two warpgroups of 64 queries need nothing of each other: dS is already the left operand, in
registers, of the product for dQ. The exponentials of a tile run under dO·Vᵀ.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_wait

from lockstep.kernels.hopper.backward.nonfinite import largest
from lockstep.kernels.hopper.backward.scores import Scores
from lockstep.kernels.hopper.backward.sizes import Sizes
from lockstep.kernels.hopper.backward.wide.key_loop import BLOCK_Q, assign_queries
from lockstep.kernels.hopper.backward.wide.tiles import (
    PieceRing,
    add_products,
    issue_scores,
    no_sums,
    pieces_of,
    wait_all,
)
from lockstep.kernels.hopper.common.accumulator import ROWS
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
from lockstep.kernels.launch import unspecialized


@aggregate
class Program:
    """Tiles and sizes that the warps of a program share."""

    q: PieceRing  # dq in the end
    dout: PieceRing
    k: PieceRing
    v: PieceRing
    inspected_bar: gl.shared_memory_descriptor  # of tiles of k and v with hidden pairs
    dq_full_bar: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, dout, k, v, inspected_bar, dq_full_bar):
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.inspected_bar = inspected_bar
        self.dq_full_bar = dq_full_bar

    @gluon.jit
    def create(
        q_desc, dout_desc, k_desc, v_desc, ND: gl.constexpr, NDV: gl.constexpr,
        K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, MASKED: gl.constexpr,
    ):  # fmt: skip
        # The warp that inspects tiles releases them, too.
        READERS: gl.constexpr = 3 if MASKED else 2
        v = PieceRing.create(v_desc, NDV, V_STAGES, READERS)
        # Barriers that nothing waits for would share their memory with tiles: `narrow/tiles.py`.
        inspected_bar = v.ring.full_bar
        if MASKED:
            inspected_bar = barriers(V_STAGES, 1)
        return Program(
            PieceRing.create(q_desc, ND, 1, 1),
            PieceRing.create(dout_desc, NDV, 1, 1),
            PieceRing.create(k_desc, ND, K_STAGES, READERS),
            v,
            inspected_bar,
            barriers(1, 2).index(0),
        )


@gluon.jit
def consume(W: gl.constexpr, query_tile, loop, program, stats_ptr, scores):
    """Partition of four warps: the queries from W·ROWS on."""
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    dq = no_sums(program.q.N)
    program.q.wait(0)
    program.k.wait(0, pred=loop.n_steps > 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(program.q, 0, W * ROWS, program.k, 0),))
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
            inspected_bar = program.inspected_bar.index(program.v.ring.slot(n))
            mbarrier.wait(inspected_bar, program.v.ring.phase(n), pred=is_cut)
        dp = issue_scores(program.dout, 0, W * ROWS, program.v, n)
        p, slope = scores.weights(s, m, log2_l, loop, n, W * ROWS, MASKED)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        program.v.release(n)
        ds = scores.gradient(p, dp, delta, slope)
        dq = add_products(dq, ds, program.k, n)
        program.k.wait(n + 1, pred=n + 1 < loop.n_steps)
        # After the last tile this multiplies whatever is in the slot; the result is not used.
        s = issue_scores(program.q, 0, W * ROWS, program.k, n + 1)
        s, dq = wait_all(s, dq)
        program.k.release(n)
    scale = scores.scale + loop.nan_if_bad()
    for p in gl.static_range(pieces_of(program.q.N)):
        x = dq[p]
        # Whatever is not finite is NaN.
        x += x * 0.0
        own = program.q.piece(0, p).slice(W * ROWS, ROWS, dim=0)
        own.store((x * scale).to(own.dtype))
    fence_async_shared()
    mbarrier.arrive(program.dq_full_bar, count=1)


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
    mbarrier.wait(program.dq_full_bar, 0)
    program.q.store(dq_desc, query_tile.q_coordinates())
    tma_store_wait(0)


@gluon.jit
def inspect(loop, program):
    """Partition of one warp: takes what is not finite out of key tiles with hidden pairs."""
    LARGEST: gl.constexpr = largest(program.k.main_smem.dtype)
    for n in range(loop.n_steps):
        program.k.wait(n)
        program.v.wait(n)
        if loop.cuts(n):
            program.v.replace_nonfinite(n, 0, loop.CONSTANT_TIME)
            program.k.replace_nonfinite(n, LARGEST, loop.CONSTANT_TIME)
            fence_async_shared()
        mbarrier.arrive(program.inspected_bar.index(program.v.ring.slot(n)), count=1)
        program.k.release(n)
        program.v.release(n)


@unspecialized(gluon.jit, any_address=("stats_ptr", "bounds_ptr", "kv_lens_ptr"))
def queries_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, stats_ptr, bounds_ptr, kv_lens_ptr, scale,
    unit, softcap, q_slots, stats_slots, Hq, heads_per_kv, B, Sq, Skv, left, right,
    kv_batch_rows,
    ND: gl.constexpr, NDV: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr, CONSTANT_TIME: gl.constexpr,
):  # fmt: skip
    # Under a causal mask the last queries of a head see most, so they begin.
    pid = gl.program_id(0)
    sizes = Sizes(
        (stats_slots, Hq, heads_per_kv, B, Sq, Skv, left, right, kv_batch_rows),
        bounds_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT, HAS_EDGE, BLOCK_Q,
        k_desc.block_shape[3], CONSTANT_TIME,
    )  # fmt: skip
    scores = Scores(scale, unit, softcap, CAPPED, HIDES_SCORES)
    query_tile, loop = assign_queries(q_slots - 1 - pid % q_slots, pid // q_slots, sizes)
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    program = Program.create(q_desc, dout_desc, k_desc, v_desc, ND, NDV, K_STAGES, V_STAGES, MASKED)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if MASKED:
        gl.warp_specialize(
            [
                (consume, (0, query_tile, loop, program, stats_ptr, scores)),
                (consume, (1, query_tile, loop, program, stats_ptr, scores)),
                (produce, (query_tile, loop, program, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
                (inspect, (loop, program)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, query_tile, loop, program, stats_ptr, scores)),
                (consume, (1, query_tile, loop, program, stats_ptr, scores)),
                (produce, (query_tile, loop, program, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    if pid == gl.num_programs(0) - 1:
        # This kernel may have started before dk and dv were done, and must not end before.
        gdc_wait()
