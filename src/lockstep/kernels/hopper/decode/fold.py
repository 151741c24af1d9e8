"""Parts that the decode kernel handed out, folded into results.

    out = Σ acc_i · exp(m_i) / Σ l_i · exp(m_i)        lse = log Σ l_i · exp(m_i)

One program folds some columns of a few rows of one slot, part after part, as the decode kernel does
with the parts that it keeps, and to the same bits. Parts come to shared memory many at a time: left
to itself, the compiler loads one, folds it and loads the next. What each part weighs follows from
the maxima before it, and is worked out for many parts at once: only products and sums are left in
the chain from part to part.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import (
    async_copy,
    await_warps,
    gl,
    gluon,
    reinterpret,
)
from lockstep.kernels.hopper.decode import plan, tiles
from lockstep.kernels.hopper.decode.groups import FoldPointers, FoldSizes, RowStrides
from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import add_part, close, fold_sink, fold_weights, store_statistics

# Parts whose way from shared memory is under way at one time.
UNROLLED = gl.constexpr(8)
FIELDS, N_Q = gl.constexpr(tiles.FIELDS), gl.constexpr(tiles.N_Q)
Q_TILE, Q_START = gl.constexpr(tiles.Q_TILE), gl.constexpr(tiles.Q_START)
SEQUENCE = gl.constexpr(tiles.SEQUENCE)
NUMBERS = gl.constexpr(plan.PART_NUMBERS)


@gluon.jit
def find_rows(work, row, tiles_ptr, heads, group, q_tiles, Sq, n_rows, PACKED: gl.constexpr):
    """Whether each row of a slot exists, and the sequence, query head and query of each."""
    b = divide(work, heads)
    head = work - b * heads
    if PACKED:
        tile_ptr = tiles_ptr + b * FIELDS
        q_tile = gl.load(tile_ptr + Q_TILE)
        n_q = gl.load(tile_ptr + N_Q)
        q_start = gl.load(tile_ptr + Q_START)
        b = gl.load(tile_ptr + SEQUENCE)
    else:
        sequence = divide(b, q_tiles)
        q_tile = b - sequence * q_tiles
        n_q = Sq
        q_start = b * 0
        b = sequence
    number = q_tile * 64 + row
    query = divide(number, group)
    is_row = (row < n_rows) & (number < n_q * group)
    return is_row, b, head * group + number - query * group, q_start + query


@gluon.jit
def copy_columns(
    smem, ptr, slot, first, count, n_spans, n_rows, column, WIDTH: gl.constexpr
):  # fmt: skip
    """Copy some of the WIDTH numbers of some rows, from part `first` and from number `column` on,
    to shared memory [BATCH, ROWS, ·]."""
    COLUMNS: gl.constexpr = smem.shape[2]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [128 // COLUMNS, 1, COLUMNS // 4], [1, smem.shape[1], 1], [2, 1, 0]
    )
    at, is_part = _rows_of_parts(smem, slot, first, count, n_spans, n_rows, layout)
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    d = column + gl.expand_dims(gl.expand_dims(d, 0), 0)
    mask = gl.expand_dims(is_part, 2) & (d >= 0)
    async_copy.async_copy_global_to_shared(smem, ptr + gl.expand_dims(at * WIDTH, 2) + d, mask=mask)


@gluon.jit
def copy_number(smem, ptr, slot, first, count, n_spans, n_rows, WIDTH: gl.constexpr):
    """The number at `ptr` of the WIDTH numbers of each row, to shared memory [BATCH, ROWS]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 1, 8], [1, smem.shape[1], 1], [2, 1, 0])
    at, is_part = _rows_of_parts(smem, slot, first, count, n_spans, n_rows, layout)
    async_copy.async_copy_global_to_shared(smem, ptr + at * WIDTH, mask=is_part)


