"""What a consumer takes and returns, and which keys its rows see."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    copy_to_shared,
    gl,
    gluon,
    reinterpret,
)
from lockstep.kernels.hopper.common.scores import cap
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.few_rows import UPPER_ROWS, row_in_tile
from lockstep.kernels.parts import close, fold_sink, store_statistics

# Rows that are loaded or stored at a time, and columns that lie side by side in shared memory.
SOME_ROWS, COLUMNS = gl.constexpr(16), gl.constexpr(plan.COLUMNS)


@gluon.jit
def rows_and_columns(smem):
    """Shared memory [64, ·] of queries as [·, SOME_ROWS, COLUMNS]: its columns come first."""
    shape: gl.constexpr = [
        smem.shape[0] // SOME_ROWS * (smem.shape[1] // COLUMNS), SOME_ROWS, COLUMNS
    ]  # fmt: skip
    return reinterpret(smem, smem.dtype, shape, gl.NVMMASharedLayout(128, 16, 2))


@aggregate
class Rows:
    """What the consumer takes and returns: tensors, their strides, and how scores are made."""

    q_ptr: gl.tensor
    out_ptr: gl.tensor  # [rows, Dv], row b · rows_b + head · rows_h + query · rows_s
    lse_ptr: gl.tensor
    statistics_ptr: gl.tensor  # [rows, 2], of keys that are not in pages
    parts_ptr: gl.tensor  # [slots, n_spans, n_rows, DV]
    part_stats_ptr: gl.tensor  # [slots, n_spans, n_rows, 2]
    sinks_ptr: gl.tensor
    arrivals_ptr: gl.tensor  # [slots]: `folding/arrivals.py`
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
    mark: gl.tensor
    SCORES: gl.constexpr  # "raw", "scaled" or "capped"
    HAS_SINKS: gl.constexpr
    HAS_STATISTICS: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr  # columns of a part
    HEAD_DIM: gl.constexpr
    HEAD_DIM_V: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, pointers, numbers, SCORES, HAS_SINKS, HAS_STATISTICS, D, DV, HEAD_DIM, HEAD_DIM_V
    ):  # fmt: skip
        self.q_ptr = pointers[0]
        self.out_ptr = pointers[1]
        self.lse_ptr = pointers[2]
        self.statistics_ptr = pointers[3]
        self.parts_ptr = pointers[4]
        self.part_stats_ptr = pointers[5]
        self.sinks_ptr = pointers[6]
        self.arrivals_ptr = pointers[7]
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
        self.mark = numbers[13]
        self.SCORES = gl.constexpr(SCORES)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.HAS_STATISTICS = gl.constexpr(HAS_STATISTICS)
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.HEAD_DIM_V = gl.constexpr(HEAD_DIM_V)

    @gluon.jit
    def copy_queries(
        self, sizes, run, q_smem, FEW: gl.constexpr = 0, THERE: gl.constexpr = ROWS
    ):  # fmt: skip
        """Begin to copy the queries of a run to THERE rows of a product, some at a time: in code
        that is short, and so there sooner."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        N: gl.constexpr = q_smem.shape[0] // SOME_ROWS
        # Query rows of as many rows of a product (`few_rows.py`).
        STEP: gl.constexpr = SOME_ROWS // 2 if FEW == UPPER_ROWS else SOME_ROWS
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        some = rows_and_columns(q_smem)
        for i in range(THERE // SOME_ROWS):
            _row, number, is_row = self.rows_of(sizes, run, of_rows, SOME_ROWS, i * STEP, FEW)
            query = divide(number, self.group)
            head = run.head * self.group + number - query * self.group
            at = run.b.to(gl.int64) * self.stride_qb + head.to(gl.int64) * self.stride_qh
            at += (run.q_start + query).to(gl.int64) * self.stride_qs
            # `copy_engine.fit`: rows that there are begin at multiples of 16 bytes.
            at = gl.expand_dims(gl.multiple_of(at, [8]), 1)
            for block in gl.static_range(q_smem.shape[1] // COLUMNS):
                d = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
                d = gl.expand_dims(d, 0)
                mask = gl.expand_dims(is_row, 1) & (d < self.HEAD_DIM)
                copy_to_shared(some.index(block * N + i), self.q_ptr + at + d, mask=mask)

    @gluon.jit
    def finish_scores(self, s):
        """Scores from products."""
        if self.SCORES == "capped":
            s = cap(s, self.cap_scale, self.score_scale, self.D)
        elif self.SCORES == "scaled":
            s = s * self.score_scale
        return s

    @gluon.jit
    def rows_of(
        self, sizes, run, layout: gl.constexpr, N: gl.constexpr = ROWS, first=0,
        FEW: gl.constexpr = 0,
    ):  # fmt: skip
        """N rows of a run, from the first on, or those of a product (`few_rows.py`): their place in
        its tile, their number, and whether there is one."""
        row = first + row_in_tile(gl.arange(0, N, layout), FEW)
        number = run.q_tile * ROWS + row
        return row, number, number < run.n_q * self.group

    @gluon.jit
    def load_part(self, sizes, run, slot, layout: gl.constexpr, column: gl.constexpr = 0):
        """The m, l and acc that `store_part` has stored as the first part of a slot."""
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        row, _number, is_row = self.rows_of(sizes, run, rows)
        at = slot.to(gl.int64) * self.n_spans * self.n_rows + row
        d = column + gl.arange(0, layout.instr_shape[1], gl.SliceLayout(0, layout))
        d = gl.expand_dims(d, 0)
        mask = gl.expand_dims(is_row, 1) & (d >= 0)
        acc = gl.load(self.parts_ptr + gl.expand_dims(at * self.DV, 1) + d, mask=mask, other=0.0)
        m = gl.load(self.part_stats_ptr + at * 2, mask=is_row, other=0.0)
        return m, gl.load(self.part_stats_ptr + at * 2 + 1, mask=is_row, other=0.0), acc

    @gluon.jit
    def store_part(
        self, sizes, run, slot, span, m, l, acc, FEW: gl.constexpr = 0, column: gl.constexpr = 0
    ):  # fmt: skip
        """Hand out the part of one span, from a column on."""
        layout: gl.constexpr = m.type.layout
        row, _number, is_row = self.rows_of(sizes, run, layout, acc.shape[0], 0, FEW)
        to = (slot.to(gl.int64) * self.n_spans + span) * self.n_rows + row
        d = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        d = gl.expand_dims(d, 0)
        mask = gl.expand_dims(is_row, 1) & (d < self.DV)
        gl.store(self.parts_ptr + gl.expand_dims(to * self.DV, 1) + d, acc, mask=mask)
        if column == 0:
            gl.store(self.part_stats_ptr + to * 2, m, mask=is_row)
            gl.store(self.part_stats_ptr + to * 2 + 1, l, mask=is_row)

    @gluon.jit
    def store_results(
        self, sizes, run, m, l, acc, first=0, FEW: gl.constexpr = 0, column: gl.constexpr = 0
    ):  # fmt: skip
        """The results of rows whose parts have all been folded, from row `first` and from a column
        on."""
        out, at, is_row = self.finish_rows(sizes, run, m, l, acc, first, FEW, column)
        d = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        self.store_out(out, at, is_row, d)

    @gluon.jit
    def store_out(self, out, at, is_row, d):
        """Columns d of rows of out, which begin at rows `at`."""
        d = gl.expand_dims(d, 0)
        mask = gl.expand_dims(is_row, 1) & (d < self.HEAD_DIM_V)
        to = gl.expand_dims(at.to(gl.int64) * self.HEAD_DIM_V, 1) + d
        gl.store(self.out_ptr + to, out, mask=mask)

    @gluon.jit
    def place_rows(
        self, sizes, run, layout: gl.constexpr, N: gl.constexpr, first, FEW: gl.constexpr
    ):
        """The places of N rows of a run (`rows_of`) in lse, their query heads, and whether
        there are such rows."""
        _row, number, is_row = self.rows_of(sizes, run, layout, N, first, FEW)
        query = divide(number, self.group)
        head = run.head * self.group + number - query * self.group
        at = run.b * self.rows_b + head * self.rows_h
        at += (run.q_start + query) * self.rows_s
        return at, head, is_row

    @gluon.jit
    def finish_rows(self, sizes, run, m, l, acc, first, FEW: gl.constexpr, column: gl.constexpr):
        """Store lse of rows whose parts have all been folded; their out, their place, and whether
        there is such a row."""
        layout: gl.constexpr = m.type.layout
        at, head, is_row = self.place_rows(sizes, run, layout, acc.shape[0], first, FEW)
        if self.HAS_SINKS:
            sink = gl.load(self.sinks_ptr + head, mask=is_row, other=0.0).to(gl.float32)
            m, l, acc = fold_sink(m, l, acc, sink, self.natural, self.unit)
        out, lse = close(m, l, acc, self.natural)
        if column == 0:
            gl.store(self.lse_ptr + at, lse, mask=is_row)
            if self.HAS_STATISTICS:
                store_statistics(self.statistics_ptr, at, m, l, is_row)
        return out.to(self.out_ptr.dtype.element_ty), at, is_row


@gluon.jit
def row_bounds(
    rows, sizes, run, layout: gl.constexpr, N: gl.constexpr = ROWS, FEW: gl.constexpr = 0
):  # fmt: skip
    """The keys that N rows of a run see (`rows_of`), [begin, end) of each; those that any row of it
    sees, and those that all rows see."""
    _row, number, _is_row = rows.rows_of(sizes, run, layout, N, 0, FEW)
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
def hides_some(sizes, first_key, of_all):
    """Whether some row does not see all keys of a tile."""
    return (first_key < of_all[0]) | (first_key + sizes.BLOCK_KV > of_all[1])
