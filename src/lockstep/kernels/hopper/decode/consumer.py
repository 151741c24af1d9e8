"""The consumer: one warpgroup, up to 64 query rows of one KV head against the spans of a run.

Within a span it does what every online softmax does. A finished span is a part (m, l, acc): it is
folded here if the run has all spans of its rows, and handed out otherwise. Up to 16 rows may have a
consumer of their own, `narrow_consumer.py`.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, left_operand, zeros
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    gl,
    gluon,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import (
    empty_sums,
    issue_products,
    issue_transposed,
    n_pieces,
    piece_of,
    piece_width,
)
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.few_rows import (
    all_of_rows,
    as_operand,
    upper_of_rows,
    upper_rows,
)
from lockstep.kernels.hopper.decode.folding.arrivals import fold_if_last
from lockstep.kernels.hopper.decode.head_columns import clear_in_tile
from lockstep.kernels.hopper.decode.narrow_consumer import NARROW_ROWS, attend_narrow_run
from lockstep.kernels.hopper.decode.nonfinite import clean_tile
from lockstep.kernels.hopper.decode.rows import hides_some, row_bounds
from lockstep.kernels.hopper.decode.sums import (
    add_nonfinite_values,
    fold_sums,
    load_sums,
    rescale_sums,
    store_results,
    store_sums,
)

UPPER_ROWS = gl.constexpr(plan.UPPER_ROWS)
LAST_COLUMNS = gl.constexpr(plan.COLUMNS)


@gluon.jit
def bounds_of_run(rows, sizes, run, layout: gl.constexpr, FEW: gl.constexpr):
    """`row_bounds` of all rows, and once more with those of the rows that are computed, all or if
    FEW the upper ones, in the given layout."""
    all_layout: gl.constexpr = gl.SliceLayout(1, accumulator(sizes.BLOCK_KV))
    of_all_rows = row_bounds(rows, sizes, run, all_layout, ROWS, FEW)
    begin = upper_of_rows(of_all_rows[0][0], layout, FEW)
    end = upper_of_rows(of_all_rows[0][1], layout, FEW)
    return of_all_rows, ((begin, end), of_all_rows[1], of_all_rows[2])


@gluon.jit
def is_seen(sizes, first_key, bounds, layout: gl.constexpr):
    """Which rows see which keys of a tile, [ROWS, BLOCK_KV]; bounds are those of the rows."""
    begin, end = bounds
    key = first_key + gl.arange(0, sizes.BLOCK_KV, gl.SliceLayout(0, layout))
    seen = gl.expand_dims(key, 0) < gl.expand_dims(end, 1)
    if sizes.HAS_LEFT:
        seen = seen & (gl.expand_dims(key, 0) >= gl.expand_dims(begin, 1))
    return seen


@gluon.jit
def scores_of(q_smem, k, i, is_there, HEAD_DIM: gl.constexpr):
    """Products of all rows with the keys of the i-th tile, or if it is not there with whatever is,
    under way."""
    N: gl.constexpr = k.COLUMNS
    if N > HEAD_DIM:  # noqa: SIM102, as below
        if is_there:
            clear_in_tile(k.last_columns(i), HEAD_DIM - (k.D - LAST_COLUMNS))
    queries = ()
    for p in gl.static_range(n_pieces(N)):
        queries = queries + (piece_of(q_smem, N, p),)  # noqa: RUF005, Gluon does not unpack
    return issue_transposed(queries, k, i, k.BLOCK_KV)


@gluon.jit
def softmax_step(rows, sizes, s, first_key, bounds, m, l):
    """Weights of a tile of scores; the new (m, l), and what sums so far weigh under it."""
    layout: gl.constexpr = s.type.layout
    of_rows, _of_any, of_all = bounds
    s = rows.finish_scores(s)
    if hides_some(sizes, first_key, of_all):
        s = gl.where(is_seen(sizes, first_key, of_rows, layout), s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    # exp2(-inf - -inf) would be NaN: measured from 0, a row without keys weighs nothing.
    origin = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2((m - origin) * rows.unit)
    p = gl.exp2((s - gl.expand_dims(origin, 1)) * rows.unit)
    return p, m_new, gl.fma(l, alpha, gl.sum(p, 1)), alpha


@gluon.jit
def attend_span(
    rows, sizes, run, k, v, q_smem, seen, tile, end, bounds, empty_l, weights, m, l,
    FEW: gl.constexpr,
):  # fmt: skip
    """The tiles [tile, end) of a span. `weights`, m and l are those of the first tile; while a
    product with values is under way, the scores of the next tile are made and weighed, beyond the
    end those of the next span. Its keys are there on entry, and those of the tile behind `end` on
    return.

    Returns the part of the span, whether values that are not finite were left out, and the
    weights, m and l of the tile at `end`.
    """
    of_any, of_all = bounds[1], bounds[2]
    N: gl.constexpr = n_pieces(v.COLUMNS)
    FREES_FIRST: gl.constexpr = v.D > 128
    acc = empty_sums(v.COLUMNS)
    left: gl.constexpr = left_operand(piece_width(v.COLUMNS, 0))
    is_nonfinite = tile * 0
    part_m = m
    part_l = empty_l
    for t in range(tile, end):
        first_key = t * sizes.BLOCK_KV
        is_last = t + 1 == end
        has_next = t + 1 < run.end
        v.ring.wait_full(seen)
        if hides_some(sizes, first_key, of_all):
            found = clean_tile(v, seen, of_any[0] - first_key, of_any[1] - first_key)
            is_nonfinite = is_nonfinite | found
        # Behind the last tile, scores of whatever is there.
        s = scores_of(q_smem, k, seen + 1, has_next, rows.HEAD_DIM)
        acc = issue_products(weights, v, seen, acc)
        s = warpgroup_mma_wait(N, deps=(s,))
        k.ring.release(seen + 1, pred=has_next)
        # Not `part_m = m`: Gluon would leave it out of the loop.
        part_m = m + 0.0
        part_l = l + 0.0
        m = gl.where(is_last, -float("inf"), m)
        l = gl.where(is_last, empty_l, l)
        s = upper_rows(s, FEW)
        p, m, l, alpha = softmax_step(rows, sizes, s, first_key + sizes.BLOCK_KV, bounds, m, l)
        # ptxas moves the wait for the product above the exponentials unless a block boundary stands
        # between: waiting for the next tile of keys, which are needed next anyway, is one. Where
        # rings are short, the values have to be released first: another is waiting for what has
        # long been there.
        if FREES_FIRST:
            v.ring.wait_full(seen)
        else:
            k.ring.wait_full(seen + 2, pred=t + 2 < run.end)
        done = warpgroup_mma_wait(0, deps=acc + (weights, p))  # noqa: RUF005
        acc, weights, p = done[:N], done[N], done[N + 1]
        v.ring.release(seen)
        acc = rescale_sums(acc, gl.where(is_last, 1.0, alpha), v.D > 128, FEW)
        weights = as_operand(p, q_smem.dtype, left, FEW)
        if FREES_FIRST:
            k.ring.wait_full(seen + 2, pred=t + 2 < run.end)
        seen += 1
    return part_m, part_l, acc, is_nonfinite, weights, m, l, seen


@gluon.jit
def consume(
    rows, sizes, queue, k, v, queries, exchange, cache, NARROW: gl.constexpr, FEW: gl.constexpr
):
    """Compute all runs of this program. NARROW: the most rows that have the narrow consumer. FEW:
    more rows may have a loop for few of them (`few_rows.py`)."""
    if queries.tile.shape[0] == NARROW_ROWS:
        consume_narrow_runs(rows, sizes, queue, k, v, queries, exchange, cache)
    else:
        consume_runs(rows, sizes, queue, k, v, queries, exchange, cache, NARROW, FEW)


@gluon.jit
def consume_narrow_runs(rows, sizes, queue, k, v, queries, exchange, cache):
    """`consume`, where all runs have few rows."""
    runs = 0
    seen = 0
    run = queue.read(runs, sizes)
    while run.exists != 0:
        seen = attend_narrow_run(rows, sizes, run, k, v, queries, exchange, cache, seen)
        if queue.INSIDE:  # noqa: SIM102, Gluon would evaluate both
            if run.slot >= 0:
                fold_if_last(rows, sizes, run, v.D, False)
        runs += 1
        run = queue.read(runs, sizes)


@gluon.jit
def consume_runs(
    rows, sizes, queue, k, v, queries, exchange, cache, NARROW: gl.constexpr, FEW: gl.constexpr
):
    """`consume`, where runs may have any rows. What computes a run follows from its own rows,
    whatever other sequences have: the narrow consumer has other bits."""
    runs = 0
    seen = 0
    run = queue.read(runs, sizes)
    while run.exists != 0:
        if NARROW > 0:
            if run.n_q * rows.group <= NARROW:
                seen = attend_narrow_run(rows, sizes, run, k, v, queries, exchange, cache, seen)
            else:
                seen = attend_wide_run(rows, sizes, run, k, v, queries, cache, seen, FEW)
        else:
            seen = attend_wide_run(rows, sizes, run, k, v, queries, cache, seen, FEW)
        if queue.INSIDE:  # noqa: SIM102, as above
            if run.slot >= 0:
                fold_if_last(rows, sizes, run, v.D, False)
        runs += 1
        run = queue.read(runs, sizes)


@gluon.jit
def attend_wide_run(rows, sizes, run, k, v, queries, cache, seen, FEW: gl.constexpr):
    """A run of any rows; returns the tiles seen so far."""
    if FEW:
        if run.n_q * rows.group <= UPPER_ROWS:
            seen = attend_run(rows, sizes, run, k, v, queries, cache, seen, UPPER_ROWS)
        else:
            seen = attend_run(rows, sizes, run, k, v, queries, cache, seen, 0)
    else:
        seen = attend_run(rows, sizes, run, k, v, queries, cache, seen, 0)
    return seen


@gluon.jit
def attend_run(rows, sizes, run, k, v, queries, cache, seen, FEW: gl.constexpr):
    """A run of up to FEW rows (`few_rows.py`); returns the tiles seen so far."""
    scores = upper_rows(zeros(sizes.BLOCK_KV), FEW)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    COLUMNS: gl.constexpr = v.COLUMNS
    WIDTH: gl.constexpr = piece_width(COLUMNS, 0)
    acc_rows: gl.constexpr = gl.SliceLayout(1, accumulator(WIDTH))
    left: gl.constexpr = left_operand(WIDTH)
    # Two sums of wider values have no room there.
    IN_REGISTERS: gl.constexpr = v.D <= 128
    queries.load(rows, sizes, run, FEW)
    q_smem = queries.tile
    all_bounds, bounds = bounds_of_run(rows, sizes, run, row_layout, FEW)
    empty_m = gl.full([scores.shape[0]], -float("inf"), gl.float32, row_layout)
    # Whatever its rows see, a sequence whose length is wrong is NaN.
    empty_l = gl.full([scores.shape[0]], 0.0, gl.float32, row_layout)
    empty_l += gl.where(run.kv_len < 0, float("nan"), 0.0)
    if IN_REGISTERS:
        folded_m = all_of_rows(empty_m, acc_rows, FEW)
        folded_l = all_of_rows(empty_l, acc_rows, FEW)
        folded = (folded_m, folded_l, empty_sums(COLUMNS))
    span = run.first_span
    slot = gl.where(run.slot < 0, -1 - run.slot, run.slot)
    tile = run.begin
    # A sequence without a key has no tile.
    has_tile = run.begin < run.end
    k.ring.wait_full(seen, pred=has_tile)
    s = scores_of(q_smem, k, seen, has_tile, rows.HEAD_DIM)
    s = warpgroup_mma_wait(0, deps=(s,))
    k.ring.release(seen, pred=has_tile)
    s = upper_rows(s, FEW)
    p, m, l, _alpha = softmax_step(
        rows, sizes, s, run.begin * sizes.BLOCK_KV, bounds, empty_m, empty_l
    )
    m = gl.where(has_tile, m, empty_m)
    weights = as_operand(p, q_smem.dtype, left, FEW)
    k.ring.wait_full(seen + 1, pred=run.begin + 1 < run.end)
    has_more = True
    while has_more:
        end = gl.minimum((divide(tile, run.span) + 1) * run.span, run.end)
        part_m, part_l, acc, is_nonfinite, weights, m, l, seen = attend_span(
            rows, sizes, run, k, v, q_smem, seen, tile, end, bounds, empty_l, weights, m, l,
            FEW,
        )  # fmt: skip
        if is_nonfinite != 0:
            acc = add_nonfinite_values(
                rows, sizes, cache, run, tile, end, all_bounds[0], acc, COLUMNS
            )
        part_m = all_of_rows(part_m, acc_rows, FEW)
        part_l = all_of_rows(part_l, acc_rows, FEW)
        part = (part_m, part_l, acc)
        if run.first_span > 0:
            store_sums(rows, sizes, run, slot, span, part, COLUMNS, FEW)
        elif IN_REGISTERS:
            folded = fold_sums(folded, part, rows.unit)
        else:
            if span > 0:
                # What this warpgroup has stored.
                await_warps()
                before = load_sums(rows, sizes, run, slot, acc, COLUMNS)
                part = fold_sums(before, part, rows.unit)
            if end < run.end:
                store_sums(rows, sizes, run, slot, 0, part, COLUMNS)
            elif run.slot < 0:
                store_results(rows, sizes, run, part, q_smem, COLUMNS)
            else:
                store_sums(rows, sizes, run, slot, span, part, COLUMNS)
        span += 1
        tile = end
        has_more = tile < run.end
    if IN_REGISTERS:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
        if run.first_span == 0:
            if run.slot < 0:
                store_results(rows, sizes, run, folded, q_smem, COLUMNS, FEW)
            else:
                store_sums(rows, sizes, run, slot, span - 1, folded, COLUMNS, FEW)
    return seen
