"""The launches around the backward kernel: statistics of each row before it, dQ in order after it.

    m, log2 l   such that weights are 2^((s - m)·unit - log2 l). m is +inf for rows that see no key,
                though they may see a sink: their weights are 0. It is NONFINITE for rows whose m,
                l, delta or dO is not finite: the keys they see get infinite weights
    lse2        = m·unit + log2 l, rounded: weights are 2^(s·unit - lse2), but for large scores
    delta       = Σ_d dO·O - dlse

Query tiles of all heads are numbered through. Rows of `stats` lie side by side, so that one copy
brings a tile's: [n_tiles, 2, BLOCK_Q] with lse2 and delta for narrow heads, which have m and log2 l
in `large` [n_tiles, 2, BLOCK_Q], and `flags` [n_tiles] for tiles that need them; for other ones and
in constant time [n_tiles, 4, BLOCK_Q] with m, delta, log2 l, and nothing. Rows beyond the sequence
look like rows that see no key. `sums` [n_tiles, 64 · (64 · (PARTS - 1) + REST)] holds the parts of
a tile of dQ as registers held them: 64 rows of 64 columns each, and of REST columns the last one.
`sink_sums` [n_tiles] fp64 is what tiles have for the gradient of sinks (`sinks.py`).

For packed sequences, `bounds` [3, B + 2] int32 holds what the later kernels use: the offsets of
queries, those of keys, and 1 for good sequences, all without wrong ones (`kernels.sequences`).
Where queries may be shared out (`shares.py`), `plan` [6, B + 2] int32 has for each sequence the
number of slots before its own, and of shares of several; then the results of `divide_queries`, and
how many shares these make.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.backward.groups import (
    RowPointers,
    RowSizes,
    SequencePointers,
    ShareRule,
    SinkPointers,
    Strides,
)
from lockstep.kernels.hopper.backward.shares import divide_queries
from lockstep.kernels.hopper.backward.sinks import sum_tile
from lockstep.kernels.hopper.backward.turns import await_count, count_parts
from lockstep.kernels.hopper.common.accumulator import from_registers
from lockstep.kernels.launch import unspecialized
from lockstep.kernels.sequences import (
    CHUNK,
    bounds_of,
    checked_length,
    given_bounds,
    nan_where,
    owner_of,
)

# Finite, so that 2^((-inf - NONFINITE)·unit), the weight of a hidden key, is 0.
NONFINITE = tl.constexpr(-3.0e38)
# From here on, rounding lse2 costs weights a tenth of what rounding them to 16 bits does, or more.
LARGE_LSE = tl.constexpr(2048.0)


@triton.jit
def _place(tile, sequences, sizes, BLOCK_Q: tl.constexpr):
    """Where a tile is: its sequence, head, number in the sequence; then the sequence's first row
    and its lengths, whether it is good, and if any offset is wrong."""
    B, Sq, Skv = sizes.B, sizes.Sq, sizes.Skv
    head, q_tile = tile // sizes.q_slots, tile % sizes.q_slots
    if sequences.cu_q_ptr is not None:
        cu_q_ptr, cu_kv_ptr = sequences.cu_q_ptr, sequences.cu_kv_ptr
        batch, is_any_wrong = owner_of(q_tile, cu_q_ptr, cu_kv_ptr, B, Sq, Skv, 1, BLOCK_Q)
        start, end, is_right = bounds_of(batch, is_any_wrong, cu_q_ptr, B, Sq)
        first_key, last_key, is_key_right = bounds_of(batch, is_any_wrong, cu_kv_ptr, B, Skv)
        is_good = is_right & is_key_right
        start, len_q = start.to(tl.int32), (end - start).to(tl.int32)
        len_kv = tl.where(is_good, last_key - first_key, 0).to(tl.int32)
        q_tile -= start // BLOCK_Q + batch
    else:
        batch, head = head // sizes.H, head % sizes.H
        start, len_q, len_kv, is_good, is_any_wrong = 0, Sq, Skv, True, False
        if sequences.kv_lens_ptr is not None:
            len_kv, is_good = checked_length(sequences.kv_lens_ptr, batch, Skv)
    return batch, head, q_tile, start, len_q, len_kv, is_good, is_any_wrong


@triton.jit
def _store_bounds(bounds_ptr, b, is_any_wrong, sequences, sizes):
    """Stores the offsets of sequence b, and after sequence B where all of them end."""
    B, Sq, Skv = sizes.B, sizes.Sq, sizes.Skv
    q_start, _, is_right = bounds_of(b, is_any_wrong, sequences.cu_q_ptr, B, Sq)
    kv_start, _, is_key_right = bounds_of(b, is_any_wrong, sequences.cu_kv_ptr, B, Skv)
    is_good = is_right & is_key_right
    tl.store(bounds_ptr + b, q_start.to(tl.int32))
    tl.store(bounds_ptr + (B + 2) + b, kv_start.to(tl.int32))
    tl.store(bounds_ptr + 2 * (B + 2) + b, is_good.to(tl.int32))
    if b == B:
        tl.store(bounds_ptr + b + 1, Sq)
        tl.store(bounds_ptr + (B + 2) + b + 1, Skv)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _clean_lengths(b, before, cu_ptr, B, T):
    """Lengths of the next sequences b [n] by their clean offsets, and the largest of these;
    `before` is that of the sequences before them."""
    start, end = given_bounds(b, cu_ptr, B, T)
    start = tl.where((start >= 0) & (start <= T) & (b > 0), start, 0)
    start = tl.maximum(tl.associative_scan(start, 0, _larger), before)
    end = tl.maximum(tl.where((end >= 0) & (end <= T), end, 0), start)
    length = tl.where(b <= B, end - start, 0).to(tl.int32)
    return length, tl.max(start, 0)


@triton.jit
def _make_plan(
    plan_ptr, sequences, sizes, Hkv, heads_per_kv, rule, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Stores the plan of all sequences, and behind the last one, how many slots and shares there
    are."""
    B, Sq, Skv = sizes.B, sizes.Sq, sizes.Skv
    before_q, before_kv = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    slots, shares = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    ROW = B + 2
    for first in range(0, B + 1, CHUNK):
        b = first + tl.arange(0, CHUNK)
        if sequences.cu_q_ptr is not None:
            len_q, before_q = _clean_lengths(b, before_q, sequences.cu_q_ptr, B, Sq)
            len_kv, before_kv = _clean_lengths(b, before_kv, sequences.cu_kv_ptr, B, Skv)
        else:
            len_kv = tl.load(sequences.kv_lens_ptr + b, mask=b < B, other=0)
            len_kv = tl.where((len_kv >= 0) & (len_kv <= Skv), len_kv, 0).to(tl.int32)
            len_q = len_kv * 0 + Sq
        kv_tiles = tl.cdiv(len_kv, BLOCK_KV)
        heads, span_tiles, by_heads, spans = divide_queries(
            tl.cdiv(len_q, BLOCK_Q), kv_tiles, Hkv, heads_per_kv, rule
        )
        n_shares = by_heads * spans
        n = kv_tiles * n_shares
        n_shared = tl.where(n_shares > 1, n, 0)
        to, is_there = plan_ptr + b, b <= B
        tl.store(to, slots + tl.cumsum(n, 0) - n, mask=is_there)
        tl.store(to + ROW, shares + tl.cumsum(n_shared, 0) - n_shared, mask=is_there)
        tl.store(to + 2 * ROW, heads, mask=is_there)
        tl.store(to + 3 * ROW, span_tiles, mask=is_there)
        tl.store(to + 4 * ROW, spans, mask=is_there)
        tl.store(to + 5 * ROW, n_shares, mask=is_there)
        slots += tl.sum(n, 0)
        shares += tl.sum(n_shared, 0)
    tl.store(plan_ptr + B + 1, slots)
    tl.store(plan_ptr + ROW + B + 1, shares)


