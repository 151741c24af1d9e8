"""The consumer: one warpgroup, up to 64 query rows of one KV head against the spans of a run.

Within a span it does what every online softmax does. A finished span is a part (m, l, acc): it is
folded here if the run has all spans of its rows, and handed out otherwise.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, left_operand, zeros
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.scores import cap
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.few_rows import (
    all_of_rows,
    as_operand,
    times_rows,
    upper_of_rows,
    upper_rows,
)
from lockstep.kernels.hopper.decode.nonfinite import add_nonfinite, clean_values, has_nonfinite
from lockstep.kernels.parts import close, fold, fold_sink, store_statistics

FEW_ROWS = gl.constexpr(plan.FEW_ROWS)


@aggregate
class Rows:
    """What the consumer takes and returns: tensors, their strides, and how scores are made."""

    q_ptr: gl.tensor
    out_ptr: gl.tensor  # [rows, Dv], row b · rows_b + head · rows_h + query · rows_s
    lse_ptr: gl.tensor
    statistics_ptr: gl.tensor  # [rows, 2], of keys that are not in pages
    parts_ptr: gl.tensor  # [slots, n_spans, n_rows, Dv]
    part_stats_ptr: gl.tensor  # [slots, n_spans, n_rows, 2]
    sinks_ptr: gl.tensor
    stride_qb: gl.tensor
    stride_qh: gl.tensor
    stride_qs: gl.tensor
    rows_b: gl.tensor
    rows_h: gl.tensor
    rows_s: gl.tensor
    group: gl.tensor  # query heads of a KV head
    n_spans: gl.tensor
    n_rows: gl.tensor  # of a slot
    cap_scale: gl.tensor
    score_scale: gl.tensor
    unit: gl.tensor
    natural: gl.tensor
    SCORES: gl.constexpr  # "raw", "scaled" or "capped"
    HAS_SINKS: gl.constexpr
    HAS_STATISTICS: gl.constexpr
    D: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointers, numbers, SCORES, HAS_SINKS, HAS_STATISTICS, D):
        self.q_ptr = pointers[0]
        self.out_ptr = pointers[1]
        self.lse_ptr = pointers[2]
        self.statistics_ptr = pointers[3]
        self.parts_ptr = pointers[4]
        self.part_stats_ptr = pointers[5]
        self.sinks_ptr = pointers[6]
        self.stride_qb = numbers[0]
        self.stride_qh = numbers[1]
        self.stride_qs = numbers[2]
        self.rows_b = numbers[3]
        self.rows_h = numbers[4]
        self.rows_s = numbers[5]
        self.group = numbers[6]
        self.n_spans = numbers[7]
        self.n_rows = numbers[8]
        self.cap_scale = numbers[9]
        self.score_scale = numbers[10]
        self.unit = numbers[11]
        self.natural = numbers[12]
        self.SCORES = gl.constexpr(SCORES)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.HAS_STATISTICS = gl.constexpr(HAS_STATISTICS)
        self.D = gl.constexpr(D)

    @gluon.jit
    def load_queries(self, sizes, run, q_smem):
        """The query rows of a run, to where the products read them."""
        D: gl.constexpr = q_smem.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        row = run.q_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
        query = divide(row, self.group)
        head = run.head * self.group + row - query * self.group
        at = run.b.to(gl.int64) * self.stride_qb + head.to(gl.int64) * self.stride_qh
        at += (run.q_start + query).to(gl.int64) * self.stride_qs
        # `copy_engine.fit`: rows that there are begin at multiples of 16 bytes.
        at = gl.multiple_of(at, [8])
        is_row = gl.expand_dims(row < run.n_q * self.group, 1)
        q = gl.load(self.q_ptr + gl.expand_dims(at, 1) + d, mask=is_row & (d >= 0), other=0.0)
        # Of the run before, warps that are behind may still read here.
        await_warps()
        q_smem.store(q)
        fence_async_shared()
        await_warps()

    @gluon.jit
    def finish_scores(self, s):
        """Scores from products."""
        if self.SCORES == "capped":
            s = cap(s, self.cap_scale, self.score_scale, self.D)
        elif self.SCORES == "scaled":
            s = s * self.score_scale
        return s

    @gluon.jit
    def rows_of(self, sizes, run, layout: gl.constexpr):
        """Rows [ROWS] of a run: their place in its tile, their number, and whether there is one."""
        row = gl.arange(0, ROWS, layout)
        number = run.q_tile * ROWS + row
        return row, number, number < run.n_q * self.group

    @gluon.jit
    def load_part(self, sizes, run, slot, layout: gl.constexpr):
        """What `store_part` has stored as the first part of a slot: m, l, acc."""
        DV: gl.constexpr = layout.instr_shape[1]
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        row, _number, is_row = self.rows_of(sizes, run, rows)
        at = slot.to(gl.int64) * self.n_spans * self.n_rows + row
        d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, layout)), 0)
        mask = gl.expand_dims(is_row, 1) & (d >= 0)
        acc = gl.load(self.parts_ptr + gl.expand_dims(at * DV, 1) + d, mask=mask, other=0.0)
        m = gl.load(self.part_stats_ptr + at * 2, mask=is_row, other=0.0)
        return m, gl.load(self.part_stats_ptr + at * 2 + 1, mask=is_row, other=0.0), acc

    @gluon.jit
    def store_part(self, sizes, run, slot, span, m, l, acc):
        """Hand out the part of one span."""
        DV: gl.constexpr = acc.shape[1]
        layout: gl.constexpr = m.type.layout
        row, _number, is_row = self.rows_of(sizes, run, layout)
        to = (slot.to(gl.int64) * self.n_spans + span) * self.n_rows + row
        d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout)), 0)
        mask = gl.expand_dims(is_row, 1) & (d >= 0)
        gl.store(self.parts_ptr + gl.expand_dims(to * DV, 1) + d, acc, mask=mask)
        gl.store(self.part_stats_ptr + to * 2, m, mask=is_row)
        gl.store(self.part_stats_ptr + to * 2 + 1, l, mask=is_row)

    @gluon.jit
    def store_results(self, sizes, run, m, l, acc):
        """The results of rows whose parts have all been folded."""
        DV: gl.constexpr = acc.shape[1]
        layout: gl.constexpr = m.type.layout
        _row, number, is_row = self.rows_of(sizes, run, layout)
        query = divide(number, self.group)
        head = run.head * self.group + number - query * self.group
        if self.HAS_SINKS:
            sink = gl.load(self.sinks_ptr + head, mask=is_row, other=0.0).to(gl.float32)
            m, l, acc = fold_sink(m, l, acc, sink, self.natural, self.unit)
        out, lse = close(m, l, acc, self.natural)
        at = run.b * self.rows_b + head * self.rows_h
        at += (run.q_start + query) * self.rows_s
        d = gl.expand_dims(gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout)), 0)
        mask = gl.expand_dims(is_row, 1) & (d >= 0)
        out = out.to(self.out_ptr.dtype.element_ty)
        gl.store(self.out_ptr + gl.expand_dims(at.to(gl.int64) * DV, 1) + d, out, mask=mask)
        gl.store(self.lse_ptr + at, lse, mask=is_row)
        if self.HAS_STATISTICS:
            store_statistics(self.statistics_ptr, at, m, l, is_row)


@gluon.jit
def row_bounds(rows, sizes, run, layout: gl.constexpr):
    """The keys that rows [ROWS] of a run see, [begin, end) of each; those that any of them sees,
    and those that all of them see."""
    _row, number, _is_row = rows.rows_of(sizes, run, layout)
    kv_len = gl.maximum(run.kv_len, 0)
    shift = kv_len - run.n_q
    position = divide(number, rows.group) + shift
    first = divide(run.q_tile * ROWS, rows.group) + shift
    n_rows = gl.minimum(run.q_tile * ROWS + ROWS, run.n_q * rows.group)
    last = divide(n_rows - 1, rows.group) + shift
    begin = position * 0
    end = begin + kv_len
    any_begin = kv_len * 0
    any_end = kv_len
    all_begin = kv_len * 0
    all_end = kv_len
    if sizes.HAS_LEFT:
        begin = position - sizes.left
        any_begin = first - sizes.left
        all_begin = last - sizes.left
    if sizes.HAS_RIGHT:
        end = gl.minimum(position + sizes.right + 1, kv_len)
        any_end = gl.minimum(last + sizes.right + 1, kv_len)
        all_end = gl.minimum(first + sizes.right + 1, kv_len)
    return (begin, end), (any_begin, any_end), (all_begin, all_end)


@gluon.jit
def bounds_of_run(rows, sizes, run, layout: gl.constexpr, FEW: gl.constexpr):
    """`row_bounds` of all rows, and once more with those of the rows that are computed, all or if
    FEW the upper ones, in the given layout."""
    all_layout: gl.constexpr = gl.SliceLayout(1, accumulator(sizes.BLOCK_KV))
    of_all_rows = row_bounds(rows, sizes, run, all_layout)
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
def scores_of(q_smem, k, i):
    """Products of all rows with the keys of the i-th tile, under way."""
    keys = k.tile(i).permute((1, 0))
    return warpgroup_mma(q_smem, keys, zeros(k.BLOCK_KV), use_acc=False, is_async=True)


@gluon.jit
def hides_some(sizes, first_key, of_all):
    """Whether some row does not see all keys of a tile."""
    return (first_key < of_all[0]) | (first_key + sizes.BLOCK_KV > of_all[1])


@gluon.jit
def weigh(rows, sizes, s, first_key, bounds, m, l):
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
    acc = zeros(v.D)
    left: gl.constexpr = left_operand(v.D)
    is_nonfinite = tile * 0
    part_m = m
    part_l = empty_l
    for t in range(tile, end):
        first_key = t * sizes.BLOCK_KV
        is_last = t + 1 == end
        has_next = t + 1 < run.end
        v.ring.wait_full(seen)
        if hides_some(sizes, first_key, of_all):  # noqa: SIM102, as below
            if has_nonfinite(v.tile(seen)) != 0:
                found = clean_values(v.tile(seen), of_any[0] - first_key, of_any[1] - first_key)
                is_nonfinite = is_nonfinite | found
        # Behind the last tile, scores of whatever is there.
        s = scores_of(q_smem, k, seen + 1)
        acc = warpgroup_mma(weights, v.tile(seen), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        k.ring.release(seen + 1, pred=has_next)
        # Not `part_m = m`: Gluon would leave it out of the loop.
        part_m = m + 0.0
        part_l = l + 0.0
        m = gl.where(is_last, -float("inf"), m)
        l = gl.where(is_last, empty_l, l)
        s = upper_rows(s, FEW)
        p, m, l, alpha = weigh(rows, sizes, s, first_key + sizes.BLOCK_KV, bounds, m, l)
        # ptxas moves the wait for the product above the exponentials unless a block boundary stands
        # between: waiting for the next tile of keys, which are needed next anyway, is one.
        k.ring.wait_full(seen + 2, pred=t + 2 < run.end)
        acc, weights, p = warpgroup_mma_wait(0, deps=(acc, weights, p))
        v.ring.release(seen)
        acc = times_rows(acc, gl.where(is_last, 1.0, alpha), FEW)
        weights = as_operand(p, q_smem.dtype, left, FEW)
        seen += 1
    return part_m, part_l, acc, is_nonfinite, weights, m, l, seen


@gluon.jit
def consume(rows, sizes, queue, k, v, q_smem, cache):
    """All runs of this program."""
    # Of wider values, ptxas would wait for each step of a product.
    if v.D <= 128:
        if rows.n_rows <= FEW_ROWS:
            consume_runs(rows, sizes, queue, k, v, q_smem, cache, True)
        else:
            consume_runs(rows, sizes, queue, k, v, q_smem, cache, False)
    else:
        consume_runs(rows, sizes, queue, k, v, q_smem, cache, False)


@gluon.jit
def consume_runs(rows, sizes, queue, k, v, q_smem, cache, FEW: gl.constexpr):
    """`consume`. FEW: runs have up to 8 rows each (`few_rows.py`)."""
    scores = upper_rows(zeros(sizes.BLOCK_KV), FEW)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    acc_layout: gl.constexpr = accumulator(v.D)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    left: gl.constexpr = left_operand(v.D)
    # Two sums of wider values have no room there.
    IN_REGISTERS: gl.constexpr = v.D <= 128
    runs = 0
    seen = 0
    run = queue.read(runs, sizes)
    while run.exists != 0:
        rows.load_queries(sizes, run, q_smem)
        all_bounds, bounds = bounds_of_run(rows, sizes, run, row_layout, FEW)
        empty_m = gl.full([scores.shape[0]], -float("inf"), gl.float32, row_layout)
        # Whatever its rows see, a sequence whose length is wrong is NaN.
        empty_l = gl.full([scores.shape[0]], 0.0, gl.float32, row_layout)
        empty_l += gl.where(run.kv_len < 0, float("nan"), 0.0)
        if IN_REGISTERS:
            folded_m = all_of_rows(empty_m, acc_rows, FEW)
            folded_l = all_of_rows(empty_l, acc_rows, FEW)
            folded_acc = zeros(v.D)
        span = run.first_span
        slot = gl.where(run.slot < 0, -1 - run.slot, run.slot)
        tile = run.begin
        # A sequence without a key has no tile.
        has_tile = run.begin < run.end
        k.ring.wait_full(seen, pred=has_tile)
        s = warpgroup_mma_wait(0, deps=(scores_of(q_smem, k, seen),))
        k.ring.release(seen, pred=has_tile)
        s = upper_rows(s, FEW)
        p, m, l, _alpha = weigh(
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
                acc = add_nonfinite(rows, sizes, cache, run, tile, end, all_bounds[0], acc)
            part_m = all_of_rows(part_m, acc_rows, FEW)
            part_l = all_of_rows(part_l, acc_rows, FEW)
            if run.first_span > 0:
                rows.store_part(sizes, run, slot, span, part_m, part_l, acc)
            elif IN_REGISTERS:
                folded_m, folded_l, folded_acc = fold(
                    folded_m, folded_l, folded_acc, part_m, part_l, acc, rows.unit
                )
            else:
                if span > 0:
                    # What this warpgroup has stored.
                    await_warps()
                    folded_m, folded_l, folded_acc = rows.load_part(sizes, run, slot, acc_layout)
                    part_m, part_l, acc = fold(
                        folded_m, folded_l, folded_acc, part_m, part_l, acc, rows.unit
                    )
                if end < run.end:
                    rows.store_part(sizes, run, slot, 0, part_m, part_l, acc)
                elif run.slot < 0:
                    rows.store_results(sizes, run, part_m, part_l, acc)
                else:
                    rows.store_part(sizes, run, slot, span, part_m, part_l, acc)
            span += 1
            tile = end
            has_more = tile < run.end
        if IN_REGISTERS:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
            if run.first_span == 0:
                if run.slot < 0:
                    rows.store_results(sizes, run, folded_m, folded_l, folded_acc)
                else:
                    rows.store_part(sizes, run, slot, span - 1, folded_m, folded_l, folded_acc)
        runs += 1
        run = queue.read(runs, sizes)
