"""The forward kernel: one producer warp, and two or three consumer warpgroups of 64 query rows.

    S = Q·Kᵀ,  P = exp2(S·scale - m·scale),  O = Σ P·V / l,  lse = m + log(l)

The producer streams K and V through two channels by TMA. Each consumer keeps P in registers and
runs one block ahead of itself: the scores of block j+1 are on the tensor cores before the product
of block j, and the exponentials of block j+1 run under that product. Consumers pass a turn around,
so that one is at its exponentials while another has the tensor cores.

A program makes a lap over its tiles with settled maxima (`softmax.py`). If the sum of any row ran
away, it makes a second lap with running maxima, which replaces those rows and no other. Builds
that must not branch on data (SETTLED off) make one lap, with running maxima.
"""

from __future__ import annotations

from lockstep.kernels.hopper.channel import Channel, await_turn, pass_turn
from lockstep.kernels.hopper.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.schedule import Schedule
from lockstep.kernels.hopper.softmax import (
    OVERFLOW,
    cap,
    hide,
    multiply_rows,
    raise_maximum,
    thread_sums,
    weigh,
)

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # of one consumer: the height of a wgmma


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
    SPLIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, CONSUMERS, TURNS, SETTLED, OUT_IN_Q, SCORES, HAS_SINKS, DV, SPLIT):
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.TURNS = gl.constexpr(TURNS)
        self.SETTLED = gl.constexpr(SETTLED)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.SCORES = gl.constexpr(SCORES)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.DV = gl.constexpr(DV)
        self.SPLIT = gl.constexpr(SPLIT)


@aggregate
class Lap:
    """Tells everyone whether there is a second lap: `ran_away` [CONSUMERS, 1] int32, which
    all consumers have written when `done` [1, 1] completes."""

    ran_away: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ran_away, done, CONSUMERS):
        self.ran_away = ran_away
        self.done = done
        self.CONSUMERS = gl.constexpr(CONSUMERS)

    @gluon.jit
    def create(CONSUMERS: gl.constexpr):
        one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        ran_away = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], one)
        done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(done.index(0), count=CONSUMERS)
        return Lap(ran_away, done, CONSUMERS)

    @gluon.jit
    def end(self, c: gl.constexpr, ran_away):
        """Consumer `c` is through; `ran_away` is 1 if a row of it has to be computed again."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.ran_away.index(c).store(gl.full([1], 0, gl.int32, one) + ran_away)
        mbarrier.arrive(self.done.index(0), count=1)

    @gluon.jit
    def again(self):
        """Whether any consumer asks for a second lap; waits for all of them."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        mbarrier.wait(self.done.index(0), 0)
        any = gl.full([1], 0, gl.int32, one)
        for c in gl.static_range(self.CONSUMERS):
            any = any | self.ran_away.index(c).load(one)
        return gl.max(any, 0)


@gluon.jit
def produce(schedule, q_desc, k_desc, v_desc, q_channels, k_channel, v_channel, lap, build):
    sent = 0
    tiles = 0
    laps = 1
    n = 0
    while n < laps:
        for step in range(schedule.n_steps()):
            tile = schedule.tile(step)
            if tile.exists:
                for c in gl.static_range(build.CONSUMERS):
                    at = schedule.q_coordinates(tile, tile.q_idx + c * ROWS)
                    q_channels[c].send(tiles, q_desc, at)
                tiles += 1
                begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
                for block in range(begin, end):
                    at = schedule.kv_coordinates(tile, block)
                    k_channel.send(sent, k_desc, at)
                    v_channel.send(sent, v_desc, at)
                    sent += 1
        n += 1
        if build.SETTLED:
            if n == 1:
                laps = 1 + lap.again()


@gluon.jit
def skip(c: gl.constexpr, i, k_channel, v_channel, build):
    """Let a block of keys pass that other consumers need and this one does not."""
    k_channel.wait(i)
    if build.TURNS:
        await_turn(c, i)
        pass_turn((c + 1) % build.CONSUMERS, i)
    k_channel.release(i)
    v_channel.wait(i)
    v_channel.release(i)


