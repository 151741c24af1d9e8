"""A consumer: one warpgroup, 64 query rows of every tile, P in registers.

It runs one block ahead of itself: the scores of block j+1 are on the tensor cores before the
product of block j, and the exponentials of block j+1 run under that product. Consumers pass a
turn around, so that one is at its exponentials while another has the tensor cores.

A program makes a lap over its tiles with settled maxima (`softmax.py`). If the sum of any row ran
away, it makes a second lap with running maxima, which replaces those rows and no other. Builds
that must not branch on data (SETTLED off) make one lap, with running maxima.
"""

from __future__ import annotations

from lockstep.kernels.hopper.channel import Channel, Lap, await_stores, await_turn, pass_turn
from lockstep.kernels.hopper.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.schedule import Schedule
from lockstep.kernels.hopper.softmax import (
    LN2,
    LOG2E,
    OVERFLOW,
    cap,
    hide,
    multiply_rows,
    raise_maximum,
    thread_sums,
    weigh,
)

ROWS = gl.constexpr(64)  # the height of a wgmma


@aggregate
class Build:
    """What is decided when the kernel is compiled."""

    CONSUMERS: gl.constexpr
    TURNS: gl.constexpr  # consumers take turns at the tensor cores
    SETTLED: gl.constexpr  # settled maxima and a second lap: a branch on data
    OUT_IN_Q: gl.constexpr  # out leaves through the shared memory of q
    SCORES: gl.constexpr  # "raw", "scaled" (where scale is not positive) or "capped"
    HAS_SINKS: gl.constexpr
    DV: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, CONSUMERS, TURNS, SETTLED, OUT_IN_Q, SCORES, HAS_SINKS, DV):
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.TURNS = gl.constexpr(TURNS)
        self.SETTLED = gl.constexpr(SETTLED)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.SCORES = gl.constexpr(SCORES)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.DV = gl.constexpr(DV)


@aggregate
class Team:
    """What producer and consumers share."""

    schedule: Schedule
    k: Channel
    v: Channel
    lap: Lap
    build: Build
    scale: gl.tensor  # to log2 units; over the cap, if scores are capped
    cap_log2: gl.tensor

    @gluon.constexpr_function
    def __init__(self, schedule, k, v, lap, build, scale, cap_log2):
        self.schedule = schedule
        self.k = k
        self.v = v
        self.lap = lap
        self.build = build
        self.scale = scale
        self.cap_log2 = cap_log2


