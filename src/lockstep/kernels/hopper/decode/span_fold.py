"""Parts that query-invariant decode handed out, folded into results: `fold.py` with the operations
of the Hopper forward (`common/spans.py`)."""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.gluon_shim import (
    async_copy,
    await_warps,
    gl,
    gluon,
    reinterpret,
)
from lockstep.kernels.hopper.common.softmax import close_rows
from lockstep.kernels.hopper.common.spans import fold_span
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.fold import UNROLLED, copy_columns, copy_number, find_rows
from lockstep.kernels.hopper.decode.groups import FoldPointers, FoldSizes, RowStrides
from lockstep.kernels.launch import unspecialized

NUMBERS, SUMS = gl.constexpr(plan.INVARIANT_PART_NUMBERS), gl.constexpr(plan.PART_SUMS)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def fold_spans(
    pointers: FoldPointers,
    strides: RowStrides,
    sizes: FoldSizes,
    unit,
    PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    DV: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,  # parts that are loaded at once
):
    """Programs [slots, n_rows / ROWS, DV / COLUMNS], a warp for each row."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 32], [1, 32], [ROWS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    # Sums of threads are summed as these have them: each by a thread.
    of_sums: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [ROWS, 1], [1, 0])
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS, COLUMNS], cube)
    sums_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS, 8], cube)
    m_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS], square)
    error_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS], square)
    # The same, part after part.
    accs = reinterpret(acc_smem, gl.float32, [BATCH, ROWS, COLUMNS], square)
    all_sums = reinterpret(sums_smem, gl.float32, [BATCH, ROWS, 8], square)
    ms = reinterpret(m_smem, gl.float32, [BATCH, ROWS], line)
    errors = reinterpret(error_smem, gl.float32, [BATCH, ROWS], line)
    parts_ptr, part_stats_ptr = pointers.parts_ptr, pointers.part_stats_ptr
    n_spans, n_rows = sizes.n_spans, sizes.n_rows
    slot = gl.program_id(0)
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, rows)
    gdc_launch_dependents()
    gdc_wait()
    work = gl.load(pointers.slots_ptr + 3 * slot)
    begin = gl.load(pointers.slots_ptr + 3 * slot + 1)
    count = gl.load(pointers.slots_ptr + 3 * slot + 2)
    if work < 0:
        return
    zero = gl.full([ROWS], 0.0, gl.float32, rows)
    maxima = (zero - float("inf"), zero)
    total = (
        gl.full([ROWS, 8], 0.0, gl.float32, of_sums),
        gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout),
    )
    for first in range(begin, count, BATCH):
        # Of the parts before, warps that are behind may still read.
        await_warps()
        column = gl.program_id(2) * COLUMNS
        copy_columns(acc_smem, parts_ptr, slot, first, count, n_spans, n_rows, column, DV)
        copy_columns(sums_smem, part_stats_ptr, slot, first, count, n_spans, n_rows, SUMS, NUMBERS)
        copy_number(m_smem, part_stats_ptr, slot, first, count, n_spans, n_rows, NUMBERS)
        copy_number(error_smem, part_stats_ptr + 1, slot, first, count, n_spans, n_rows, NUMBERS)
        async_copy.commit_group()
        async_copy.wait_group(0)
        await_warps()
        for some in range(0, gl.minimum(count - first, BATCH), UNROLLED):
            for i in gl.static_range(UNROLLED):
                # Behind the last part there are zeros.
                m = ms.index(some + i).load(rows)
                m = gl.where(first + some + i < count, m, -float("inf"))
                error = errors.index(some + i).load(rows)
                part = (all_sums.index(some + i).load(of_sums), accs.index(some + i).load(layout))
                maxima, total = fold_span(maxima, total, m, error, part, unit)
    # As `row_sums` does: the sum of all, l and residue, is r.
    is_l = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, of_sums)), 0) < 4
    l = gl.convert_layout(gl.sum(gl.where(is_l, total[0], 0.0), 1), rows)
    r = gl.convert_layout(gl.sum(total[0], 1), rows)
    is_row, b, head, query = find_rows(
        work, row, pointers.tiles_ptr, sizes.heads, sizes.group, sizes.q_tiles, sizes.Sq, n_rows,
        PACKED,
    )  # fmt: skip
    sink = None
    if HAS_SINKS:
        sink = gl.load(pointers.sinks_ptr + head, mask=is_row, other=0.0)
    factor = gl.exp2(-maxima[1])
    out, lse, m, l = close_rows((total[1],), maxima[0], l, r, factor, unit, sink, 0.0)
    to = (b * strides.rows_b + head * strides.rows_h + query * strides.rows_s).to(gl.int64)
    d = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    d = gl.expand_dims(d, 0)
    x = out[0].to(pointers.out_ptr.dtype.element_ty)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    gl.store(pointers.out_ptr + gl.expand_dims(to * DV, 1) + d, x, mask=mask)
    if gl.program_id(2) == 0:
        gl.store(pointers.lse_ptr + to, lse, mask=is_row)
        if not PAGED:
            gl.store(pointers.statistics_ptr + 2 * to, m, mask=is_row)
            gl.store(pointers.statistics_ptr + 2 * to + 1, l, mask=is_row)
