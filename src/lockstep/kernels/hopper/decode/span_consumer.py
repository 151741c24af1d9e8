"""The consumer of query-invariant calls: `consumer.py` with the bits of the Hopper forward.

Blocks, spans and the operations within a span are those of the forward (`common/spans.py`), where
rows that it marks are computed again as all rows are here: with the maximum of each block at hand.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, left_operand, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import scale_rows
from lockstep.kernels.hopper.common.rounding import add_residue
from lockstep.kernels.hopper.common.softmax import add_sums, close_rows, thread_sums
from lockstep.kernels.hopper.common.spans import (
    empty_total,
    fold_span,
    raise_in_span,
    span_weights,
    sums_of_span,
)
from lockstep.kernels.hopper.decode.consumer import (
    add_nonfinite,
    clean_values,
    hides_some,
    is_seen,
    row_bounds,
    scores_of,
)


@gluon.jit
def take_scores(rows, sizes, k, q_smem, i, first_key, bounds):
    """The scores of a tile of keys [ROWS, BLOCK_KV], masked, and whether some row does not see all
    of it; the keys are released."""
    s_layout: gl.constexpr = accumulator(sizes.BLOCK_KV)
    of_rows, _of_any, of_all = bounds
    k.ring.wait_full(i)
    s = warpgroup_mma_wait(0, deps=(scores_of(q_smem, k, i),))
    k.ring.release(i)
    s = rows.finish_scores(s)
    is_edge = hides_some(sizes, first_key, of_all)
    if is_edge:
        s = gl.where(is_seen(sizes, first_key, of_rows, s_layout), s, -float("inf"))
    return s, is_edge


@gluon.jit
def add_values(v, p, i, is_edge, first_key, bounds, acc, is_nonfinite):
    """acc and the values of a tile weighted by p, which are released; and whether values that are
    not finite were left out, here or before."""
    _of_rows, of_any, _of_all = bounds
    v.ring.wait_full(i)
    if is_edge:
        found = clean_values(v.tile(i), of_any[0] - first_key, of_any[1] - first_key)
        is_nonfinite = is_nonfinite | found
    acc = warpgroup_mma(p, v.tile(i), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v.ring.release(i)
    return acc, is_nonfinite


@gluon.jit
def attend_block(
    rows, sizes, k, v, q_smem, i, first_key, bounds, m, l, residue, acc, is_nonfinite,
    FIXED_MAX: gl.constexpr,
):  # fmt: skip
    """One block of keys: the new (m, l, residue, acc), and whether values that are not finite were
    left out."""
    s, is_edge = take_scores(rows, sizes, k, q_smem, i, first_key, bounds)
    m, alpha, residue, before = raise_in_span(s, m, l, residue, rows.unit, FIXED_MAX)
    weights = span_weights(s, m, rows.unit)
    if FIXED_MAX:
        residue = add_residue(residue, weights, thread_sums(weights), before)
    l = add_sums(l, alpha, weights)
    acc = scale_rows(acc, alpha)
    left: gl.constexpr = left_operand(v.D)
    p = gl.convert_layout(weights.to(q_smem.dtype), left)
    acc, is_nonfinite = add_values(v, p, i, is_edge, first_key, bounds, acc, is_nonfinite)
    return m, l, residue, acc, is_nonfinite


@gluon.jit
def store_part(rows, sizes, run, span, m, l, r, error, acc):
    """Hand out the part of one span."""
    DV: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row, _number, is_row = rows.rows_of(sizes, run, layout)
    to = (run.slot.to(gl.int64) * rows.n_spans + span) * rows.n_rows + row
    d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout)), 0)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    gl.store(rows.parts_ptr + gl.expand_dims(to * DV, 1) + d, acc, mask=mask)
    statistics = rows.part_stats_ptr + to * 4
    gl.store(statistics, gl.convert_layout(m, layout), mask=is_row)
    gl.store(statistics + 1, gl.convert_layout(l, layout), mask=is_row)
    gl.store(statistics + 2, gl.convert_layout(r, layout), mask=is_row)
    gl.store(statistics + 3, gl.convert_layout(error, layout), mask=is_row)


@gluon.jit
def store_results(rows, sizes, run, m, l, r, acc, statistics_ptr, PAGED: gl.constexpr):
    """The results of rows whose spans have all been folded."""
    DV: gl.constexpr = acc[0].shape[1]
    layout: gl.constexpr = m.type.layout
    acc_layout: gl.constexpr = acc[0].type.layout
    _row, number, is_row = rows.rows_of(sizes, run, layout)
    head = run.head * rows.group + number % rows.group
    sink = None
    if rows.HAS_SINKS:
        sink = gl.load(rows.sinks_ptr + head, mask=is_row, other=0.0)
    one = gl.full([ROWS], 1.0, gl.float32, layout)
    nan_if_bad = gl.where(run.kv_len < 0, float("nan"), 0.0)
    out, lse, m, l = close_rows(acc, m, l, r, one, rows.unit, sink, nan_if_bad)
    at = run.b * rows.rows_b + head * rows.rows_h
    at += (run.q_start + number // rows.group) * rows.rows_s
    gl.store(rows.lse_ptr + at, lse, mask=is_row)
    if not PAGED:
        gl.store(statistics_ptr + 2 * at.to(gl.int64), m, mask=is_row)
        gl.store(statistics_ptr + 2 * at.to(gl.int64) + 1, l, mask=is_row)
    at = gl.convert_layout(at, gl.SliceLayout(1, acc_layout))
    is_row = gl.convert_layout(is_row, gl.SliceLayout(1, acc_layout))
    d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, acc_layout)), 0)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    out = out[0].to(rows.out_ptr.dtype.element_ty)
    gl.store(rows.out_ptr + gl.expand_dims(at.to(gl.int64) * DV, 1) + d, out, mask=mask)


@gluon.jit
def consume_spans(
    rows, sizes, queue, k, v, q_smem, cache, statistics_ptr, PAGED: gl.constexpr,
    FIXED_MAX: gl.constexpr,
):  # fmt: skip
    """All runs of this program."""
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator(sizes.BLOCK_KV))
    runs = 0
    seen = 0
    run = queue.read(runs, sizes)
    while run.exists != 0:
        rows.load_queries(sizes, run, q_smem)
        bounds = row_bounds(rows, sizes, run, row_layout)
        no_max = gl.full([ROWS], -float("inf"), gl.float32, row_layout)
        sums, total = empty_total(no_max, v.D)
        span = run.first_span
        tile = run.begin
        has_more = True
        while has_more:
            end = gl.minimum((tile // run.span + 1) * run.span, run.end)
            m = no_max
            l = thread_sums(zeros(sizes.BLOCK_KV))
            residue = l
            acc = zeros(v.D)
            is_nonfinite = tile * 0
            for t in range(tile, end):
                m, l, residue, acc, is_nonfinite = attend_block(
                    rows, sizes, k, v, q_smem, seen, t * sizes.BLOCK_KV, bounds, m, l, residue, acc,
                    is_nonfinite, FIXED_MAX,
                )  # fmt: skip
                seen += 1
            if is_nonfinite != 0:
                acc = add_nonfinite(rows, sizes, cache, run, tile, end, bounds[0], acc)
            part_l, part_r, error = sums_of_span(m, l, residue, rows.unit, q_smem.dtype)
            if run.first_span > 0:
                store_part(rows, sizes, run, span, m, part_l, part_r, error, acc)
            else:
                sums, total = fold_span(sums, total, m, part_l, part_r, error, (acc,), rows.unit)
            span += 1
            tile = end
            has_more = tile < run.end
        if run.slot < 0:
            store_results(rows, sizes, run, sums[0], sums[1], sums[2], total, statistics_ptr, PAGED)
        elif run.first_span == 0:
            # As a part of its own: it is folded into nothing, which changes no bit.
            none = gl.zeros_like(sums[0])
            store_part(
                rows, sizes, run, span - 1, sums[0], sums[1], sums[2], none, total[0]
            )  # fmt: skip
        runs += 1
        run = queue.read(runs, sizes)
