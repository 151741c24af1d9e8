"""The forward of heads with so few keys that all of them stay in shared memory.

A program is one warpgroup. It loads the keys and values of a head once, and then works on one tile
of 64 queries after the other. An SM has room for three such programs, or two: while one computes
exponentials or stores its results, another has the tensor cores. Blocks of keys are a loop: written
out, they spill registers.

A row has the bits that `consumer.py` would give it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, left_operand, zeros
from lockstep.kernels.hopper.common.exact_weights import (
    first_bar,
    first_offset,
    offset_weights,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.mailbox import Mailbox
from lockstep.kernels.hopper.common.pages import PageTable
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    empty_sums,
    issue_products,
    issue_transposed,
    n_pieces,
    piece_start,
    piece_width,
    row_sums,
    scale_all,
)
from lockstep.kernels.hopper.common.ring import Ring, TileRing
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers
from lockstep.kernels.hopper.common.sizes import columns
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    OVERFLOW,
    add_sums,
    exp2_weights,
    raise_maximum,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward.cleaning import Cleaned
from lockstep.kernels.hopper.forward.program import Build, Program, Results, Rows, normalize
from lockstep.kernels.hopper.forward.scheduling.failed_tiles import FailedTiles
from lockstep.kernels.hopper.forward.scheduling.schedule import Schedule
from lockstep.kernels.hopper.forward.scheduling.tile import Keys, Tile
from lockstep.kernels.hopper.forward.scheduling.tile_queue import TileQueue
from lockstep.kernels.hopper.forward.second_pass import attend_second_pass, replace_rows
from lockstep.kernels.launch import unspecialized

columns_of = gluon.constexpr_function(columns)


@gluon.jit
def _either(a, b):
    return a | b


@aggregate
class Work:
    """The tiles of a program, `count` of one head."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    q_idx: gl.tensor  # the first row
    count: gl.tensor
    q_start: gl.tensor  # the sequence's first query in the tensor
    kv_start: gl.tensor  # and its first key
    Sq: gl.tensor
    Skv: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, kv_head, q_idx, count, q_start, kv_start, Sq, Skv):
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.q_idx = q_idx
        self.count = count
        self.q_start = q_start
        self.kv_start = kv_start
        self.Sq = Sq
        self.Skv = Skv

    @gluon.jit
    def of_program(n_q_tiles, tiles_per_program, Hq, heads_per_kv, Sq, Skv):
        """Programs in a row share keys."""
        programs = gl.cdiv(n_q_tiles, tiles_per_program)
        index = gl.program_id(0) // programs
        first = gl.program_id(0) % programs * tiles_per_program
        count = gl.minimum(tiles_per_program, n_q_tiles - first)
        batch = index // Hq
        head = index % Hq
        none = Sq * 0
        return Work(batch, head, head // heads_per_kv, first * ROWS, count, none, none, Sq, Skv)

    @gluon.jit
    def tile(self, i):
        return Tile(
            self.Sq > 0,
            self.head,
            self.kv_head,
            self.batch,
            self.q_idx + i * ROWS,
            self.q_start,
            self.kv_start,
            self.Sq,
            self.Skv,
            Keys.every(self.Sq),
        )


@gluon.jit
def load_keys(ring, desc, work, n, BLOCK_KV: gl.constexpr):
    """Send all blocks of keys, or of values, on their way to shared memory, for the n-th time."""
    BLOCKS: gl.constexpr = ring.ring.STAGES
    for i in gl.static_range(BLOCKS):
        full = ring.ring.full(n * BLOCKS + i)
        mbarrier.expect(full, desc.block_type.nbytes)
        at = coordinates(work.batch, 0, work.Skv, work.kv_head, i * BLOCK_KV, 0, False)
        tma_load(desc, at, full, ring.tiles_smem.index(i))


@gluon.jit
def load_queries(q, desc, n, tile, exists):
    """Send a tile of queries, the n-th in all, on its way, if it exists."""
    full = q.ring.full(n)
    mbarrier.expect(full, desc.block_type.nbytes, pred=exists)
    at = coordinates(tile.batch, 0, 0, tile.head, tile.q_idx, 0, False)
    tma_load(desc, at, full, q.tiles_smem.index(0), pred=exists)


@gluon.jit
def attend(program, rows, q_ring, q_desc, n, next_tile, has_next, BLOCKS: gl.constexpr):
    """The n-th tile of queries against all keys: acc, m [ROWS], l [ROWS, 4] and what is beside
    it. The next one is under way on return."""
    BLOCK_KV: gl.constexpr = program.schedule.BLOCK_KV
    WIDTH: gl.constexpr = piece_width(program.v.COLUMNS, 0)
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
    scale = program.score_scale()
    q_ring.wait(n)
    q = q_ring.pieces(0)
    zero = zeros(BLOCK_KV)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    l = thread_sums(zero)
    offset = l
    bar = l
    residue = l
    acc = empty_sums(program.v.COLUMNS)
    end = BLOCKS
    if program.schedule.HAS_RIGHT:
        end = rows.end
    for block in range(end):
        s = issue_transposed(q, program.k, block, BLOCK_KV)
        # The product of the block before is done then, too.
        done = warpgroup_mma_wait(0, deps=acc + (s,))  # noqa: RUF005, Gluon does not unpack
        acc = done[:PRODUCTS]
        if block == end - 1:
            await_warps()
            load_queries(q_ring, q_desc, n + 1, next_tile, has_next)
        s = program.mask_scores(rows, done[PRODUCTS], block)
        if program.build.FIXED_MAX:
            if block == 0:
                m, _alpha = raise_maximum(s, m, scale, True)
                offset = first_offset(m, l, scale)
            weights = offset_weights(s, offset, scale)
            part = thread_sums(weights)
            p = round_pairs(weights, q[0].dtype)
            if block == 0:
                l = part
                bar = first_bar(l, rows.row_end, BLOCK_KV)
            else:
                acc, l, beside = settle(weights, acc, part, l, (bar, offset, residue), None, False)
                bar, offset, residue = beside
        else:
            m, alpha = raise_maximum(s, m, scale, True)
            weights = exp2_weights(s, m, scale)
            l = add_sums(l, alpha, weights)
            acc = scale_all(acc, alpha)
            p = round_pairs(weights, q[0].dtype)
        p = gl.convert_layout(p, left_operand(WIDTH))
        acc = issue_products(p, program.v, block, acc, block > 0)
    return await_all(acc), m, l, (bar, offset, residue)


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
def store_rows(
    program, results, tile, out, lse, m, l, chosen, dtype: gl.constexpr, DV: gl.constexpr
):
    """Write the `chosen` rows [ROWS] of a tile."""
    q_idx = tile.q_idx + gl.arange(0, ROWS, m.type.layout)
    row = results.place(program.schedule, tile, q_idx)
    for p in gl.static_range(len(out)):
        store_piece(results, row, chosen, out[p].to(dtype), piece_start(columns_of(DV), p), DV)
    results.store_statistics(row, lse, m, l, chosen)


@gluon.jit
def first_pass(program, results, work, rows, q, q_desc, BLOCKS: gl.constexpr, DV: gl.constexpr):
    """Compute all tiles; bit i % 32 of the result is set if rows of the i-th of them failed."""
    dtype: gl.constexpr = q_desc.dtype
    row_layout: gl.constexpr = rows.row_end.type.layout
    wrong = gl.full([ROWS], 0, gl.int32, row_layout)
    for i in range(work.count):
        tile = work.tile(i)
        if program.schedule.HAS_RIGHT:
            rows = Rows.of_consumer(0, program.schedule, tile)
        acc, m, l, beside = attend(
            program, rows, q, q_desc, i, work.tile(i + 1), i + 1 < work.count, BLOCKS
        )
        is_large = (gl.abs(m) * program.score_scale() >= LARGE_MAX) & (m > -float("inf"))
        out, lse, m, l = normalize(
            program, results, tile, 0, rows, acc, m, l, beside, None, None, dtype
        )
        exists = tile.q_idx + gl.arange(0, ROWS, row_layout) < work.Sq
        fails = is_large | ((l < OVERFLOW) == 0)
        if program.schedule.HAS_RIGHT:
            is_nonfinite = (gl.abs(row_sums(out, row_layout)) < float("inf")) == 0
            lse = gl.where(is_nonfinite, float("inf"), lse)
            lse = gl.where(fails, float("nan"), lse)
            fails = fails | is_nonfinite
        else:
            lse = gl.where(fails, float("nan"), lse)
        wrong |= gl.where(fails & exists, 1, 0) << (i % 32)
        store_rows(program, results, tile, out, lse, m, l, exists, dtype, DV)
    return gl.reduce(wrong, 0, _either)


@gluon.jit
def second_pass(program, results, work, rows, q, q_desc, k_desc, v_desc, wrong):
    """Rows that failed in the first pass, which left a mark in their lse, once more: see
    `second_pass.py`. Keys and values are loaded again for each tile, which may write to them."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_KV: gl.constexpr = program.schedule.BLOCK_KV
    BLOCKS: gl.constexpr = program.k.ring.STAGES
    sent_q = work.count
    sent = 1
    for i in range(work.count):
        if (wrong >> (i % 32)) & 1:
            tile = work.tile(i)
            if program.schedule.HAS_RIGHT:
                rows = Rows.of_consumer(0, program.schedule, tile)
            await_warps()
            load_queries(q, q_desc, sent_q, tile, True)
            load_keys(program.k, k_desc, work, sent, BLOCK_KV)
            load_keys(program.v, v_desc, work, sent, BLOCK_KV)
            q_idx = tile.q_idx + gl.arange(0, ROWS, rows.row_end.type.layout)
            row = results.place(program.schedule, tile, q_idx)
            mark = gl.load(results.lse_ptr + row, mask=q_idx < work.Sq, other=0.0)
            is_exact = mark != mark
            chosen = is_exact | (mark == float("inf"))
            runs = is_exact
            if not program.build.FIXED_MAX:
                runs = runs | True
            q.wait(sent_q)
            acc, m, l, beside, _seen = attend_second_pass(
                program, rows, q.pieces(0), runs, is_exact, sent * BLOCKS
            )
            sent_q += 1
            sent += 1
            out, lse, m, l = normalize(
                program, results, tile, 0, rows, (acc,), m, l, beside, is_exact, None, dtype
            )
            replace_rows(results, out[0].to(dtype), row, chosen, 0)
            results.store_statistics(row, lse, m, l, chosen)


@gluon.jit
def allocate(
    q_desc, k_desc, v_desc, BLOCKS: gl.constexpr, D_COLUMNS: gl.constexpr, DV_COLUMNS: gl.constexpr
):  # fmt: skip
    """Shared memory for a tile of queries and for all keys and values."""
    q_full = barriers(1, 1)
    k_full = barriers(BLOCKS, 1)
    v_full = barriers(BLOCKS, 1)
    # Arrived at, and never waited for.
    empty = barriers(BLOCKS, 1)
    k_smem = allocate_tiles(k_desc, BLOCKS)
    v_smem = allocate_tiles(v_desc, BLOCKS)
    q_smem = allocate_tiles(q_desc, 1)
    q = TileRing(q_smem, q_smem, Ring(q_full, q_full, 1, False), D_COLUMNS)
    k = TileRing(k_smem, k_smem, Ring(k_full, empty, BLOCKS, False), D_COLUMNS)
    v = TileRing(v_smem, v_smem, Ring(v_full, empty, BLOCKS, False), DV_COLUMNS)
    return q, k, v


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
    right,
    HAS_RIGHT: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    BLOCKS: gl.constexpr,
    FIXED_MAX: gl.constexpr,
):
    work = Work.of_program(n_q_tiles, tiles_per_program, Hq, heads_per_kv, Sq, Skv)
    none = Sq * 0
    schedule = Schedule(
        (none, n_q_tiles, none, Hq, heads_per_kv, none, Sq, Skv, none, right, none, none),
        (lse_ptr, lse_ptr, lse_ptr, lse_ptr), "dense", False, HAS_RIGHT, ROWS, BLOCK_KV,
    )  # fmt: skip
    q, k, v = allocate(q_desc, k_desc, v_desc, BLOCKS, columns_of(D), columns_of(DV))
    rows = Rows.of_consumer(0, schedule, work.tile(0))
    load_queries(q, q_desc, 0, work.tile(0), True)
    load_keys(k, k_desc, work, 0, BLOCK_KV)
    load_keys(v, v_desc, work, 0, BLOCK_KV)
    build = Build(
        1, False, FIXED_MAX, FIXED_MAX, True, 1, SCORES, HAS_SINKS, 0, 0, False, False, False
    )  # fmt: skip
    # What other builds of a program have, and this one does not.
    unused = k.ring.empty_bar
    program = Program(
        schedule, k, v, PageTable(lse_ptr, none, none, none, 0),
        TileQueue(Mailbox(unused, q.ring, 0), unused), FailedTiles(unused, unused, 1),
        Cleaned(unused, unused), build, scale, softcap,
    )  # fmt: skip
    pointers = (out_ptr, lse_ptr, statistics_ptr, sinks_ptr)
    results = Results(pointers, row_stride_b, row_stride_h, row_stride_s, none + DV)
    for i in gl.static_range(BLOCKS):
        k.wait(i)
        v.wait(i)
    wrong = first_pass(program, results, work, rows, q, q_desc, BLOCKS, DV)
    if wrong != 0:
        second_pass(program, results, work, rows, q, q_desc, k_desc, v_desc, wrong)
    # Until then nothing else may have their place in shared memory.
    mbarrier.invalidate(q.ring.full_bar.index(0))
    for i in gl.static_range(BLOCKS):
        mbarrier.invalidate(k.ring.full_bar.index(i))
        mbarrier.invalidate(v.ring.full_bar.index(i))
        mbarrier.invalidate(unused.index(i))
