"""Parts folded by the program that hands out the last of a head.

The parts of a head that is cut come from several programs. Each adds its spans to a counter when
they are in memory; the program that completes it folds all parts, in their order, so that no bit
depends on which one that is. No program waits for another.

A counter begins as whatever its memory holds. The part of it above COUNT_BITS is a mark, a number
that each process draws: a counter without it is set to 0 spans by the first program that finds it
so, before it hands out anything. At the end the counter is at 0 again.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import await_warps, gl, gluon
from lockstep.kernels.hopper.common.softmax import close_rows
from lockstep.kernels.hopper.common.spans import fold_span
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.folding.parts_in_registers import fold_from_memory
from lockstep.kernels.hopper.decode.head_columns import power_of_two

COUNT_BITS = gl.constexpr(plan.COUNT_BITS)
# Rows that are folded together, one by each warp, and parts that are loaded at once.
GROUP, LOADED = gl.constexpr(plan.INSIDE_ROWS), gl.constexpr(plan.INSIDE_PARTS)
NUMBERS, SUMS = gl.constexpr(plan.INVARIANT_PART_NUMBERS), gl.constexpr(plan.PART_SUMS)


@gluon.jit
def mark_arrivals(rows, slot):
    """Producer: makes sure that the counter of a slot is one."""
    at = rows.arrivals_ptr + slot
    found = gl.load(at, volatile=True)
    if (found >> COUNT_BITS) != rows.mark:
        # If this fails, another program has made it one.
        gl.atomic_cas(at, found, rows.mark << COUNT_BITS, sem="relaxed", scope="gpu")


@gluon.jit
def fold_if_last(rows, sizes, run, DV: gl.constexpr, INVARIANT: gl.constexpr):
    """A run of a head that is cut has been handed out. If all others have, too: the results."""
    at = rows.arrivals_ptr + run.slot
    # Of all warps, before one of them counts.
    await_warps()
    before = gl.atomic_add(at, run.n_own.to(gl.int64), sem="acq_rel", scope="gpu")
    n_before = (before - (rows.mark << COUNT_BITS)).to(gl.int32)
    if n_before + run.n_own == run.n_spans:
        n_rows = gl.minimum(rows.n_rows, run.n_q * rows.group)
        for first in range(0, n_rows, GROUP):
            if INVARIANT:
                maxima, sums, acc = fold_spans(rows, sizes, run, first, DV)
                store_spans(rows, sizes, run, first, maxima, sums, acc)
            else:
                m, l, acc = fold_group(rows, sizes, run, first, DV)
                rows.store_results(sizes, run, m, l, acc, first)
        gl.store(at, rows.mark << COUNT_BITS)


@gluon.jit
def fold_group(rows, sizes, run, first, DV: gl.constexpr):
    """(m, l, acc) of a group of rows from `first` on."""
    N: gl.constexpr = power_of_two(DV)
    layout: gl.constexpr = gl.BlockedLayout([1, N // 32], [1, 32], [GROUP, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    AT_ONCE: gl.constexpr = LOADED * 128 // N if N > 128 else LOADED
    row, _number, is_row = rows.rows_of(sizes, run, of_rows, GROUP, first)
    at = run.slot.to(gl.int64) * rows.n_spans * rows.n_rows + row
    return fold_from_memory(
        (rows.parts_ptr, rows.part_stats_ptr), (at, is_row), 0, run.first_part, run.n_spans,
        rows.n_rows, rows.unit, DV, rows.HEAD_DIM_V, AT_ONCE, layout, N,
    )  # fmt: skip


@gluon.jit
def fold_spans(rows, sizes, run, first, DV: gl.constexpr):
    """`fold_group` of query-invariant calls: m and error, sums, products."""
    layout: gl.constexpr = gl.BlockedLayout([1, DV // 32], [1, 32], [GROUP, 1], [1, 0])
    # Sums of threads are summed as these have them: each by a thread.
    of_sums: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    AT_ONCE: gl.constexpr = LOADED // 2
    row, _number, is_row = rows.rows_of(sizes, run, of_rows, GROUP, first)
    d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, layout)), 0)
    number = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, of_sums)), 0)
    slot = run.slot.to(gl.int64) * rows.n_spans
    zero = gl.full([GROUP], 0.0, gl.float32, of_rows)
    maxima = (zero - float("inf"), zero)
    sums = gl.full([GROUP, 8], 0.0, gl.float32, of_sums)
    acc = gl.full([GROUP, DV], 0.0, gl.float32, layout)
    for part in range(run.first_part, run.n_spans, AT_ONCE):
        all_maxima, all_sums, all_acc = (), (), ()
        for i in gl.static_range(AT_ONCE):
            at = (slot + part + i) * rows.n_rows + row
            is_part = is_row & (part + i < run.n_spans)
            numbers = rows.part_stats_ptr + NUMBERS * at
            mask = gl.expand_dims(is_part, 1) & (d >= 0)
            products = rows.parts_ptr + gl.expand_dims(at * DV, 1) + d
            part_acc = gl.load(products, mask=mask, other=0.0, cache_modifier=".cg")
            part_m = gl.load(numbers, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            error = gl.load(numbers + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            at = gl.expand_dims(gl.convert_layout(at, gl.SliceLayout(1, of_sums)), 1)
            is_part = gl.expand_dims(gl.convert_layout(is_part, gl.SliceLayout(1, of_sums)), 1)
            at = rows.part_stats_ptr + at * NUMBERS + SUMS + number
            part_sums = gl.load(at, mask=is_part & (number >= 0), other=0.0, cache_modifier=".cg")
            all_maxima = all_maxima + ((part_m, error),)  # noqa: RUF005
            all_sums, all_acc = all_sums + (part_sums,), all_acc + (part_acc,)  # noqa: RUF005
        for i in gl.static_range(AT_ONCE):
            m, error = all_maxima[i]
            part = (all_sums[i], all_acc[i])
            maxima, total = fold_span(maxima, (sums, acc), m, error, part, rows.unit)
            sums, acc = total[0], total[1]
    return maxima, sums, acc


@gluon.jit
def store_spans(rows, sizes, run, first, maxima, sums, acc):
    """The results of a group of rows whose spans have all been folded."""
    layout: gl.constexpr = acc.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    DV: gl.constexpr = acc.shape[1]
    # As `row_sums` does: the sum of all, l and residue, is r.
    is_l = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, sums.type.layout)), 0) < 4
    l = gl.convert_layout(gl.sum(gl.where(is_l, sums, 0.0), 1), of_rows)
    r = gl.convert_layout(gl.sum(sums, 1), of_rows)
    _row, number, is_row = rows.rows_of(sizes, run, of_rows, GROUP, first)
    query = divide(number, rows.group)
    head = run.head * rows.group + number - query * rows.group
    sink = None
    if rows.HAS_SINKS:
        sink = gl.load(rows.sinks_ptr + head, mask=is_row, other=0.0)
    factor = gl.exp2(-maxima[1])
    out, lse, m, l = close_rows((acc,), maxima[0], l, r, factor, rows.unit, sink, 0.0)
    at = run.b * rows.rows_b + head * rows.rows_h + (run.q_start + query) * rows.rows_s
    to = at.to(gl.int64)
    d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, layout)), 0)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    out = out[0].to(rows.out_ptr.dtype.element_ty)
    gl.store(rows.out_ptr + gl.expand_dims(to * DV, 1) + d, out, mask=mask)
    gl.store(rows.lse_ptr + to, lse, mask=is_row)
    if rows.HAS_STATISTICS:
        gl.store(rows.statistics_ptr + 2 * to, m, mask=is_row)
        gl.store(rows.statistics_ptr + 2 * to + 1, l, mask=is_row)
