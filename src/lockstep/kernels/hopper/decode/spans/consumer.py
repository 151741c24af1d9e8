"""The consumer of query-invariant calls: `consumer.py` with the bits of the Hopper forward.

Blocks, spans and the operations within a span are those of the forward (`common/spans.py`), where
rows that it marks are computed again as all rows are here: with the maximum of each block at hand.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, left_operand, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.rescale import rescale_by_threads
from lockstep.kernels.hopper.common.softmax import (
    add_sums,
    close_rows,
    raise_maximum,
    thread_sums,
)
from lockstep.kernels.hopper.common.spans import (
    bar_of_rows,
    begin_span,
    empty_total,
    end_exact_span,
    end_of_span,
    first_columns,
    first_maximum,
    first_sum,
    fold_span,
    row_sums,
    span_weights,
    weights_in_span,
)
from lockstep.kernels.hopper.common.thread_numbers import of_threads
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.consumer import bounds_of_run, is_seen, scores_of
from lockstep.kernels.hopper.decode.few_rows import (
    as_operand,
    clear_other_rows,
    halves,
    loaded_rows,
    upper_of_rows,
    upper_rows,
    with_lower_rows,
)
from lockstep.kernels.hopper.decode.folding.arrivals import fold_if_last
from lockstep.kernels.hopper.decode.nonfinite import add_nonfinite, clean_values, has_nonfinite
from lockstep.kernels.hopper.decode.rows import hides_some

NUMBERS, SUMS = gl.constexpr(plan.INVARIANT_PART_NUMBERS), gl.constexpr(plan.PART_SUMS)


@gluon.jit
def mask_scores(rows, sizes, s, first_key, bounds):
    """Scores of a tile in their final units, -inf where a row does not see the key."""
    layout: gl.constexpr = s.type.layout
    s = rows.finish_scores(s)
    if hides_some(sizes, first_key, bounds[2]):
        s = gl.where(is_seen(sizes, first_key, bounds[0], layout), s, -float("inf"))
    return s


@gluon.jit
def softmax_step(rows, s, m, l, beside, bar, FIXED_MAX: gl.constexpr):
    """Weights of a tile of scores; the new m, l and what is beside it, and what sums so far weigh
    under it [·, 4]."""
    if FIXED_MAX:
        return weights_in_span(s, m, l, beside, bar, rows.unit)
    else:  # noqa: RET505, Gluon would go on and return both
        m, alpha = raise_maximum(s, m, rows.unit, True)
        weights = span_weights(s, m, rows.unit)
        return weights, m, add_sums(l, alpha, weights), beside, of_threads(alpha, l)


@gluon.jit
def attend_span(
    rows, sizes, run, k, v, q_smem, seen, tile, end, bounds, first_m, bar, p, m, l, beside,
    FIXED_MAX: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """The tiles [tile, end) of a span. p, m, l and what is beside it, offset and residue, are those
    of the first tile; while a product with values is under way, the scores of the next tile are
    made and weighed, beyond the end those of the next span.

    Returns m, l, what is beside it and products of the span, whether values that are not finite
    were left out, and p, m, l and what is beside it of the tile at `end`.
    """
    left: gl.constexpr = left_operand(v.D)
    acc = zeros(v.D)
    is_nonfinite = tile * 0
    part_m = m
    part_l = l
    part_beside = beside
    # Behind the last tile of the run there is none to weigh.
    stop = gl.minimum(end, run.end - 1)
    for t in range(tile, stop):
        is_last = t + 1 == end
        v.ring.wait_full(seen)
        is_nonfinite = is_nonfinite | clean_if_hidden(sizes, v, seen, t, bounds)
        k.ring.wait_full(seen + 1)
        s = scores_of(q_smem, k, seen + 1, True, k.D)
        acc = warpgroup_mma(p, v.tile(seen), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        k.ring.release(seen + 1)
        # Not `part_m = m`: Gluon would leave it out of the loop.
        part_m = m + 0.0
        part_l = l + 0.0
        part_beside = (beside[0] + 0.0, beside[1] + 0.0)
        _none, begun = begin_span(first_m, l, rows.unit)
        m = gl.where(is_last, first_m, m)
        l = gl.where(is_last, 0.0, l)
        beside = (gl.where(is_last, begun[0], beside[0]), gl.where(is_last, 0.0, beside[1]))
        s = upper_rows(s, FEW)
        s = mask_scores(rows, sizes, s, (t + 1) * sizes.BLOCK_KV, bounds)
        weights, m, l, beside, alpha = softmax_step(rows, s, m, l, beside, bar, FIXED_MAX)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        v.ring.release(seen)
        # Of a span that ended, nothing is rescaled.
        alpha = gl.where(is_last, 1.0, alpha)
        if FEW:
            upper, lower = halves(acc)
            whole = with_lower_rows(rescale_by_threads(upper, alpha), lower)
            acc = gl.convert_layout(whole, acc.type.layout, assert_trivial=True)
        else:
            acc = rescale_by_threads(acc, alpha)
        p = as_operand(weights, q_smem.dtype, left, FEW)
        seen += 1
    if (stop < end) & (tile < end):
        v.ring.wait_full(seen)
        is_nonfinite = is_nonfinite | clean_if_hidden(sizes, v, seen, stop, bounds)
        acc = warpgroup_mma(p, v.tile(seen), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        v.ring.release(seen)
        part_m = m + 0.0
        part_l = l + 0.0
        part_beside = (beside[0] + 0.0, beside[1] + 0.0)
        seen += 1
    return part_m, part_l, part_beside, acc, is_nonfinite, p, m, l, beside, seen


@gluon.jit
def clean_if_hidden(sizes, v, seen, tile, bounds):
    """Cleans the values of a tile, the one numbered `seen` in `v`, if some row does not see all its
    keys. Returns whether some were not finite."""
    first_key = tile * sizes.BLOCK_KV
    of_any, of_all = bounds[1], bounds[2]
    found = tile * 0
    if hides_some(sizes, first_key, of_all):  # noqa: SIM102, Gluon would evaluate both
        if has_nonfinite(v.tile(seen)) != 0:
            found = clean_values(v.tile(seen), of_any[0] - first_key, of_any[1] - first_key)
    return found


@gluon.jit
def begin_run(
    rows, sizes, run, k, queries, cache, first_keys, all_bounds, bounds, seen,
    FIXED_MAX: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Queries and the first tile of a run: m that spans begin with, and the bar; weights, m, l and
    what is beside it. `all_bounds` are those of 64 rows."""
    FROM_TILE: gl.constexpr = FIXED_MAX and not sizes.HAS_LEFT
    of_rows: gl.constexpr = bounds[0][0].type.layout
    first_m = gl.full([ROWS], -float("inf"), gl.float32, all_bounds[0][0].type.layout)
    first = gl.zeros_like(first_m)
    if FIXED_MAX:
        if FROM_TILE and run.begin == 0:
            queries.load(rows, sizes, run, FEW, loaded_rows(FEW))
        else:
            first_m, first = first_keys.load_with_queries(
                rows, sizes, cache, run, queries, all_bounds, first_m, first, FEW
            )
    else:
        queries.load(rows, sizes, run, FEW, loaded_rows(FEW))
    first_m = upper_of_rows(first_m, of_rows, FEW)
    first = upper_of_rows(first, of_rows, FEW)
    # A sequence without a key has no tile.
    has_tile = run.begin < run.end
    k.ring.wait_full(seen, pred=has_tile)
    s = warpgroup_mma_wait(0, deps=(scores_of(queries.tile, k, seen, has_tile, k.D),))
    k.ring.release(seen, pred=has_tile)
    s = upper_rows(s, FEW)
    s = mask_scores(rows, sizes, s, run.begin * sizes.BLOCK_KV, bounds)
    if FROM_TILE:
        first_m = gl.where(run.begin == 0, first_maximum(s), first_m)
        found = first_sum(first_columns(span_weights(s, first_m, rows.unit)))
        first = gl.where(run.begin == 0, gl.convert_layout(found, of_rows), first)
    none, beside = begin_span(first_m, thread_sums(s), rows.unit)
    bar = bar_of_rows(first, bounds[0][0], bounds[0][1], none)
    weights, m, l, beside, _alpha = softmax_step(rows, s, first_m, none, beside, bar, FIXED_MAX)
    return first_m, bar, weights, m, l, beside


