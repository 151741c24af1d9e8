"""What the warps of a program share: how the kernel was built, the tiles in flight, the results."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator
from lockstep.kernels.hopper.common.exact_weights import offset_factors
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.pages import PageTable
from lockstep.kernels.hopper.common.ring import TileRing
from lockstep.kernels.hopper.common.scores import LN2, LOG2E, cap
from lockstep.kernels.hopper.common.softmax import (
    close_rows,
    hide_before,
    hide_from,
    max_rounding_error,
)
from lockstep.kernels.hopper.common.thread_numbers import of_rows
from lockstep.kernels.hopper.forward.cleaning import Cleaned
from lockstep.kernels.hopper.forward.constant_time import rounding_of
from lockstep.kernels.hopper.forward.scheduling.failed_tiles import FailedTiles
from lockstep.kernels.hopper.forward.scheduling.schedule import BAD, Schedule
from lockstep.kernels.hopper.forward.scheduling.tile_queue import TileQueue


@aggregate
class Build:
    """What is decided when the kernel is compiled.

    Two choices branch on data: FIXED_MAX, and SECOND_PASS, which FIXED_MAX needs. A build in
    CONSTANT_TIME has neither: `constant_time.py` has its softmax, and where a mask cuts blocks,
    `cleaning.py` sees to values that are not finite.
    """

    CONSUMERS: gl.constexpr
    PINGPONG: gl.constexpr  # consumers take turns at the tensor cores
    FIXED_MAX: gl.constexpr  # rows keep their first maximum: softmax.py
    EXACT: gl.constexpr  # and large weights are not rounded: exact_weights.py
    SECOND_PASS: gl.constexpr  # rows that failed are computed again: second_pass.py
    ONE_LOOP: gl.constexpr  # over the blocks of all tiles: flow.py
    Q_STAGES: gl.constexpr  # 2: the queries of the next tile arrive while this one is at work
    SCORES: gl.constexpr  # "raw", "scaled" (where scale is not positive), "capped" or "capped late"
    CAPS_LATE: gl.constexpr  # and where weights are computed: capped_weights.py
    HAS_SINKS: gl.constexpr
    SPAN: gl.constexpr  # blocks of keys between two folds, 0 for none: spans.py
    TOTAL_COLUMNS: gl.constexpr  # of the second sums in shared memory: spans/total.py
    ADDS_LATE: gl.constexpr  # spans are added while scores are computed: spans/steps.py
    CONSTANT_TIME: gl.constexpr
    CLEANS: gl.constexpr  # in constant time, under a mask
    RESCALES_LATE: gl.constexpr  # acc is, under the next scores: products.py
    Q_IN_REGISTERS: gl.constexpr  # behind the first block of a tile: steps.py
    HALVES: gl.constexpr  # weights are computed in two halves, one behind the product: steps.py

    @gluon.constexpr_function
    def __init__(
        self, CONSUMERS, PINGPONG, FIXED_MAX, EXACT, SECOND_PASS, Q_STAGES, SCORES, HAS_SINKS,
        SPAN, TOTAL_COLUMNS, ADDS_LATE, CONSTANT_TIME, CLEANS, HALVES=False, RESCALES_LATE=False,
        Q_IN_REGISTERS=False, ONE_LOOP=False,
    ):  # fmt: skip
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.FIXED_MAX = gl.constexpr(FIXED_MAX)
        self.EXACT = gl.constexpr(EXACT)
        self.SECOND_PASS = gl.constexpr(SECOND_PASS)
        self.ONE_LOOP = gl.constexpr(ONE_LOOP)
        self.Q_STAGES = gl.constexpr(Q_STAGES)
        self.SCORES = gl.constexpr(SCORES)
        self.CAPS_LATE = gl.constexpr(SCORES == "capped late")
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.SPAN = gl.constexpr(SPAN)
        self.TOTAL_COLUMNS = gl.constexpr(TOTAL_COLUMNS)
        self.ADDS_LATE = gl.constexpr(ADDS_LATE)
        self.CONSTANT_TIME = gl.constexpr(CONSTANT_TIME)
        self.CLEANS = gl.constexpr(CLEANS)
        self.HALVES = gl.constexpr(HALVES)
        self.RESCALES_LATE = gl.constexpr(RESCALES_LATE)
        self.Q_IN_REGISTERS = gl.constexpr(Q_IN_REGISTERS)


@aggregate
class Program:
    """What scheduler warp, producer and consumers share."""

    schedule: Schedule
    k: TileRing
    v: TileRing
    pages: PageTable
    tile_queue: TileQueue
    failed: FailedTiles
    cleaned: Cleaned
    build: Build
    scale: gl.tensor  # of raw scores to log2 units, else to natural ones; over the cap, if capped
    softcap: gl.tensor

    @gluon.constexpr_function
    def __init__(self, schedule, k, v, pages, tile_queue, failed, cleaned, build, scale, softcap):
        self.schedule = schedule
        self.k = k
        self.v = v
        self.pages = pages
        self.tile_queue = tile_queue
        self.failed = failed
        self.cleaned = cleaned
        self.build = build
        self.scale = scale
        self.softcap = softcap

    @gluon.jit
    def mask_scores(self, rows, s, block):
        """Scores in their final units, -inf where a row does not see the key; or as they are, if
        they are capped late."""
        if self.build.SCORES == "capped":
            s = cap(s, self.scale, self.softcap, self.k.COLUMNS)
        elif self.build.SCORES == "scaled":
            s = s * self.scale
        if not self.build.CAPS_LATE:
            s = rows.hide(self.schedule, s, block)
        return s

    @gluon.jit
    def mark_weights(self, rows, weights, block, i):
        """Weights of `block`, the i-th in all; in constant time under a window, NaN for values that
        are not finite, as `cleaning.py` says."""
        if self.build.CLEANS and self.schedule.HAS_LEFT:  # noqa: SIM102, Gluon evaluates all
            if rows.is_cut(block):
                keys: gl.constexpr = gl.SliceLayout(0, weights.type.layout)
                flags = self.cleaned.flags(self.v.ring, i, self.schedule.BLOCK_KV, keys)
                weights = rows.mark(self.schedule, weights, flags, block)
        return weights

    @gluon.jit
    def await_values(self, i):
        """Wait for the values of the i-th block; where a mask may cut it, until they are clean."""
        if self.build.CLEANS:
            self.cleaned.wait(self.v.ring, i)
        else:
            self.v.wait(i)

    @gluon.jit
    def first_bad_key(self, tiles):
        """The first bad key of a tile by its number; any number where there is no cleaner, or it
        leaves flags."""
        if self.build.CLEANS and not self.schedule.HAS_LEFT:
            return self.cleaned.first_bad_key(tiles)
        else:  # noqa: RET505, Gluon would go on and return both
            return tiles

    @gluon.jit
    def score_scale(self):
        """The factor that turns what `mask_scores` returns into log2 units, and that of maxima,
        which are in log2 units where scores are capped late."""
        if self.build.CAPS_LATE:
            return 1.0
        else:  # noqa: RET505, Gluon would go on and return both
            return self.scale if self.build.SCORES == "raw" else LOG2E


@aggregate
class Rows:
    """What a consumer knows about its rows of a tile."""

    begin: gl.tensor  # blocks of keys they see
    end: gl.tensor
    tile_begin: gl.tensor  # blocks any row of the tile sees
    tile_end: gl.tensor
    inner_begin: gl.tensor  # blocks every one of them sees whole
    inner_end: gl.tensor
    row_begin: gl.tensor  # [ROWS], the first key of each row
    row_end: gl.tensor  # [ROWS], and the one behind its last
    whole_begin: gl.tensor  # blocks every row of the tile sees whole
    whole_end: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, begin, end, tile_begin, tile_end, inner_begin, inner_end, row_begin, row_end,
        whole_begin, whole_end,
    ):  # fmt: skip
        self.begin = begin
        self.end = end
        self.tile_begin = tile_begin
        self.tile_end = tile_end
        self.inner_begin = inner_begin
        self.inner_end = inner_end
        self.row_begin = row_begin
        self.row_end = row_end
        self.whole_begin = whole_begin
        self.whole_end = whole_end

    @gluon.jit
    def of_consumer(c, schedule, tile):
        """The rows of a tile that are consumer `c`'s."""
        s_layout: gl.constexpr = accumulator(schedule.BLOCK_KV)
        q_idx = tile.q_idx + c * ROWS
        tile_begin, tile_end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        begin, end = schedule.blocks(tile, q_idx, ROWS)
        inner_begin, inner_end = schedule.inner_blocks(tile, q_idx, ROWS)
        row_begin, row_end = schedule.row_bounds(
            tile, q_idx + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        )
        whole_begin, whole_end = schedule.inner_blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        return Rows(
            begin, end, tile_begin, tile_end, inner_begin, inner_end, row_begin, row_end,
            whole_begin, whole_end,
        )  # fmt: skip

    @gluon.jit
    def is_cut(self, block):
        """Whether some row of the tile, of any consumer, does not see some key of the block."""
        return (block < self.whole_begin) | (block >= self.whole_end)

    @gluon.jit
    def is_edge(self, block):
        """Whether some row does not see some key of the block."""
        return (block < self.inner_begin) | (block >= self.inner_end)

    @gluon.jit
    def nan_if_bad(self):
        """A number to add to results: NaN if the sequence is bad, else 0."""
        return gl.where(self.inner_end == BAD, float("nan"), 0.0)

    @gluon.jit
    def n_keys(self, schedule):
        """How many keys each row sees, [ROWS]."""
        n = self.row_end
        if schedule.HAS_LEFT:
            n = n - gl.maximum(self.row_begin, 0)
        elif schedule.PARTS:
            n = gl.minimum(n, self.tile_end * schedule.BLOCK_KV)
            n = n - self.tile_begin * schedule.BLOCK_KV
        return n

    @gluon.jit
    def rise(self, schedule, block):
        """Rows [ROWS] whose maximum rises in `block`: up to the first block that they see, or the
        next one, if they do not see all of it from its first key on."""
        return (block - 1) * schedule.BLOCK_KV < gl.maximum(self.row_begin, 0)

    @gluon.jit
    def have_edges(self):
        return (self.begin < self.inner_begin) | (self.end > self.inner_end)

    @gluon.jit
    def hide(self, schedule, s, block, hidden: gl.constexpr = -float("inf")):
        """Scores of a block, -inf where a row does not see the key, or weights, `hidden` there."""
        first_key = block * schedule.BLOCK_KV
        if schedule.HAS_LEFT:
            if block < self.inner_begin:
                s = hide_before(s, self.row_begin - first_key, hidden)
            if block >= self.inner_end:
                s = hide_from(s, self.row_end - first_key, hidden)
        elif self.is_edge(block):
            s = hide_from(s, self.row_end - first_key, hidden)
        return s

    @gluon.jit
    def mark(self, schedule, weights, flags, block):
        """Weights of a block, NaN where a row sees a key whose flag [BLOCK_KV] is NaN."""
        first_key = block * schedule.BLOCK_KV
        keys: gl.constexpr = gl.SliceLayout(0, weights.type.layout)
        kv_idx = gl.expand_dims(first_key + gl.arange(0, schedule.BLOCK_KV, keys), 0)
        is_seen = kv_idx < gl.expand_dims(self.row_end, 1)
        is_seen = is_seen & (kv_idx >= gl.expand_dims(self.row_begin, 1))
        return weights + gl.where(is_seen, gl.expand_dims(flags, 0), 0.0)