@aggregate
class Results:
    """Where the rows of out and lse go: row r of a head is `b·stride_b + h·stride_h + r·stride_s`
    elements into lse, and that many rows of DV into out."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    sinks_ptr: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out_ptr, lse_ptr, sinks_ptr, stride_b, stride_h, stride_s):
        self.out_ptr = out_ptr
        self.lse_ptr = lse_ptr
        self.sinks_ptr = sinks_ptr
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.stride_s = stride_s

    @gluon.jit
    def row(self, tile, q_idx):
        start = tile.batch * self.stride_b + tile.head * self.stride_h
        return start + (tile.q_start + q_idx) * self.stride_s


@aggregate
class Rows:
    """What a consumer knows about its rows of a tile."""

    begin: gl.tensor  # blocks of keys they see
    end: gl.tensor
    inner_begin: gl.tensor  # blocks every one of them sees whole
    inner_end: gl.tensor
    row_begin: gl.tensor  # [ROWS], the first key of each row
    row_end: gl.tensor  # [ROWS], and the one behind its last
    running: gl.tensor  # whether maxima are

    @gluon.constexpr_function
    def __init__(self, begin, end, inner_begin, inner_end, row_begin, row_end, running):
        self.begin = begin
        self.end = end
        self.inner_begin = inner_begin
        self.inner_end = inner_end
        self.row_begin = row_begin
        self.row_end = row_end
        self.running = running


@gluon.jit
def skip(c: gl.constexpr, team, i):
    """Let a block of keys pass that other consumers need and this one does not."""
    team.k.wait(i)
    if team.build.TURNS:
        await_turn(c, i)
        pass_turn((c + 1) % team.build.CONSUMERS, i)
    team.k.release(i)
    team.v.wait(i)
    team.v.release(i)


@gluon.jit
def see(team, rows, s, block):
    """Scores in their final units, -inf where a row does not see the key."""
    if team.build.SCORES == "capped":
        s = cap(s, team.scale, team.cap_log2)
    elif team.build.SCORES == "scaled":
        s = s * team.scale
    if (block < rows.inner_begin) | (block >= rows.inner_end):
        first_key = block * team.schedule.BLOCK_KV
        s = hide(s, first_key, rows.row_begin, rows.row_end, team.schedule.HAS_LEFT)
    return s


@gluon.jit
def step(c: gl.constexpr, team, rows, block, seen, scale, q, p, acc, m, l):
    """Scores and weights of `block`, and the product of the block before, whose weights are `p`.

    The block of K is there already; the one after it is, too, on return."""
    BLOCK_KV: gl.constexpr = team.schedule.BLOCK_KV
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    if team.build.TURNS:
        await_turn(c, seen)
    k = team.k.tile(seen + 1).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    team.v.wait(seen)
    acc = warpgroup_mma(p, team.v.tile(seen), acc, is_async=True)
    if team.build.TURNS:
        pass_turn((c + 1) % team.build.CONSUMERS, seen)
    s = warpgroup_mma_wait(1, deps=(s,))
    team.k.release(seen + 1)
    s = see(team, rows, s, block)
    rescales = rows.running
    if team.build.SETTLED and team.schedule.HAS_LEFT:
        # Up to inner_begin, rows may yet see their first key.
        rescales = rows.running | (block <= rows.inner_begin)
    if rescales:
        m, alpha = raise_maximum(s, m, scale, rows.running)
        l = multiply_rows(l, alpha)
        acc = warpgroup_mma_init(multiply_rows(warpgroup_mma_wait(0, deps=(acc,)), alpha))
    weights = weigh(s, m, scale)
    l += thread_sums(weights)
    # ptxas moves the next wait above the exponentials unless a block boundary stands between:
    # waiting for the next block of K, which is needed next anyway, is one. The weights go through
    # that wait because p, which the product reads, gives them its registers.
    team.k.wait(seen + 2, pred=block + 1 < rows.end)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    team.v.release(seen)
    return gl.convert_layout(weights.to(p.dtype), p.type.layout), acc, m, l


@gluon.jit
def attend(c: gl.constexpr, team, q_channel, tile, seen, tiles, running):
    """One tile of queries against its keys: acc [ROWS, DV], m [ROWS] in log2 units, l [ROWS, 4],
    and the count of blocks seen so far."""
    schedule = team.schedule
    BLOCK_KV: gl.constexpr = schedule.BLOCK_KV
    DV: gl.constexpr = team.v.tiles.shape[5]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    # Scores that `see` has scaled are in log2 units already.
    scale = team.scale if team.build.SCORES == "raw" else 1.0

    q_idx = tile.q_idx + c * ROWS
    tile_begin, tile_end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
    begin, end = schedule.blocks(tile, q_idx, ROWS)
    inner_begin, inner_end = schedule.inner_blocks(tile, q_idx, ROWS)
    row_begin, row_end = schedule.row_bounds(tile, q_idx + gl.arange(0, ROWS, row_layout))
    rows = Rows(begin, end, inner_begin, inner_end, row_begin, row_end, running)
    for _ in range(tile_begin, begin):
        skip(c, team, seen)
        seen += 1

    q_channel.wait(tiles)
    q = q_channel.tile(tiles)
    team.k.wait(seen)
    if team.build.TURNS:
        await_turn(c, seen)
    zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    s = warpgroup_mma(q, team.k.tile(seen).permute((1, 0)), zero, use_acc=False, is_async=True)
    if team.build.TURNS:
        pass_turn((c + 1) % team.build.CONSUMERS, seen)
    s = warpgroup_mma_wait(0, deps=(s,))
    team.k.release(seen)
    s = see(team, rows, s, begin)
    m = gl.full([ROWS], -float("inf"), gl.float32, row_layout)
    m, _alpha = raise_maximum(s, m, scale, True)
    weights = weigh(s, m, scale)
    l = thread_sums(weights)  # [ROWS, 4]
    p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc = gl.zeros([ROWS, DV], gl.float32, o_layout)
    team.k.wait(seen + 1, pred=begin + 1 < end)

    for block in range(begin + 1, end):
        p, acc, m, l = step(c, team, rows, block, seen, scale, q, p, acc, m, l)
        seen += 1

    if not team.build.OUT_IN_Q:
        q_channel.release(tiles)
    team.v.wait(seen)
    acc = warpgroup_mma(p, team.v.tile(seen), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    team.v.release(seen)
    seen += 1
    for _ in range(end, tile_end):
        skip(c, team, seen)
        seen += 1
    return acc, m * scale, l, seen


@gluon.jit
def normalize(team, results, tile, acc, m, l):
    """out [ROWS, DV] fp32, lse and l [ROWS] from the state of the rows; m in log2 units."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    if team.build.HAS_SINKS:
        # A sink is a key without a value.
        sink = gl.load(results.sinks_ptr + tile.head).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        origin = gl.where(top == -float("inf"), 0.0, top)
        factor = gl.exp2(m - origin)
        l = l * factor + gl.exp2(sink - origin)
        m = origin
    empty = l == 0.0
    lse = gl.where(empty, -float("inf"), (m + gl.log2(l)) * LN2)
    inverse = 1.0 / gl.where(empty, 1.0, l)
    if team.build.HAS_SINKS:
        inverse = inverse * factor
    return multiply_rows(acc, inverse), lse, l