@gluon.jit
def score(s, scales, build):
    """What the exponential sees, and its scale to log2 units."""
    if build.SCORES == "capped":
        s = cap(s, scales[0], scales[1])
    elif build.SCORES == "scaled":
        s = s * scales[0]
    return s


@gluon.jit
def attend(
    c: gl.constexpr, tile, seen, tiles, running, schedule, scales, q_channel, k_channel, v_channel, build
):
    """One tile of queries against its keys; returns acc [ROWS, D], m [ROWS], l [ROWS, 4]."""
    BLOCK_KV: gl.constexpr = schedule.BLOCK_KV
    D: gl.constexpr = v_channel.tiles.shape[5]
    dtype: gl.constexpr = v_channel.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    next_c: gl.constexpr = (c + 1) % build.CONSUMERS
    scale = scales[0]
    if build.SCORES != "raw":
        scale = scale * 0 + 1.0

    q_idx = tile.q_idx + c * ROWS
    tile_begin, tile_end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
    begin, end = schedule.blocks(tile, q_idx, ROWS)
    inner_begin, inner_end = schedule.inner_blocks(tile, q_idx, ROWS)
    row_begin, row_end = schedule.row_bounds(tile, q_idx + gl.arange(0, ROWS, rows))
    # From here on every row that will ever see a key has seen one.
    settled = begin + 1
    if schedule.HAS_LEFT:
        settled = inner_begin + 1

    m = gl.full([ROWS], -float("inf"), gl.float32, rows)
    acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, o_layout))
    zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    for _ in range(tile_begin, begin):
        skip(c, seen, k_channel, v_channel, build)
        seen += 1

    q_channel.wait(tiles)
    q = q_channel.tile(tiles)
    k_channel.wait(seen)
    if build.TURNS:
        await_turn(c, seen)
    s = warpgroup_mma(q, k_channel.tile(seen).permute((1, 0)), zero, use_acc=False, is_async=True)
    if build.TURNS:
        pass_turn(next_c, seen)
    s = warpgroup_mma_wait(0, deps=(s,))
    k_channel.release(seen)
    s = score(s, scales, build)
    if (begin < inner_begin) | (begin >= inner_end):
        s = hide(s, begin * BLOCK_KV, row_begin, row_end, schedule.HAS_LEFT)
    m, _ = raise_maximum(s, m, scale, True)
    p = weigh(s, m, scale)
    l = thread_sums(p)  # [ROWS, 4]
    p = gl.convert_layout(p.to(dtype), p_layout)

    for block in range(begin + 1, end):
        k_channel.wait(seen + 1)
        if build.TURNS:
            await_turn(c, seen)
        k = k_channel.tile(seen + 1).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        v_channel.wait(seen)
        acc = warpgroup_mma(p, v_channel.tile(seen), acc, is_async=True)
        if build.TURNS:
            pass_turn(next_c, seen)
        # All but the last product are done: these scores, and the product of the block before.
        s = warpgroup_mma_wait(1, deps=(s,))
        k_channel.release(seen + 1)
        v_channel.release(seen - 1, pred=block > begin + 1)
        s = score(s, scales, build)
        if (block < inner_begin) | (block >= inner_end):
            s = hide(s, block * BLOCK_KV, row_begin, row_end, schedule.HAS_LEFT)
        rescales = running
        if build.SETTLED and schedule.HAS_LEFT:
            rescales = running | (block < settled)
        if rescales:
            m, alpha = raise_maximum(s, m, scale, running)
            l = multiply_rows(l, alpha)
            acc = warpgroup_mma_init(
                multiply_rows(warpgroup_mma_wait(0, deps=(acc,)), alpha)
            )
        weights = weigh(s, m, scale)
        l += thread_sums(weights)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        seen += 1

    if not build.OUT_IN_Q:
        q_channel.release(tiles)
    v_channel.wait(seen)
    acc = warpgroup_mma(p, v_channel.tile(seen), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_channel.release(seen - 1, pred=begin + 1 < end)
    v_channel.release(seen)
    seen += 1
    for _ in range(end, tile_end):
        skip(c, seen, k_channel, v_channel, build)
        seen += 1
    return acc, m * scale, l, seen


@gluon.jit
def normalize(acc, m, l, head, sinks_ptr, build):
    """out [ROWS, D] fp32 and lse [ROWS] from the state of a row; m in log2 units."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    if build.HAS_SINKS:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        origin = gl.where(top == -float("inf"), 0.0, top)
        factor = gl.exp2(m - origin)
        l = l * factor + gl.exp2(sink - origin)
        m = origin
    empty = l == 0.0
    lse = gl.where(empty, -float("inf"), (m + gl.log2(l)) * LN2)
    inverse = 1.0 / gl.where(empty, 1.0, l)
    if build.HAS_SINKS:
        inverse = inverse * factor
    return multiply_rows(acc, inverse), lse, l


@gluon.jit
def consume(
    c: gl.constexpr, schedule, scales, out_ptr, lse_ptr, lse_strides, sinks_ptr, o_desc, o_smem,
    q_channel, k_channel, v_channel, lap, build,
):
    D: gl.constexpr = o_desc.block_shape[4]
    dtype: gl.constexpr = o_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_KV, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    seen = 0
    tiles = 0
    if build.TURNS and c == build.CONSUMERS - 1:
        pass_turn(0, tiles)
    ran_away = gl.full([ROWS], 0, gl.int32, rows)
    laps = 1
    n = 0
    while n < laps:
        running = n > 0
        if not build.SETTLED:
            running = n >= 0
        for step in range(schedule.n_steps()):
            tile = schedule.tile(step)
            if tile.exists:
                acc, m, l, seen = attend(
                    c, tile, seen, tiles, running, schedule, scales, q_channel, k_channel, v_channel, build,
                )
                out, lse, l = normalize(acc, m, l, tile.head, sinks_ptr, build)
                row = tile.q_idx + c * ROWS + gl.arange(0, ROWS, rows)
                at = tile.batch * lse_strides[0] + tile.head * lse_strides[1]
                at = at + (tile.q_start + row) * lse_strides[2]
                inside = row < tile.len_q
                if build.SETTLED:
                    fine = l < OVERFLOW
                    lse = gl.where(fine | running, lse, float("nan"))
                    ran_away = ran_away | gl.where(fine | (inside == 0), 0, 1)
                if build.SETTLED and running:
                    # The rows that ran away are those whose lse is NaN.
                    old = gl.load(lse_ptr + at, mask=inside, other=0.0)
                    inside = inside & (old != old)
                    replace_rows(out.to(dtype), out_ptr, at, inside, build.DV)
                else:
                    if build.OUT_IN_Q:
                        o = q_channel.tiles.index(0)
                    else:
                        o = o_smem.index(c)
                        tma_store_wait(0)
                    o.reshape([ROWS, D]).store(out.to(dtype))
                    fence_async_shared()
                    tma_store(o_desc, schedule.q_coordinates(tile, tile.q_idx + c * ROWS), o)
                gl.store(lse_ptr + at, lse, mask=inside)
                if build.OUT_IN_Q:
                    tma_store_wait(0)
                    q_channel.release(tiles)
                tiles += 1
        n += 1
        if build.SETTLED:
            if n == 1:
                # What the copy engine still writes must not overtake the rows of the second lap.
                tma_store_wait(0)
                lap.end(c, gl.max(ran_away, 0))
                laps = 1 + lap.again()
    tma_store_wait(0)


@gluon.jit
def replace_rows(out, out_ptr, row, chosen, DV: gl.constexpr):
    """Store the `chosen` rows of out [ROWS, D]; `row` [ROWS] counts rows of the tensor."""
    layout: gl.constexpr = out.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.expand_dims(gl.arange(0, out.shape[1], gl.SliceLayout(0, layout)), 0)
    start = gl.expand_dims(gl.convert_layout(row.to(gl.int64), rows), 1) * DV
    mask = gl.expand_dims(gl.convert_layout(chosen, rows), 1) & (column < DV)
    gl.store(out_ptr + start + column, out, mask=mask)


@gluon.jit(
    do_not_specialize=[
        "lse_batch_stride", "lse_head_stride", "lse_row_stride", "paired", "n_q_tiles", "heads", "Hq", "heads_per_kv", "B", "Sq", "Skv", "left",
        "right", "kv_batch_rows", "sinks_ptr", "cu_q_ptr", "cu_kv_ptr", "kv_lens_ptr",
    ]
)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    cu_q_ptr,
    cu_kv_ptr,
    kv_lens_ptr,
    scale,
    cap_log2,
    lse_batch_stride,
    lse_head_stride,
    lse_row_stride,
    paired,
    n_q_tiles,
    heads,
    Hq,
    heads_per_kv,
    B,
    Sq,
    Skv,
    left,
    right,
    kv_batch_rows,
    LAYOUT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    DV: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    SETTLED: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    BLOCK_KV: gl.constexpr = k_desc.block_shape[3]
    build = Build(CONSUMERS, TURNS, SETTLED, OUT_IN_Q, SCORES, HAS_SINKS, DV, SPLIT)
    schedule = Schedule(
        (paired, n_q_tiles, heads, Hq, heads_per_kv, B, Sq, Skv, left, right, kv_batch_rows),
        (cu_q_ptr, cu_kv_ptr, kv_lens_ptr),
        LAYOUT,
        HAS_LEFT,
        HAS_RIGHT,
        CONSUMERS * ROWS,
        BLOCK_KV,
    )
    scales = (scale, cap_log2)
    lse_strides = (lse_batch_stride, lse_head_stride, lse_row_stride)
    k_channel = Channel.create(k_desc, STAGES, CONSUMERS)
    v_channel = Channel.create(v_desc, STAGES + 1, CONSUMERS)
    q_0 = Channel.create(q_desc, 1, 1)
    q_1 = Channel.create(q_desc, 1, 1)
    lap = Lap.create(CONSUMERS)
    if OUT_IN_Q:
        o_smem = q_0.tiles
    else:
        o_smem = gl.allocate_shared_memory(
            o_desc.dtype, [CONSUMERS] + o_desc.block_shape, o_desc.layout
        )
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, schedule, scales, out_ptr, lse_ptr, lse_strides, sinks_ptr, o_desc, o_smem, q_0, k_channel, v_channel, lap, build)),
                (consume, (1, schedule, scales, out_ptr, lse_ptr, lse_strides, sinks_ptr, o_desc, o_smem, q_1, k_channel, v_channel, lap, build)),
                (produce, (schedule, q_desc, k_desc, v_desc, (q_0, q_1), k_channel, v_channel, lap, build)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        q_2 = Channel.create(q_desc, 1, 1)
        gl.warp_specialize(
            [
                (consume, (0, schedule, scales, out_ptr, lse_ptr, lse_strides, sinks_ptr, o_desc, o_smem, q_0, k_channel, v_channel, lap, build)),
                (consume, (1, schedule, scales, out_ptr, lse_ptr, lse_strides, sinks_ptr, o_desc, o_smem, q_1, k_channel, v_channel, lap, build)),
                (consume, (2, schedule, scales, out_ptr, lse_ptr, lse_strides, sinks_ptr, o_desc, o_smem, q_2, k_channel, v_channel, lap, build)),
                (produce, (schedule, q_desc, k_desc, v_desc, (q_0, q_1, q_2), k_channel, v_channel, lap, build)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