@gluon.jit
def store_part(rows, sizes, run, span, m, error, l, residue, acc):
    """Hand out the part of one span, of all rows or of upper ones, the first 8 of which are the
    first rows; l and residue are those of threads."""
    N: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    of_rows: gl.constexpr = m.type.layout
    of_threads: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    of_acc: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    to, is_row = _part_row(rows, sizes, run, span, of_acc, N)
    d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout)), 0)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    gl.store(rows.parts_ptr + gl.expand_dims(to * DV, 1) + d, acc, mask=mask)
    to, is_row = _part_row(rows, sizes, run, span, of_rows, N)
    statistics = rows.part_stats_ptr + to * NUMBERS
    gl.store(statistics, m, mask=is_row)
    gl.store(statistics + 1, error, mask=is_row)
    to, is_row = _part_row(rows, sizes, run, span, of_threads, N)
    thread = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, l.type.layout)), 0)
    mask = gl.expand_dims(is_row, 1) & (thread >= 0)
    statistics = rows.part_stats_ptr + gl.expand_dims(to * NUMBERS, 1) + SUMS + thread
    gl.store(statistics, l, mask=mask)
    gl.store(statistics + 4, residue, mask=mask)


@gluon.jit
def _part_row(rows, sizes, run, span, layout: gl.constexpr, N: gl.constexpr):
    """The first N rows of a part among those of all parts, and whether they exist."""
    row, _number, is_row = rows.rows_of(sizes, run, layout, N)
    return (run.slot.to(gl.int64) * rows.n_spans + span) * rows.n_rows + row, is_row