@gluon.jit
def replace_rows(results, out, row, chosen, DV: gl.constexpr):
    """Store the `chosen` rows of out [ROWS, ·]; `row` [ROWS] counts rows of the tensor."""
    layout: gl.constexpr = out.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.expand_dims(gl.arange(0, out.shape[1], gl.SliceLayout(0, layout)), 0)
    start = gl.expand_dims(gl.convert_layout(row.to(gl.int64), rows), 1) * DV
    mask = gl.expand_dims(gl.convert_layout(chosen, rows), 1) & (column < DV)
    gl.store(results.out_ptr + start + column, out, mask=mask)


@gluon.jit
def consume(c: gl.constexpr, team, results, q_channel, o_smem, o_desc):
    schedule = team.schedule
    SETTLED: gl.constexpr = team.build.SETTLED
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_KV, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    seen = 0
    tiles = 0
    if team.build.TURNS and c == team.build.CONSUMERS - 1:
        pass_turn(0, tiles)
    ran_away = gl.full([ROWS], 0, gl.int32, row_layout)
    laps = 1
    n = 0
    while n < laps:
        running = n > 0
        if not SETTLED:
            running = n >= 0
        for turn in range(schedule.n_steps()):
            tile = schedule.tile(turn)
            if tile.exists:
                acc, m, l, seen = attend(c, team, q_channel, tile, seen, tiles, running)
                out, lse, l = normalize(team, results, tile, acc, m, l)
                out = out.to(o_desc.dtype)
                first_row = tile.q_idx + c * ROWS
                q_idx = first_row + gl.arange(0, ROWS, row_layout)
                row = results.row(tile, q_idx)
                chosen = q_idx < tile.len_q
                if SETTLED:
                    fine = running | (l < OVERFLOW)
                    lse = gl.where(fine, lse, float("nan"))
                    ran_away = ran_away | gl.where(chosen & (fine == 0), 1, 0)
                if SETTLED and running:
                    # The rows that ran away are those the first lap left with an lse of NaN.
                    old = gl.load(results.lse_ptr + row, mask=chosen, other=0.0)
                    chosen = chosen & (old != old)
                    replace_rows(results, out, row, chosen, team.build.DV)
                else:
                    tma_store_wait(0)
                    o = o_smem.index(0)
                    o.reshape([ROWS, out.shape[1]]).store(out)
                    fence_async_shared()
                    tma_store(o_desc, schedule.q_coordinates(tile, first_row), o)
                gl.store(results.lse_ptr + row, lse, mask=chosen)
                if team.build.OUT_IN_Q:
                    tma_store_wait(0)
                    q_channel.release(tiles)
                tiles += 1
        tma_store_wait(0)
        n += 1
        if SETTLED and n == 1:
            # What the copy engine still writes must not overtake the rows of a second lap.
            await_stores(n)
            team.lap.end(c, gl.max(ran_away, 0))
            laps = 1 + team.lap.again()
