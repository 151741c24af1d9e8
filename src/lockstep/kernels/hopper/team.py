"""What the warps of a program share: how the kernel was built, the tiles in flight, the results."""

from __future__ import annotations

from lockstep.kernels.hopper.board import Board
from lockstep.kernels.hopper.channel import Channel, Lap
from lockstep.kernels.hopper.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.schedule import Schedule
from lockstep.kernels.hopper.softmax import LN2, LOG2E, cap, hide, multiply_rows, slip

ROWS = gl.constexpr(64)  # of a consumer: the height of a wgmma


@aggregate
class Build:
    """What is decided when the kernel is compiled.

    Two choices branch on data: SETTLED, and SECOND_LAP, which SETTLED needs. A kernel that runs in
    constant time has neither. A NaN or infinity in V then reaches, as NaN, rows that do not see
    its key but share a block with it: such a kernel has to be given a V without them.
    """

    CONSUMERS: gl.constexpr
    TURNS: gl.constexpr  # consumers take turns at the tensor cores
    SETTLED: gl.constexpr  # rows keep their first maximum: softmax.py
    SECOND_LAP: gl.constexpr  # rows that went wrong are computed again: second_lap.py
    Q_STAGES: gl.constexpr  # 2: the queries of the next tile arrive while this one is at work
    SCORES: gl.constexpr  # "raw", "scaled" (where scale is not positive) or "capped"
    HAS_SINKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, CONSUMERS, TURNS, SETTLED, SECOND_LAP, Q_STAGES, SCORES, HAS_SINKS):
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.TURNS = gl.constexpr(TURNS)
        self.SETTLED = gl.constexpr(SETTLED)
        self.SECOND_LAP = gl.constexpr(SECOND_LAP)
        self.Q_STAGES = gl.constexpr(Q_STAGES)
        self.SCORES = gl.constexpr(SCORES)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)


@aggregate
class Team:
    """What usher, producer and consumers share."""

    schedule: Schedule
    k: Channel
    v: Channel
    board: Board
    lap: Lap
    build: Build
    scale: gl.tensor  # of raw scores to log2 units, else to natural ones; over the cap, if capped
    softcap: gl.tensor

    @gluon.constexpr_function
    def __init__(self, schedule, k, v, board, lap, build, scale, softcap):
        self.schedule = schedule
        self.k = k
        self.v = v
        self.board = board
        self.lap = lap
        self.build = build
        self.scale = scale
        self.softcap = softcap

    @gluon.jit
    def see(self, rows, s, block):
        """Scores in their final units, -inf where a row does not see the key."""
        if self.build.SCORES == "capped":
            s = cap(s, self.scale, self.softcap)
        elif self.build.SCORES == "scaled":
            s = s * self.scale
        if rows.is_edge(block):
            s = rows.hide(self.schedule, s, block)
        return s

    @gluon.jit
    def score_scale(self):
        """From what `see` returns to log2 units."""
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

    @gluon.constexpr_function
    def __init__(
        self, begin, end, tile_begin, tile_end, inner_begin, inner_end, row_begin, row_end
    ):
        self.begin = begin
        self.end = end
        self.tile_begin = tile_begin
        self.tile_end = tile_end
        self.inner_begin = inner_begin
        self.inner_end = inner_end
        self.row_begin = row_begin
        self.row_end = row_end

    @gluon.jit
    def of_consumer(c, schedule, tile):
        """The rows of a tile that are consumer `c`'s."""
        s_layout: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, 1], [16, schedule.BLOCK_KV, 16]
        )
        q_idx = tile.q_idx + c * ROWS
        tile_begin, tile_end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        begin, end = schedule.blocks(tile, q_idx, ROWS)
        inner_begin, inner_end = schedule.inner_blocks(tile, q_idx, ROWS)
        row_begin, row_end = schedule.row_bounds(
            tile, q_idx + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        )
        return Rows(begin, end, tile_begin, tile_end, inner_begin, inner_end, row_begin, row_end)

    @gluon.jit
    def is_edge(self, block):
        """Whether some row does not see some key of the block."""
        return (block < self.inner_begin) | (block >= self.inner_end)

    @gluon.jit
    def have_edges(self):
        return (self.begin < self.inner_begin) | (self.end > self.inner_end)

    @gluon.jit
    def hide(self, schedule, s, block):
        first_key = block * schedule.BLOCK_KV
        return hide(s, first_key, self.row_begin, self.row_end, schedule.HAS_LEFT)


@aggregate
class Results:
    """Where the rows of out and lse go: row r of a head is `b·stride_b + h·stride_h + r·stride_s`
    elements into lse, and that many rows of Dv into out, of 2 into statistics."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    statistics_ptr: gl.tensor
    sinks_ptr: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor
    Dv: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointers, stride_b, stride_h, stride_s, Dv):
        self.out_ptr = pointers[0]
        self.lse_ptr = pointers[1]
        self.statistics_ptr = pointers[2]
        self.sinks_ptr = pointers[3]
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.stride_s = stride_s
        self.Dv = Dv

    @gluon.jit
    def row(self, tile, q_idx):
        start = tile.batch * self.stride_b + tile.head * self.stride_h
        return start + (tile.q_start + q_idx) * self.stride_s

    @gluon.jit
    def store_statistics(self, row, lse, m, l, mask):
        gl.store(self.lse_ptr + row, lse, mask=mask)
        gl.store(self.statistics_ptr + 2 * row.to(gl.int64), m, mask=mask)
        gl.store(self.statistics_ptr + 2 * row.to(gl.int64) + 1, l, mask=mask)


@gluon.jit
def normalize(team, results, tile, acc, m, l, r, is_exact):
    """out [ROWS, DV] fp32; lse, m and l [ROWS], relative to which weights are exp2((s - m)·scale).

    acc is divided by `r`, the sum of the weights that it was multiplied by. `is_exact` names the
    rows that went through `weigh_exactly`."""
    scale = team.score_scale()
    # From here on, sums are relative to m·scale as it is.
    factor = gl.exp2(-slip(m, scale))
    if is_exact is not None:
        factor = gl.where(is_exact, 1.0, factor)
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    r = gl.convert_layout(gl.sum(r, 1), m.type.layout)
    if team.build.HAS_SINKS:
        l = l * factor
        r = r * factor
        # A sink is a key without a value.
        sink = gl.load(results.sinks_ptr + tile.head).to(gl.float32) * LOG2E
        # Finite even where the scale is next to nothing.
        top = gl.minimum(gl.maximum(m, sink / scale), 3.0e38)
        top = gl.where(top == -float("inf"), 0.0, top)
        keep = gl.exp2((m - top) * scale)
        weight = gl.exp2(gl.fma(-top, scale + gl.zeros_like(top), sink + gl.zeros_like(top)))
        l = l * keep + weight
        r = r * keep + weight
        inverse = factor * keep / gl.where(r == 0.0, 1.0, r)
        m = top
    else:
        inverse = 1.0 / gl.where(r == 0.0, 1.0, r)
        l = l * factor
    is_empty = l == 0.0
    log2_l = gl.log2(gl.where(is_empty, 1.0, l))
    lse = (m * scale + (slip(m, scale) + log2_l)) * LN2
    lse = gl.where(is_empty, -float("inf"), lse)
    m = gl.where(is_empty, float("inf"), m)
    return multiply_rows(acc, inverse), lse, m, gl.where(is_empty, 1.0, l)