@gluon.jit
def store_results(rows, sizes, run, maxima, total):
    """The results of rows whose spans have all been folded, as in `store_part`."""
    m, error = maxima
    l, r = row_sums(m, total[0], total[1])
    acc = total[2]
    DV: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = m.type.layout
    acc_layout: gl.constexpr = acc.type.layout
    _row, number, is_row = rows.rows_of(sizes, run, layout, acc.shape[0])
    head = run.head * rows.group + number % rows.group
    sink = None
    if rows.HAS_SINKS:
        sink = gl.load(rows.sinks_ptr + head, mask=is_row, other=0.0)
    nan_if_bad = gl.where(run.kv_len < 0, float("nan"), 0.0)
    out, lse, m, l = close_rows((acc,), m, l, r, gl.exp2(-error), rows.unit, sink, nan_if_bad)
    at = run.b * rows.rows_b + head * rows.rows_h
    at += (run.q_start + number // rows.group) * rows.rows_s
    gl.store(rows.lse_ptr + at, lse, mask=is_row)
    if rows.HAS_STATISTICS:
        gl.store(rows.statistics_ptr + 2 * at.to(gl.int64), m, mask=is_row)
        gl.store(rows.statistics_ptr + 2 * at.to(gl.int64) + 1, l, mask=is_row)
    at = gl.convert_layout(at, gl.SliceLayout(1, acc_layout))
    is_row = gl.convert_layout(is_row, gl.SliceLayout(1, acc_layout))
    d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, acc_layout)), 0)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    out = out[0].to(rows.out_ptr.dtype.element_ty)
    gl.store(rows.out_ptr + gl.expand_dims(at.to(gl.int64) * DV, 1) + d, out, mask=mask)


@gluon.jit
def consume_spans(
    rows, sizes, queue, k, v, queries, cache, first_keys, FIXED_MAX: gl.constexpr, FEW: gl.constexpr
):
    """Compute all runs of this program. FEW: they have up to 8 rows each (`few_rows.py`)."""
    scores = upper_rows(zeros(sizes.BLOCK_KV), FEW)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    left: gl.constexpr = left_operand(v.D)
    q_smem = queries.tile
    clear_other_rows(q_smem, FEW)
    runs = 0
    seen = 0
    run = queue.read(runs, sizes)
    while run.exists != 0:
        all_bounds, bounds = bounds_of_run(rows, sizes, run, row_layout, FEW)
        first_m, bar, weights, m, l, beside = begin_run(
            rows, sizes, run, k, queries, cache, first_keys, all_bounds, bounds, seen, FIXED_MAX,
            FEW,
        )  # fmt: skip
        p = as_operand(weights, q_smem.dtype, left, FEW)
        maxima, total = empty_total(first_m, l, upper_rows(zeros(v.D), FEW))
        span = run.first_span
        tile = run.begin
        has_more = True
        while has_more:
            end = gl.minimum((tile // run.span + 1) * run.span, run.end)
            part_m, part_l, part_beside, acc, is_nonfinite, p, m, l, beside, seen = attend_span(
                rows, sizes, run, k, v, q_smem, seen, tile, end, bounds, first_m, bar, p, m, l,
                beside, FIXED_MAX, FEW,
            )  # fmt: skip
            if is_nonfinite != 0:
                acc = add_nonfinite(rows, sizes, cache, run, tile, end, all_bounds[0], acc)
            products = upper_rows(acc, FEW)
            part_residue = part_beside[1]
            if FIXED_MAX:
                part_l, part_residue, factors = end_exact_span(
                    part_m, part_l, part_beside, rows.unit
                )
                products = rescale_by_threads(products, factors)
            part_residue, error = end_of_span(
                part_m, part_residue, rows.unit, FIXED_MAX, q_smem.dtype
            )
            if run.first_span > 0:
                store_part(rows, sizes, run, span, part_m, error, part_l, part_residue, products)
            else:
                part = (part_l, part_residue, products)
                maxima, total = fold_span(maxima, total, part_m, error, part, rows.unit)
            span += 1
            tile = end
            has_more = tile < run.end
        if run.slot < 0:
            store_results(rows, sizes, run, maxima, total)
        elif run.first_span == 0:
            # As a part of its own: it is folded into nothing, which changes no bit.
            store_part(
                rows, sizes, run, span - 1, maxima[0], maxima[1], total[0], total[1], total[2]
            )
        if queue.INSIDE:  # noqa: SIM102, Gluon would evaluate both
            if run.slot >= 0:
                fold_if_last(rows, sizes, run, v.D, True)
        runs += 1
        run = queue.read(runs, sizes)