@aggregate
class Results:
    """Where the rows of out and lse go: row r of a head is `b·stride_b + h·stride_h + r·stride_s`
    elements into lse, and that many rows of Dv into out, of 2 into statistics."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    statistics_ptr: gl.tensor
    sinks_ptr: gl.tensor
    parts_ptr: gl.tensor  # `key_parts.py`
    part_lse_ptr: gl.tensor
    arrivals_ptr: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor
    Dv: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointers, stride_b, stride_h, stride_s, Dv, parts=None):
        # Where no tile has parts, anything may stand for these.
        parts = (pointers[0],) * 3 if parts is None else parts
        self.parts_ptr = parts[0]
        self.part_lse_ptr = parts[1]
        self.arrivals_ptr = parts[2]
        self.out_ptr = pointers[0]
        self.lse_ptr = pointers[1]
        self.statistics_ptr = pointers[2]
        self.sinks_ptr = pointers[3]
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.stride_s = stride_s
        self.Dv = Dv

    @gluon.jit
    def place(self, schedule, tile, row):
        """Where rows [ROWS] of a tile are in lse."""
        query, head = schedule.place(tile, row)
        start = tile.batch * self.stride_b + head * self.stride_h
        return start + (tile.q_start + query) * self.stride_s

    @gluon.jit
    def sinks(self, schedule, tile, c, layout: gl.constexpr):
        """The sink of a tile's head, or of each of consumer `c`'s rows [ROWS]."""
        if schedule.HEADS:
            row = tile.q_idx + c * ROWS + gl.arange(0, ROWS, layout)
            _query, head = schedule.place(tile, row)
            sink = gl.load(self.sinks_ptr + head)
        else:
            sink = gl.load(self.sinks_ptr + tile.head)
        if schedule.PARTS:
            # One of the parts has it.
            sink = gl.where(tile.keys.part == 0, sink.to(gl.float32), -float("inf"))
        return sink

    @gluon.jit
    def store_statistics(self, row, lse, m, l, mask):
        gl.store(self.lse_ptr + row, lse, mask=mask)
        gl.store(self.statistics_ptr + 2 * row.to(gl.int64), m, mask=mask)
        gl.store(self.statistics_ptr + 2 * row.to(gl.int64) + 1, l, mask=mask)


@gluon.jit
def normalize(
    program, results, tile, c, rows, acc, m, l, beside, is_exact, bad, dtype: gl.constexpr
):
    """Pieces of out [ROWS, ·] fp32; lse, m and l [ROWS], relative to which weights are
    exp2((s - m)·scale).

    acc is divided by the sum with the largest weights as acc was multiplied by them, rounded to
    `dtype`: `beside` is the residue of `rounding.py`, or bar, offset and residue of
    `exact_weights.py`. `is_exact` names the rows that went through `exp2_weights_exact`, and so
    with a running maximum, whose weight is 1. Rows that see the key `bad`, or a later one, are NaN,
    if `bad` is not None; their lse is not."""
    layout: gl.constexpr = m.type.layout
    scale = program.score_scale()
    if program.build.CONSTANT_TIME:
        error = rounding_of(m, scale, dtype)
    else:
        error = max_rounding_error(m, scale)
    if is_exact is not None:
        error = gl.where(is_exact, 0.0, error)
    # From here on, sums are relative to m·scale as it is.
    factor = gl.exp2(-error)
    r = l
    if program.build.EXACT:
        r = l + beside[2]
        factors = offset_factors(beside[1], m, scale, is_exact)
        if program.build.HAS_SINKS:
            factor = of_rows(factors, layout)
        else:
            l = l * factors
            factor = gl.full([ROWS], 1.0, gl.float32, layout)
    elif program.build.FIXED_MAX:
        r = l + beside
    r = gl.convert_layout(gl.sum(r, 1), layout)
    l = gl.convert_layout(gl.sum(l, 1), layout)
    if is_exact is not None:
        r = gl.where(is_exact, l, r)
    # The weight of the maximum is known: it is what rounding m·scale makes of 1.
    top = gl.exp2(error)
    r = gl.where(l == 0.0, l, r + (top.to(dtype).to(gl.float32) - top))
    if bad is not None:
        r = gl.where(rows.row_end > bad, float("nan"), r)
    sink = None
    if program.build.HAS_SINKS:
        sink = results.sinks(program.schedule, tile, c, layout)
    # In constant time, ptxas has no registers for it where tiles of wider heads change.
    BRIEF: gl.constexpr = not program.build.CONSTANT_TIME or program.v.COLUMNS <= 64
    out, lse, m, l = close_rows(acc, m, l, r, factor, scale, sink, rows.nan_if_bad(), BRIEF)
    if program.build.CAPS_LATE:
        m = m * LN2
    return out, lse, m, l


@gluon.jit
def close_total(program, results, tile, c, rows, acc, m, l, r, error):
    """The results of `normalize`, from the total of all spans: `spans.py`."""
    layout: gl.constexpr = m.type.layout
    sink = None
    if program.build.HAS_SINKS:
        sink = results.sinks(program.schedule, tile, c, layout)
    scale = program.score_scale()
    return close_rows(acc, m, l, r, gl.exp2(-error), scale, sink, rows.nan_if_bad())