@gluon.jit
def _rows_of_parts(smem, slot, first, count, n_spans, n_rows, layout: gl.constexpr):
    """Rows [BATCH, ROWS] of parts from number `first` on, and whether they exist."""
    of_parts: gl.constexpr = gl.SliceLayout(2, layout)
    i = gl.expand_dims(first + gl.arange(0, smem.shape[0], gl.SliceLayout(1, of_parts)), 1)
    row = gl.program_id(1) * smem.shape[1]
    row = gl.expand_dims(row + gl.arange(0, smem.shape[1], gl.SliceLayout(0, of_parts)), 0)
    at = (slot.to(gl.int64) * n_spans + i) * n_rows + row
    return at, (i < count) & (row < n_rows)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def load_statistics(
    part_stats_ptr, slot, first, begin, count, n_spans, n_rows, BATCH: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """m and l [ROWS, BATCH] of parts from number `first` on, and m of the part before each."""
    layout: gl.constexpr = gl.BlockedLayout([1, BATCH // 32], [1, 32], [ROWS, 1], [1, 0])
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = gl.expand_dims(row, 1)
    i = gl.expand_dims(first + gl.arange(0, BATCH, gl.SliceLayout(0, layout)), 0)
    at = part_stats_ptr + NUMBERS * ((slot.to(gl.int64) * n_spans + i) * n_rows + row)
    is_part = (i < count) & (row < n_rows)
    part_m = gl.load(at, mask=is_part, other=-float("inf"))
    part_l = gl.load(at + 1, mask=is_part, other=0.0)
    # Also behind the last, where what there is stays.
    has_before = (i > begin) & (i <= count) & (row < n_rows)
    before = gl.load(at - NUMBERS * n_rows, mask=has_before, other=-float("inf"))
    return part_m, part_l, before


@gluon.jit
def weigh_parts(m, keep_smem, add_smem, l_smem, statistics, unit):
    """The maximum of each row with parts of these `statistics`, where it was `m` before them. To
    shared memory go, for each part, the factors of the parts before it and of itself, and its l."""
    BATCH: gl.constexpr = l_smem.shape[0]
    ROWS: gl.constexpr = l_smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, BATCH // 32], [1, 32], [ROWS, 1], [1, 0])
    part_m, part_l, before = statistics
    before = gl.associative_scan(before, 1, _larger)
    m_of_rows = gl.convert_layout(m, gl.SliceLayout(1, layout))
    before = gl.maximum(before, gl.expand_dims(m_of_rows, 1))
    after, keep, add = fold_weights(before, part_m, unit)
    keep_smem.permute((1, 0)).store(keep)
    add_smem.permute((1, 0)).store(add)
    l_smem.permute((1, 0)).store(part_l)
    return gl.max(after, 1)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def fold_slots(
    pointers: FoldPointers,
    strides: RowStrides,
    sizes: FoldSizes,
    unit,
    natural,
    PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    DV: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,  # of as many columns as a part has, DV
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,  # parts that are loaded at once
    BATCHES: gl.constexpr,  # batches that are under way or at work
):
    """Programs [slots, n_rows / ROWS, DV / COLUMNS], a warp for each row."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 32], [1, 32], [ROWS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc_smem = gl.allocate_shared_memory(gl.float32, [BATCHES, BATCH, ROWS, COLUMNS], cube)
    keep_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS], square)
    add_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS], square)
    l_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS], square)
    # The same, part after part.
    accs = reinterpret(acc_smem, gl.float32, [BATCHES * BATCH, ROWS, COLUMNS], square)
    keeps = reinterpret(keep_smem, gl.float32, [BATCH, ROWS], line)
    adds = reinterpret(add_smem, gl.float32, [BATCH, ROWS], line)
    ls = reinterpret(l_smem, gl.float32, [BATCH, ROWS], line)
    parts_ptr, part_stats_ptr = pointers.parts_ptr, pointers.part_stats_ptr
    n_spans, n_rows = sizes.n_spans, sizes.n_rows
    slot = gl.program_id(0)
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, rows)
    # The next call's kernel may start as soon as there is room, to wait for this one.
    gdc_launch_dependents()
    gdc_wait()
    work = gl.load(pointers.slots_ptr + 3 * slot)
    begin = gl.load(pointers.slots_ptr + 3 * slot + 1)
    count = gl.load(pointers.slots_ptr + 3 * slot + 2)
    if work < 0:
        return
    is_row, b, head, query = find_rows(
        work, row, pointers.tiles_ptr, sizes.heads, sizes.group, sizes.q_tiles, sizes.Sq, n_rows,
        PACKED,
    )  # fmt: skip
    m = gl.full([ROWS], -float("inf"), gl.float32, rows)
    l = gl.full([ROWS], 0.0, gl.float32, rows)
    acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout)
    column = gl.program_id(2) * COLUMNS
    for i in gl.static_range(BATCHES - 1):
        copy_columns(
            acc_smem.index(i), parts_ptr, slot, begin + i * BATCH, count, n_spans, n_rows, column,
            DV,
        )  # fmt: skip
        async_copy.commit_group()
    statistics = load_statistics(
        part_stats_ptr, slot, begin, begin, count, n_spans, n_rows, BATCH, ROWS
    )
    batch = begin * 0
    for first in range(begin, count, BATCH):
        # Of the parts before, warps that are behind may still read.
        await_warps()
        ahead = batch + BATCHES - 1
        copy_columns(
            acc_smem.index(ahead % BATCHES), parts_ptr, slot, begin + ahead * BATCH, count,
            n_spans, n_rows, column, DV,
        )  # fmt: skip
        async_copy.commit_group()
        m = gl.convert_layout(weigh_parts(m, keep_smem, add_smem, l_smem, statistics, unit), rows)
        # Those of the next batch, while this one is folded.
        statistics = load_statistics(
            part_stats_ptr, slot, first + BATCH, begin, count, n_spans, n_rows, BATCH, ROWS
        )
        async_copy.wait_group(BATCHES - 1)
        await_warps()
        at = batch % BATCHES * BATCH
        for some in range(0, gl.minimum(count - first, BATCH), UNROLLED):
            for i in gl.static_range(UNROLLED):
                keep = keeps.index(some + i).load(rows)
                add = adds.index(some + i).load(rows)
                part_l = ls.index(some + i).load(rows)
                part_acc = accs.index(at + some + i).load(layout)
                l, acc = add_part(l, acc, part_l, part_acc, keep, add)
        batch += 1
    async_copy.wait_group(0)
    if HAS_SINKS:
        sink = gl.load(pointers.sinks_ptr + head, mask=is_row, other=0.0).to(gl.float32)
        m, l, acc = fold_sink(m, l, acc, sink, natural, unit)
    out, lse = close(m, l, acc, natural)
    to = (b * strides.rows_b + head * strides.rows_h + query * strides.rows_s).to(gl.int64)
    d = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    d = gl.expand_dims(d, 0)
    out = out.to(pointers.out_ptr.dtype.element_ty)
    mask = gl.expand_dims(is_row, 1) & (d < HEAD_DIM_V)
    gl.store(pointers.out_ptr + gl.expand_dims(to * HEAD_DIM_V, 1) + d, out, mask=mask)
    if gl.program_id(2) == 0:
        gl.store(pointers.lse_ptr + to, lse, mask=is_row)
        if not PAGED:
            store_statistics(pointers.statistics_ptr, to, m, l, is_row)
