"""dQ for head dims above 128: a program owns 128 queries and walks over the keys they see.

    S = Q·Kᵀ    P = exp2(S·scale - lse)    dP = dO·Vᵀ    dS = P∘(dP - delta)    dQ += dS·K

Two warpgroups of 64 queries need nothing of each other: dS is already the left operand, in
registers, of the product for dQ. The exponentials of a tile run under dO·Vᵀ.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_strays import largest
from lockstep.kernels.hopper.backward_tiles import barriers
from lockstep.kernels.hopper.backward_walk import find_sequence
from lockstep.kernels.hopper.backward_wide_tiles import (
    ROWS,
    Ring,
    add_products,
    multiply_rows,
    no_sums,
    pieces_of,
    settle,
    weigh,
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
from lockstep.kernels.hopper.schedule import RAGGED

BLOCK_Q = gl.constexpr(2 * ROWS.value)


@aggregate
class Sight:
    """The key tiles that a program's queries see, from the first to the last."""

    first_tile: gl.tensor
    n_steps: gl.tensor
    # Query r of the program sees key c of its t-th tile if c < room - t·BLOCK_KV and
    #   low - t·BLOCK_KV <= c - r <= high - t·BLOCK_KV
    low: gl.tensor
    high: gl.tensor
    room: gl.tensor
    BLOCK_KV: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_EDGE: gl.constexpr  # the last key tile may be cut short

    @gluon.constexpr_function
    def __init__(self, tiles, bounds, BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE):
        self.first_tile = tiles[0]
        self.n_steps = tiles[1]
        self.low = bounds[0]
        self.high = bounds[1]
        self.room = bounds[2]
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_EDGE = gl.constexpr(HAS_EDGE)

    @gluon.jit
    def cuts(self, t):
        """Whether some key of the t-th tile is hidden from some query of the program."""
        at = t * self.BLOCK_KV
        cut = self.room < 0
        if self.HAS_EDGE:
            cut = self.room - at < self.BLOCK_KV
        if self.HAS_LEFT:
            cut = cut | (self.low - at > 1 - BLOCK_Q)
        if self.HAS_RIGHT:
            cut = cut | (self.high - at < self.BLOCK_KV - 1)
        return cut

    @gluon.jit
    def hide(self, x, t, first_row: gl.constexpr, value: gl.constexpr):
        """x [ROWS, BLOCK_KV] of the t-th tile, `value` where key and query are hidden from each
        other; `first_row` is the program's query in row 0."""
        rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        columns: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        query = gl.expand_dims(first_row + gl.arange(0, x.shape[0], rows), 1)
        key = gl.expand_dims(gl.arange(0, x.shape[1], columns) + t * self.BLOCK_KV, 0)
        if self.HAS_EDGE:
            x = gl.where(key < self.room, x, value)
        if self.HAS_LEFT:
            x = gl.where(query + self.low <= key, x, value)
        if self.HAS_RIGHT:
            x = gl.where(query + self.high >= key, x, value)
        return x


