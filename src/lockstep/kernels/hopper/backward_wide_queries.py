"""dQ for head dims above 128: a program owns 128 queries and walks over the keys they see.

    S = Q·Kᵀ    P = exp2(S·scale - lse)    dP = dO·Vᵀ    dS = P∘(dP - delta)    dQ += dS·K

Two warpgroups of 64 queries need nothing of each other: dS is already the left operand, in
registers, of the product for dQ. The exponentials of a tile run under dO·Vᵀ.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_products import ROWS, derive_scores, weigh_seen
from lockstep.kernels.hopper.backward_strays import largest
from lockstep.kernels.hopper.backward_wide_sight import assign
from lockstep.kernels.hopper.backward_wide_tiles import (
    Ring,
    add_products,
    multiply_rows,
    no_sums,
    pieces_of,
    settle,
)
from lockstep.kernels.hopper.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.shared_memory import barriers


@aggregate
class Team:
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
        return Team(
            Ring.create(q_desc, ND, 1, 1),
            Ring.create(dout_desc, NDV, 1, 1),
            Ring.create(k_desc, ND, K_STAGES, READERS),
            Ring.create(v_desc, NDV, V_STAGES, READERS),
            barriers(V_STAGES, 1),
            barriers(1, 2).index(0),
        )


@gluon.jit
def consume(
    W: gl.constexpr, place, sight, team, stats_ptr, scale, unit, softcap,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """Partition of four warps: the queries from W·ROWS on."""
    MASKED: gl.constexpr = sight.HAS_LEFT or sight.HAS_RIGHT
    dq = no_sums(team.q.N)
    team.q.wait(0)
    team.k.wait(0, pred=sight.n_steps > 0)
    s = warpgroup_mma_wait(0, deps=(multiply_rows(team.q, 0, W * ROWS, team.k, 0),))
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    r = gl.arange(0, ROWS, rows)
    is_row = place.q_idx + W * ROWS + r < place.len_q
    # `backward_rows`: m of a tile, then its delta and log2 l.
    stats_ptr += (place.stats_tile + place.q_idx // ROWS + W).to(gl.int64) * (4 * ROWS)
    m = gl.expand_dims(gl.load(stats_ptr + r, mask=is_row, other=float("inf")), 1)
    log2_l = gl.expand_dims(gl.load(stats_ptr + 2 * ROWS + r, mask=is_row, other=0.0), 1)
    delta = gl.expand_dims(gl.load(stats_ptr + ROWS + r, mask=is_row, other=0.0), 1)
    team.dout.wait(0)
    for n in range(sight.n_steps):
        is_cut = sight.cuts(n)
        team.v.wait(n)
        if MASKED:
            slot = n % team.v.STAGES
            phase = (n // team.v.STAGES) & 1
            mbarrier.wait(team.inspected.index(slot), phase, pred=is_cut)
        dp = multiply_rows(team.dout, 0, W * ROWS, team.v, n)
        p, slope = weigh_seen(
            s, m, log2_l, sight, n, W * ROWS, (scale, unit, softcap), CAPPED, HIDES_SCORES, MASKED
        )
        dp = warpgroup_mma_wait(0, deps=(dp,))
        team.v.release(n)
        ds = derive_scores(p, dp, delta, slope, CAPPED)
        dq = add_products(dq, ds, team.k, n)
        team.k.wait(n + 1, pred=n + 1 < sight.n_steps)
        # After the last tile this multiplies what lies there, and nobody looks at it.
        s = multiply_rows(team.q, 0, W * ROWS, team.k, n + 1)
        s, dq = settle(s, dq)
        team.k.release(n)
    for p in gl.static_range(pieces_of(team.q.N)):
        x = dq[p]
        # Whatever is not finite is NaN.
        x += x * 0.0
        own = team.q.piece(0, p).slice(W * ROWS, ROWS, dim=0)
        own.store((x * scale).to(own.dtype))
    fence_async_shared()
    mbarrier.arrive(team.dq_full, count=1)


@gluon.jit
def produce(place, sight, team, q_desc, dout_desc, k_desc, v_desc, dq_desc):
    """Partition of one warp: loads all tiles and stores dq."""
    team.q.send(0, q_desc, place.q_coordinates())
    if sight.n_steps > 0:
        team.k.send(0, k_desc, place.kv_coordinates(sight.first_tile * sight.BLOCK_KV))
    team.dout.send(0, dout_desc, place.q_coordinates())
    for n in range(sight.n_steps):
        kv_idx = (sight.first_tile + n) * sight.BLOCK_KV
        team.v.send(n, v_desc, place.kv_coordinates(kv_idx))
        if n + 1 < sight.n_steps:
            team.k.send(n + 1, k_desc, place.kv_coordinates(kv_idx + sight.BLOCK_KV))
    mbarrier.wait(team.dq_full, 0)
    team.q.store(dq_desc, place.q_coordinates())
    tma_store_wait(0)


@gluon.jit
def inspect(sight, team):
    """Partition of one warp: takes what is not finite out of key tiles with hidden pairs."""
    LARGEST: gl.constexpr = largest(team.k.main.dtype)
    for n in range(sight.n_steps):
        team.k.wait(n)
        team.v.wait(n)
        if sight.cuts(n):
            team.v.replace_strays(n, 0)
            team.k.replace_strays(n, LARGEST)
            fence_async_shared()
        mbarrier.arrive(team.inspected.index(n % team.v.STAGES), count=1)
        team.k.release(n)
        team.v.release(n)


@gluon.jit(
    do_not_specialize=[
        "stats_ptr", "cu_q_ptr", "cu_kv_ptr", "kv_lens_ptr", "q_slots", "stats_slots", "Hq",
        "heads_per_kv", "B", "Sq", "Skv", "left", "right", "kv_batch_rows",
    ]
)  # fmt: skip
def queries_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, stats_ptr, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, scale,
    unit, softcap, q_slots, stats_slots, Hq, heads_per_kv, B, Sq, Skv, left, right,
    kv_batch_rows,
    ND: gl.constexpr, NDV: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    # Under a causal mask the last queries of a head see most, so they begin.
    program = gl.program_id(0)
    place, sight = assign(
        q_slots - 1 - program % q_slots, program // q_slots, stats_slots, Hq, heads_per_kv, B, Sq,
        Skv, left, right, kv_batch_rows, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT,
        HAS_RIGHT, HAS_EDGE, k_desc.block_shape[3],
    )  # fmt: skip
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    team = Team.create(q_desc, dout_desc, k_desc, v_desc, ND, NDV, K_STAGES, V_STAGES, MASKED)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if MASKED:
        gl.warp_specialize(
            [
                (consume, (0, place, sight, team, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, place, sight, team, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (produce, (place, sight, team, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
                (inspect, (sight, team)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, place, sight, team, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, place, sight, team, stats_ptr, scale, unit, softcap, CAPPED,
                           HIDES_SCORES)),
                (produce, (place, sight, team, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