@triton.jit
def _store_statistics(
    pointers, tile, m, delta, log2_l, is_empty, is_nonfinite, unit, BLOCK_Q: tl.constexpr
):
    """Stores what kernels need of the rows of a tile."""
    r, tile64 = tl.arange(0, BLOCK_Q), tile.to(tl.int64)
    if pointers.flags_ptr is None:
        to = pointers.stats_ptr + tile64 * (4 * BLOCK_Q) + r
        tl.store(to, m)
        tl.store(to + BLOCK_Q, delta)
        tl.store(to + 2 * BLOCK_Q, log2_l)
    else:
        lse2 = tl.where(is_nonfinite, NONFINITE, tl.fma(m, unit, log2_l))
        to = pointers.stats_ptr + tile64 * (2 * BLOCK_Q) + r
        tl.store(to, lse2)
        tl.store(to + BLOCK_Q, delta)
        is_large = (tl.abs(lse2) >= LARGE_LSE) & (is_empty == 0) & (is_nonfinite == 0)
        flag = tl.max(is_large.to(tl.int32), 0)
        tl.store(pointers.flags_ptr + tile, flag)
        to = pointers.large_ptr + tile64 * (2 * BLOCK_Q) + r
        # Stored for every tile: a loop over tiles of which some need them reads those of all.
        tl.store(to, m)
        tl.store(to + BLOCK_Q, log2_l)


