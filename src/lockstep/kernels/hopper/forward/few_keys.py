"""The forward of many heads with so few keys that all of a head stay in shared memory.

A program is one warpgroup. It loads the keys and values of a head once, and then works on one tile
of 64 queries after the other. An SM has room for three such programs: while one computes
exponentials or stores its results, another has the tensor cores. Blocks of keys are a loop: written
out, they spill registers.

A row has the bits that `consumer.py` would give it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, left_operand, zeros
from lockstep.kernels.hopper.common.coordinates import coordinates
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    empty_sums,
    issue_products,
    issue_transposed,
    n_pieces,
    piece_start,
    piece_width,
    scale_all,
)
from lockstep.kernels.hopper.common.ring import Ring, TileRing
from lockstep.kernels.hopper.common.rounding import add_residue
from lockstep.kernels.hopper.common.scores import LOG2E, cap
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers
from lockstep.kernels.hopper.common.sizes import columns
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    OVERFLOW,
    add_sums,
    exp2_weights,
    exp2_weights_exact,
    hide_from,
    raise_maximum,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.forward.program import Build, Results, normalize
from lockstep.kernels.hopper.forward.schedule import Tile
from lockstep.kernels.launch import unspecialized

columns_of = gluon.constexpr_function(columns)


@gluon.jit
def _either(a, b):
    return a | b


@aggregate
class AllKeys:
    """The keys and values of a head, and what `normalize` asks of a program and of its rows."""

    k: TileRing
    v: TileRing
    build: Build
    scale: gl.tensor
    softcap: gl.tensor
    Skv: gl.tensor
    BLOCK_KV: gl.constexpr
    BLOCKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, build, scale, softcap, Skv, BLOCK_KV, BLOCKS):
        self.k = k
        self.v = v
        self.build = build
        self.scale = scale
        self.softcap = softcap
        self.Skv = Skv
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.BLOCKS = gl.constexpr(BLOCKS)

    @gluon.jit
    def score_scale(self):
        """The factor that turns what `finish_scores` returns into log2 units."""
        return self.scale if self.build.SCORES == "raw" else LOG2E

    @gluon.jit
    def nan_if_bad(self):
        return 0.0

    @gluon.jit
    def finish_scores(self, s, block):
        """Scores in their final units, -inf behind the last key."""
        if self.build.SCORES == "capped":
            s = cap(s, self.scale, self.softcap, self.k.COLUMNS)
        elif self.build.SCORES == "scaled":
            s = s * self.scale
        if (block + 1) * self.BLOCK_KV > self.Skv:
            end = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, s.type.layout))
            s = hide_from(s, end + (self.Skv - block * self.BLOCK_KV))
        return s


@gluon.jit
def load_keys(ring, desc, batch, head, Skv, BLOCK_KV: gl.constexpr, BLOCKS: gl.constexpr):
    """Send all keys of a head, or all values, on their way to shared memory."""
    for block in gl.static_range(BLOCKS):
        full = ring.ring.full(block)
        mbarrier.expect(full, desc.block_type.nbytes)
        at = coordinates(batch, 0, Skv, head, block * BLOCK_KV, 0, False)
        tma_load(desc, at, full, ring.tiles_smem.index(block))


@gluon.jit
def load_queries(q, desc, n, batch, head, q_idx, exists):
    """Send the n-th tile of queries on its way, if it exists."""
    full = q.ring.full(n)
    mbarrier.expect(full, desc.block_type.nbytes, pred=exists)
    at = coordinates(batch, 0, 0, head, q_idx, 0, False)
    tma_load(desc, at, full, q.tiles_smem.index(0), pred=exists)


@gluon.jit
def attend(keys, q_ring, q_desc, n, tile, has_next):
    """The n-th tile of queries against all keys: acc, m [ROWS], l and residue [ROWS, 4]. The next
    one is under way on return."""
    FIXED_MAX: gl.constexpr = keys.build.FIXED_MAX
    WIDTH: gl.constexpr = piece_width(keys.v.COLUMNS, 0)
    PRODUCTS: gl.constexpr = n_pieces(keys.v.COLUMNS)
    scale = keys.score_scale()
    q_ring.wait(n)
    q = q_ring.pieces(0)
    zero = zeros(keys.BLOCK_KV)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    l = thread_sums(zero)
    residue = l
    acc = empty_sums(keys.v.COLUMNS)
    for block in range(keys.BLOCKS):
        s = issue_transposed(q, keys.k, block, keys.BLOCK_KV)
        # The product of the block before is done then, too.
        done = warpgroup_mma_wait(0, deps=acc + (s,))  # noqa: RUF005, Gluon does not unpack
        acc = done[:PRODUCTS]
        if block == keys.BLOCKS - 1:
            await_warps()
            load_queries(q_ring, q_desc, n + 1, tile.batch, tile.head, tile.q_idx + ROWS, has_next)
        s = keys.finish_scores(done[PRODUCTS], block)
        if FIXED_MAX:
            if block == 0:
                m, _alpha = raise_maximum(s, m, scale, True)
            weights = exp2_weights(s, m, scale)
            part = thread_sums(weights)
            if block > 0:
                residue = add_residue(residue, weights, part, l)
            l += part
        else:
            m, alpha = raise_maximum(s, m, scale, True)
            weights = exp2_weights(s, m, scale)
            l = add_sums(l, alpha, weights)
            acc = scale_all(acc, alpha)
        p = gl.convert_layout(round_pairs(weights, q[0].dtype), left_operand(WIDTH))
        acc = issue_products(p, keys.v, block, acc, block > 0)
    return await_all(acc), m, l, residue


@gluon.jit
def attend_exactly(keys, q_ring, n):
    """`attend` of rows that fail there, with a running maximum: see `second_pass.py`."""
    q_ring.wait(n)
    q = q_ring.pieces(0)
    scale = keys.score_scale()
    zero = zeros(keys.BLOCK_KV)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    l = thread_sums(zero)
    acc = empty_sums(keys.v.COLUMNS)
    for block in range(keys.BLOCKS):
        s = issue_transposed(q, keys.k, block, keys.BLOCK_KV)
        s = keys.finish_scores(warpgroup_mma_wait(0, deps=(s,)), block)
        m, alpha = raise_maximum(s, m, scale, True)
        weights = exp2_weights_exact(s, m, scale)
        l = add_sums(l, alpha, weights)
        p = gl.convert_layout(weights.to(q[0].dtype), left_operand(piece_width(keys.v.COLUMNS, 0)))
        acc = await_all(issue_products(p, keys.v, block, scale_all(acc, alpha)))
    return acc, m, l


@gluon.jit
def store_piece(results, row, chosen, x, START: gl.constexpr, DV: gl.constexpr):
    """Write columns x [ROWS, ·] from START on of `chosen` rows; `row` [ROWS] counts rows of out."""
    WIDTH: gl.constexpr = x.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    column = START + gl.arange(0, WIDTH, gl.SliceLayout(0, x.type.layout))
    column = gl.expand_dims(column, 0)
    start = gl.multiple_of(gl.convert_layout(row, rows).to(gl.int64) * DV, [8])
    mask = gl.expand_dims(gl.convert_layout(chosen, rows), 1)
    if DV < START + WIDTH:
        mask = mask & (column < DV)
    gl.store(results.out_ptr + gl.expand_dims(start, 1) + column, x, mask=mask)


@gluon.jit
def store_rows(results, tile, out, lse, m, l, chosen, dtype: gl.constexpr, DV: gl.constexpr):
    """Write the `chosen` rows [ROWS] of a tile."""
    row = results.row(tile, tile.q_idx + gl.arange(0, ROWS, m.type.layout))
    for p in gl.static_range(len(out)):
        store_piece(results, row, chosen, out[p].to(dtype), piece_start(columns_of(DV), p), DV)
    results.store_statistics(row, lse, m, l, chosen)


@gluon.jit
def tile_of(keys, i, batch, head, Sq):
    """The i-th tile of a head."""
    return Tile(i >= 0, head, head, batch, i * ROWS, i * 0, i * 0, Sq, keys.Skv)


@gluon.jit
def first_pass(keys, results, q, q_desc, batch, head, first, last, Sq, DV: gl.constexpr):
    """Tiles `first` to `last` of a head; bit i % 32 of the result is set if rows of the i-th of
    them failed."""
    dtype: gl.constexpr = q_desc.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator(keys.BLOCK_KV))
    wrong = gl.full([ROWS], 0, gl.int32, row_layout)
    for i in range(first, last):
        tile = tile_of(keys, i, batch, head, Sq)
        acc, m, l, residue = attend(keys, q, q_desc, i - first, tile, i + 1 < last)
        is_large = (gl.abs(m) * keys.score_scale() >= LARGE_MAX) & (m > -float("inf"))
        out, lse, m, l = normalize(keys, results, tile, keys, acc, m, l, residue, None, None, dtype)
        exists = i * ROWS + gl.arange(0, ROWS, row_layout) < Sq
        fails = exists & (is_large | ((l < OVERFLOW) == 0))
        lse = gl.where(fails, float("nan"), lse)
        wrong |= gl.where(fails, 1, 0) << ((i - first) % 32)
        store_rows(results, tile, out, lse, m, l, exists, dtype, DV)
    return gl.reduce(wrong, 0, _either)


@gluon.jit
def second_pass(keys, results, q, q_desc, batch, head, first, last, Sq, wrong, DV: gl.constexpr):
    """Rows that failed in the first pass, which left NaN in their lse, once more."""
    dtype: gl.constexpr = q_desc.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator(keys.BLOCK_KV))
    n = last - first
    for i in range(first, last):
        if (wrong >> ((i - first) % 32)) & 1:
            await_warps()
            load_queries(q, q_desc, n, batch, head, i * ROWS, True)
            tile = tile_of(keys, i, batch, head, Sq)
            q_idx = i * ROWS + gl.arange(0, ROWS, row_layout)
            mark = gl.load(results.lse_ptr + results.row(tile, q_idx), mask=q_idx < Sq, other=0.0)
            fails = mark != mark
            acc, m, l = attend_exactly(keys, q, n)
            n += 1
            residue = gl.zeros_like(l)
            out, lse, m, l = normalize(
                keys, results, tile, keys, acc, m, l, residue, fails, None, dtype
            )
            store_rows(results, tile, out, lse, m, l, fails, dtype, DV)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def few_keys_kernel(
    q_desc,  # tiles [ROWS, D] of q [B, Hq, Sq, D]
    k_desc,  # tiles [BLOCK_KV, D] of k [B, Hkv, Skv, D]
    v_desc,  # tiles [BLOCK_KV, Dv] of v [B, Hkv, Skv, Dv]
    out_ptr,  # contiguous [B, Hq, Sq, Dv]
    lse_ptr,  # contiguous [B, Hq, Sq] fp32
    statistics_ptr,  # [*lse, 2]
    sinks_ptr,  # [Hq]
    scale,
    softcap,
    row_stride_b,  # of lse, and of out in rows
    row_stride_h,
    row_stride_s,
    n_q_tiles,
    tiles_per_program,
    Hq,
    heads_per_kv,
    Sq,
    Skv,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    BLOCKS: gl.constexpr,
    FIXED_MAX: gl.constexpr,
):
    D_COLUMNS: gl.constexpr = columns_of(D)
    DV_COLUMNS: gl.constexpr = columns_of(DV)
    programs_per_head = gl.cdiv(n_q_tiles, tiles_per_program)
    index = gl.program_id(0) // programs_per_head
    first = gl.program_id(0) % programs_per_head * tiles_per_program
    last = gl.minimum(first + tiles_per_program, n_q_tiles)
    batch = index // Hq
    head = index % Hq
    kv_head = head // heads_per_kv
    q_full = barriers(1, 1)
    k_full = barriers(BLOCKS, 1)
    v_full = barriers(BLOCKS, 1)
    k_smem = allocate_tiles(k_desc, BLOCKS)
    v_smem = allocate_tiles(v_desc, BLOCKS)
    q_smem = allocate_tiles(q_desc, 1)
    q = TileRing(q_smem, q_smem, Ring(q_full, q_full, 1, False), D_COLUMNS)
    k = TileRing(k_smem, k_smem, Ring(k_full, k_full, BLOCKS, False), D_COLUMNS)
    v = TileRing(v_smem, v_smem, Ring(v_full, v_full, BLOCKS, False), DV_COLUMNS)
    load_queries(q, q_desc, 0, batch, head, first * ROWS, True)
    load_keys(k, k_desc, batch, kv_head, Skv, BLOCK_KV, BLOCKS)
    load_keys(v, v_desc, batch, kv_head, Skv, BLOCK_KV, BLOCKS)
    keys = AllKeys(
        k,
        v,
        Build(1, False, FIXED_MAX, True, 1, SCORES, HAS_SINKS, 0, 0, False, False, False, False),
        scale,
        softcap,
        Skv,
        BLOCK_KV,
        BLOCKS,
    )
    results = Results(
        (out_ptr, lse_ptr, statistics_ptr, sinks_ptr),
        row_stride_b,
        row_stride_h,
        row_stride_s,
        Sq * 0 + DV,
    )
    for block in gl.static_range(BLOCKS):
        k.wait(block)
        v.wait(block)
    wrong = first_pass(keys, results, q, q_desc, batch, head, first, last, Sq, DV)
    if wrong != 0:
        second_pass(keys, results, q, q_desc, batch, head, first, last, Sq, wrong, DV)
    # Until then nothing else may have their place in shared memory.
    mbarrier.invalidate(q_full.index(0))
    for block in gl.static_range(BLOCKS):
        mbarrier.invalidate(k_full.index(block))
        mbarrier.invalidate(v_full.index(block))