@aggregate
class Place:
    """The queries of a program, and where their sequence lies in the tensors."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    q_idx: gl.tensor  # first query, counted in its sequence
    stats_tile: gl.tensor  # of the sequence's first query
    q_start: gl.tensor  # the sequence's first query row in the tensor
    kv_start: gl.tensor  # and its first key
    len_q: gl.tensor
    len_kv: gl.tensor
    LAYOUT: gl.constexpr  # "dense", "kv_lens" or "varlen"

    @gluon.constexpr_function
    def __init__(self, place, lengths, LAYOUT):
        self.batch = place[0]
        self.head = place[1]
        self.kv_head = place[2]
        self.q_idx = place[3]
        self.stats_tile = place[4]
        self.q_start = lengths[0]
        self.kv_start = lengths[1]
        self.len_q = lengths[2]
        self.len_kv = lengths[3]
        self.LAYOUT = gl.constexpr(LAYOUT)

    @gluon.jit
    def q_coordinates(self):
        """Where the queries lie in the tensor maps of q, dout and dq."""
        if self.LAYOUT == "varlen":
            end = self.q_start + self.len_q
            return RAGGED, end, self.head, RAGGED - self.len_q + self.q_idx, 0
        return 0, self.batch, self.head, self.q_idx, 0

    @gluon.jit
    def kv_coordinates(self, kv_idx):
        """Where a key lies in those of k and v."""
        if self.LAYOUT == "dense":
            return 0, self.batch, self.kv_head, kv_idx, 0
        end = self.kv_start + self.len_kv
        return RAGGED, end, self.kv_head, RAGGED - self.len_kv + kv_idx, 0


@gluon.jit
def assign(
    slot, head, stats_slots, Hq, heads_per_kv, B, Sq, Skv, left, right, kv_batch_rows, cu_q_ptr,
    cu_kv_ptr, kv_lens_ptr, LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_EDGE: gl.constexpr, BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """The queries of a slot, and what they see. A head has `stats_slots` tiles of statistics."""
    if LAYOUT == "varlen":
        batch = find_sequence(slot, cu_q_ptr, B, BLOCK_Q)
        q_start = gl.load(cu_q_ptr + batch).to(gl.int32)
        kv_start = gl.load(cu_kv_ptr + batch).to(gl.int32)
        len_q = gl.load(cu_q_ptr + batch + 1).to(gl.int32) - q_start
        len_kv = gl.load(cu_kv_ptr + batch + 1).to(gl.int32) - kv_start
        q_idx = (slot - q_start // BLOCK_Q - batch) * BLOCK_Q
        stats_tile = head * stats_slots + q_start // ROWS + batch
    else:
        stats_tile = head * stats_slots
        batch = head // Hq
        head = head % Hq
        q_start = batch * 0
        kv_start = batch * 0
        len_q = Sq
        len_kv = Skv
        if LAYOUT == "kv_lens":
            kv_start = batch * kv_batch_rows
            len_kv = gl.load(kv_lens_ptr + batch).to(gl.int32)
        q_idx = slot * BLOCK_Q

    diagonal = len_kv - len_q
    begin = q_idx * 0
    end = len_kv
    if HAS_LEFT:
        begin = gl.maximum(q_idx + diagonal - left, 0)
    if HAS_RIGHT:
        last_query = gl.minimum(q_idx + BLOCK_Q, len_q) - 1
        end = gl.minimum(end, last_query + diagonal + right + 1)
    end = gl.where(q_idx < len_q, gl.maximum(end, 0), 0)
    first_tile = begin // BLOCK_KV
    n_tiles = gl.maximum(gl.cdiv(end, BLOCK_KV) - first_tile, 0)
    corner = q_idx + diagonal - first_tile * BLOCK_KV  # first query - first key of the first tile
    sight = Sight(
        (first_tile, n_tiles), (corner - left, corner + right, len_kv - first_tile * BLOCK_KV),
        BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE,
    )  # fmt: skip
    place = (batch, head, head // heads_per_kv, q_idx, stats_tile)
    return Place(place, (q_start, kv_start, len_q, len_kv), LAYOUT), sight


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
    W: gl.constexpr, place, sight, team, stats_ptr, scale, scale_log2, cap_log2,
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
    # `backward_rows`: a tile's lse2, then its delta.
    stats_ptr += (place.stats_tile + place.q_idx // ROWS + W).to(gl.int64) * (2 * ROWS)
    lse2 = gl.expand_dims(gl.load(stats_ptr + r, mask=is_row, other=float("inf")), 1)
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
        if HIDES_SCORES:
            if is_cut:
                s = sight.hide(s, n, W * ROWS, -float("inf"))
            p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
        else:
            p, slope = weigh(s, lse2, scale_log2, cap_log2, CAPPED)
            if is_cut:
                p = sight.hide(p, n, W * ROWS, 0.0)
                slope = sight.hide(slope, n, W * ROWS, 0.0)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        team.v.release(n)
        ds = p * (dp - delta)
        if CAPPED:
            ds = ds * slope
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
    LARGEST: gl.constexpr = largest(team.k.chunks.dtype)
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
    scale_log2, cap_log2, q_slots, stats_slots, Hq, heads_per_kv, B, Sq, Skv, left, right,
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
                (consume, (0, place, sight, team, stats_ptr, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, place, sight, team, stats_ptr, scale, scale_log2, cap_log2, CAPPED,
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
                (consume, (0, place, sight, team, stats_ptr, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, place, sight, team, stats_ptr, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (produce, (place, sight, team, q_desc, dout_desc, k_desc, v_desc, dq_desc)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