@triton.jit
def _store_nothing(dq_ptr, row, is_row, nan_or_0, D: tl.constexpr):
    """dQ of a tile that no key tile adds to: 0, or NaN in a bad sequence."""
    for first in tl.static_range(0, D, 64):
        d = first + tl.arange(0, 64)
        to = dq_ptr + row[:, None] * D + d[None, :]
        nothing = tl.zeros(to.shape, tl.float32) + nan_or_0
        tl.store(to, nothing.to(dq_ptr.dtype.element_ty), mask=is_row[:, None] & (d < D)[None, :])


@unspecialized(
    triton.jit, any_address=("bounds_ptr", "plan_ptr", "kv_lens_ptr", "sinks_ptr", "sink_sums_ptr")
)
def prepare_rows(
    pointers: RowPointers, sequences: SequencePointers, sinks: SinkPointers, stride_o: Strides,
    stride_r: Strides, sizes: RowSizes, Hkv, heads_per_kv, rule: ShareRule, left, right, unit,
    unit_rest, ALIGN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MAY_SEE_SINKS_ALONE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`stride_o` are those of dout in units of ALIGN; `stride_r` count rows of out and lse. For
    wide heads, there are neither flags nor counters to set to 0; for medium ones and in constant
    time, no flags. EARLY: the next kernel may start as soon as there is room, to wait for this
    one."""
    if EARLY:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    batch, head, q_tile, start, len_q, len_kv, is_good, is_any_wrong = _place(
        tile, sequences, sizes, BLOCK_Q
    )
    q_idx = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_row = q_idx < len_q
    if sequences.cu_q_ptr is not None:
        # Rows that belong to no sequence are NaN in out, and must not reach any gradient.
        is_row &= batch < sizes.B
        batch = 0
        if tile <= sizes.B:
            _store_bounds(pointers.bounds_ptr, tile, is_any_wrong, sequences, sizes)
    b, h, s = tl.cast(batch, tl.int64), tl.cast(head, tl.int64), (start + q_idx).to(tl.int64)
    row = b * stride_r.b + h * stride_r.h + s * stride_r.s  # [BLOCK_Q]
    dout_row = (b * stride_o.b + h * stride_o.h + s * stride_o.s) * ALIGN
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = is_row[:, None] & (d < DV)
    out = tl.load(pointers.out_ptr + row[:, None] * DV + d, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(pointers.dout_ptr + dout_row[:, None] + d, mask=inside, other=0.0)
    delta = tl.sum(out * dout.to(tl.float32), 1)  # [BLOCK_Q]
    if pointers.dlse_ptr is not None:
        delta -= tl.load(pointers.dlse_ptr + row, mask=is_row, other=0.0)
    m = tl.load(pointers.statistics_ptr + 2 * row, mask=is_row, other=float("inf"))
    log2_l = tl.log2(tl.load(pointers.statistics_ptr + 2 * row + 1, mask=is_row, other=1.0))
    is_empty = m == float("inf")
    # Where dO is not finite, delta is not: that times anything, even 0, is infinite or NaN.
    is_nonfinite = (((m + log2_l + delta) * 0.0) != 0.0) & (is_empty == 0)
    m = tl.where(is_nonfinite, NONFINITE, m)
    delta = tl.where(is_empty | is_nonfinite, 0.0, delta)
    log2_l = tl.where(is_empty | is_nonfinite, 0.0, log2_l)
    if sinks.sink_sums_ptr is not None:
        sink_sum = sum_tile(sinks.sinks_ptr + head, m, log2_l, delta, unit, unit_rest)
        tl.store(sinks.sink_sums_ptr + tile, sink_sum)
    if MAY_SEE_SINKS_ALONE:
        # Then m does not tell whether the row's q is finite: it becomes that of a row that sees
        # nothing.
        diagonal = q_idx + (len_kv - len_q)
        first_key = tl.maximum(diagonal - left, 0)
        is_empty |= first_key > tl.minimum(diagonal + right, len_kv - 1)
        m = tl.where(is_empty, float("inf"), m)
        delta = tl.where(is_empty, 0.0, delta)
        log2_l = tl.where(is_empty, 0.0, log2_l)
        is_nonfinite &= is_empty == 0
    if pointers.dq_ptr is not None:
        n_parts = count_parts(q_tile, len_q, len_kv, left, right, BLOCK_Q, BLOCK_KV)
        if n_parts == 0:
            _store_nothing(pointers.dq_ptr, row, q_idx < len_q, nan_where(not is_good), D)
    _store_statistics(pointers, tile, m, delta, log2_l, is_empty, is_nonfinite, unit, BLOCK_Q)
    if pointers.plan_ptr is not None and tile == 0:
        _make_plan(pointers.plan_ptr, sequences, sizes, Hkv, heads_per_kv, rule, BLOCK_Q, BLOCK_KV)
    if pointers.turn_ptr is not None:
        tl.store(pointers.turn_ptr + tile, 0)
        # Those of cut loops: `cuts.py`.
        tl.store(pointers.turn_ptr + tl.num_programs(0) + tile, 0)
        if tile == 0:
            tl.store(pointers.ticket_ptr, 0)


@triton.jit
def _finish_part(
    part_ptr, is_written, dq_ptr, row, is_row, first_d, scale, nan_or_0, D: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """dQ of 64 rows, and of N columns from `first_d` on."""
    x = tl.zeros([64 * N], tl.float32)
    if is_written:
        x = tl.load(part_ptr + tl.arange(0, 64 * N))
    x = from_registers(x, N)
    d = first_d + tl.arange(0, N)
    # Whatever is not finite is NaN.
    x += x * nan_or_0
    dq = (x * scale).to(dq_ptr.dtype.element_ty)
    inside = is_row[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + row[:, None] * D + d[None, :], dq, mask=inside)


@unspecialized(triton.jit, any_address=("turn_ptr",))
def finish_queries(
    sums_ptr, dq_ptr, turn_ptr, sequences: SequencePointers, stride_r: Strides, sizes: RowSizes,
    left, right, scale, D: tl.constexpr, REST: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dQ = scale · sums; 0 for tiles that see no key, whose sums are not written; NaN for those
    of bad sequences. EARLY: this one starts before the kernel that sums has ended, on SMs that it
    leaves idle, and takes tiles that all key tiles have added to, TURNS times each."""
    pid = tl.program_id(0)
    tile, part = pid // PARTS, pid % PARTS
    batch, head, q_tile, start, len_q, len_kv, is_good, _ = _place(tile, sequences, sizes, BLOCK_Q)
    n_parts = count_parts(q_tile, len_q, len_kv, left, right, BLOCK_Q, BLOCK_KV)
    is_written = n_parts > 0
    if EARLY:
        await_count(turn_ptr + tile, n_parts * TURNS, BY_MANY=True)
    if sequences.cu_q_ptr is not None:
        batch = 0
    first_row = tl.cast(batch, tl.int64) * stride_r.b + tl.cast(head, tl.int64) * stride_r.h
    SIZE: tl.constexpr = 64 * (64 * (PARTS - 1) + REST)
    part_ptr = sums_ptr + tile.to(tl.int64) * SIZE + part * 4096
    q_idx = q_tile * BLOCK_Q + tl.arange(0, 64)
    first_d = 0
    if BLOCK_Q == 64:
        first_d = part * 64
    else:
        q_idx += part * 64
    row = first_row + (start + q_idx).to(tl.int64) * stride_r.s
    is_row = q_idx < len_q
    nan_or_0 = nan_where(not is_good)
    if REST == 64:  # noqa: SIM114, with an `or` the last call would be compiled, too
        _finish_part(part_ptr, is_written, dq_ptr, row, is_row, first_d, scale, nan_or_0, D, 64)
    elif part < PARTS - 1:
        _finish_part(part_ptr, is_written, dq_ptr, row, is_row, first_d, scale, nan_or_0, D, 64)
    else:
        _finish_part(part_ptr, is_written, dq_ptr, row, is_row, first_d, scale, nan_or_0, D, REST)
    if EARLY:  # noqa: SIM102, the interpreter has no `gdc_wait`
        if pid == tl.num_programs(0) - 1:
            # This kernel must not end before the one that sums, which has dk and dv to store.
            gdc_wait()
