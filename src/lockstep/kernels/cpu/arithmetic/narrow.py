"""A few query rows against one span of keys: decode. Keys ride in SIMD lanes, then head dims.

With one row per KV head the lanes of the wide path would stay empty. Here scores take WIDTH
keys at a time (turned in registers) and outputs WIDTH head dims at a time. For each row the
chain of operations is the wide path's: over d ascending, over keys ascending. Same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.cpu.arithmetic.memory import copy_rows
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.arithmetic.narrow_rows import (
    S_PITCH,
    accumulate_1x1,
    accumulate_1x4,
    accumulate_4x1,
    accumulate_4x4,
    alibi_row,
    exp_and_mark_row,
    exp_row,
    mask_row,
    masked_1x1,
    masked_1x4,
    max_row,
    score_rows,
)
from lockstep.kernels.cpu.arithmetic.tiles import VECTOR, add_scaled, scale_vectors
from lockstep.kernels.cpu.arithmetic.wide import CHAIN, MINUS_INF, SPAN, biased, padded, zeros_for
from lockstep.kernels.cpu.call.record import (
    bias_address,
    diagonal_of,
    fill_kv_rows,
    is_constant_time,
    key_range,
    of_sequence,
    row_address,
    slope_of,
    split_row,
    visible,
)
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled, inlined
from lockstep.kernels.cpu.compiler.simd import F32, WIDTH, f32

# Up to this many rows are narrow.
NARROW = 8


class Narrow(NamedTuple):
    """Where the parts of a narrow unit lie in scratch, by address."""

    zero_row: int  # [zeros_for(D, Dv)]
    rows: int  # [SPAN] addresses
    q: int  # [NARROW, D]
    k: int  # [SPAN, D]
    v: int  # [SPAN, Dv]
    s: int  # [NARROW, SPAN]
    spare: int  # [NARROW, SPAN]
    out: int  # [NARROW, Dv]
    m: int  # [NARROW]
    l: int  # [NARROW]
    end: int


@compiled
def carve_narrow(base, D, Dv):
    """Lay a Narrow out from address ``base``; head dims are padded to whole vectors."""
    k_pitch, v_pitch = 4 * padded(D, WIDTH), 4 * padded(Dv, WIDTH)
    rows = base + 4 * zeros_for(D, Dv)
    q = rows + 8 * SPAN
    k = q + NARROW * k_pitch
    v = k + SPAN * k_pitch
    s = v + SPAN * v_pitch
    spare = s + NARROW * S_PITCH
    out = spare + NARROW * S_PITCH
    m = out + NARROW * v_pitch
    return Narrow(base, rows, q, k, v, s, spare, out, m, m + 4 * NARROW, m + 8 * NARROW)


@compiled
def _finish_scores(call, b, head, q_idx, first, n, s):
    """Softcap, bias, slopes and mask for one row of scores; −inf up to a whole vector."""
    lo, hi = visible(call, b, q_idx)
    end = padded(n, WIDTH)
    bias = bias_address(call, b, head, q_idx, first)
    changed = call.capped != 0 or call.bias.address != 0
    is_seen = lo <= first and first + end <= hi
    if call.alibi_slopes == 0 and not changed and is_seen:
        return
    for kv in range(0 if is_seen and not changed else end):
        at = s + 4 * kv
        if first + kv < lo or first + kv >= hi:
            scalar.store(MINUS_INF, at)
        elif changed:
            score = scalar.load(at)
            if call.capped != 0:
                score = scalar.tanh(score) * f32(call.softcap)
            if call.bias.address != 0:
                value = scalar.load_element(call.bias_kind, bias + kv * call.bias_col)
                score = biased(score, value)
            scalar.store(score, at)
    if call.alibi_slopes != 0:
        alibi_row(s, first, end, diagonal_of(call, b, q_idx), slope_of(call, b, head))
        if not is_seen:
            mask_row(s, first, end, lo, hi)


@compiled
def _finish_scores_obliviously(call, b, head, q_idx, first, n, s):
    """The same for any bias and length; returns 1 if some key may be hidden from the row."""
    end = padded(n, WIDTH)
    lo, hi = key_range(call, b, q_idx)
    is_seen = call.secret_lengths == 0 and lo <= first and first + end <= hi
    bias = bias_address(call, b, head, q_idx, first)
    has_bias = call.bias.address != 0
    for kv in range(n if call.capped != 0 or has_bias else 0):
        score = scalar.load(s + 4 * kv)
        if call.capped != 0:
            score = scalar.tanh(score) * f32(call.softcap)
        if has_bias:
            score = biased(score, scalar.load_element(call.bias_kind, bias + kv * call.bias_col))
        scalar.store(score, s + 4 * kv)
    if call.alibi_slopes != 0:
        alibi_row(s, first, end, diagonal_of(call, b, q_idx), slope_of(call, b, head))
    if not is_seen:
        lo, hi = visible(call, b, q_idx)
        mask_row(s, first, end, lo, hi)
    return 0 if is_seen and not has_bias else 1


@compiled
def _accumulate_obliviously(v, v_pitch, n, p, n_rows, out, out_pitch, l):
    """`_accumulate_rows` without what is hidden, row by row."""
    for row in range(n_rows):
        weights, to, sums = p + row * S_PITCH, out + row * out_pitch, l + 4 * row
        at = 0
        while at < out_pitch:
            wide = out_pitch - at >= 4 * VECTOR
            if wide:
                masked_1x4(v + at, v_pitch, n, weights, to + at, out_pitch, sums)
            else:
                masked_1x1(v + at, v_pitch, n, weights, to + at, out_pitch, sums)
            at += 4 * VECTOR if wide else VECTOR


@inlined
def _accumulate_rows(v, v_pitch, n, p, n_rows, out, out_pitch, l):
    """out [n_rows, Dv] = p [n_rows, n] · v [n, Dv], l [n_rows] = Σ p; rows by fours if possible."""
    row = 0
    while row < n_rows:
        fours = n_rows - row >= 4
        weights, to, sums = p + row * S_PITCH, out + row * out_pitch, l + 4 * row
        at = 0
        while at < out_pitch:
            wide = out_pitch - at >= 4 * VECTOR
            if fours and wide:
                accumulate_4x4(v + at, v_pitch, n, weights, to + at, out_pitch, sums)
            elif fours:
                accumulate_4x1(v + at, v_pitch, n, weights, to + at, out_pitch, sums)
            elif wide:
                accumulate_1x4(v + at, v_pitch, n, weights, to + at, out_pitch, sums)
            else:
                accumulate_1x1(v + at, v_pitch, n, weights, to + at, out_pitch, sums)
            at += 4 * VECTOR if wide else VECTOR
        row += 4 if fours else 1


@compiled
def _is_finite(address, n):
    """x·0 is 0 for finite x and NaN otherwise."""
    witness = f32(0.0)
    for i in range(n):
        witness = scalar.fma(scalar.load(address + 4 * i), f32(0.0), witness)
    return witness == f32(0.0)


@compiled
def _rows_of_span(call, tensor, block, b, h, first, n, D, copy):
    """(address, pitch) of the span's rows as fp32 vectors: in place, or widened into ``copy``."""
    whole = padded(n, WIDTH)
    if call.kind == F32 and D % WIDTH == 0 and call.page_size == 0 and whole == n:
        return row_address(tensor, of_sequence(call.kv_first, b), b, h, first), tensor.row
    fill_kv_rows(call, tensor, b, h, first, n, whole, block.zero_row, block.rows)
    pitch = 4 * padded(D, WIDTH)
    copy_rows(call.kind, block.rows, whole, D, copy, pitch)
    return copy, pitch


@compiled
def load_narrow(call, block, unit):
    """Widen the unit's queries; once per item."""
    fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
    for i in range(unit.n_rows):
        g, q_idx = split_row(call, unit.b, unit.first_row + i)
        first = of_sequence(call.q_first, unit.b)
        row = row_address(call.q, first, unit.b, unit.h * call.G + g, q_idx)
        scalar.store_word(row, block.rows + 8 * i)
    D = padded(call.D, WIDTH)
    copy_rows(call.kind, block.rows, unit.n_rows, call.D, block.q, 4 * D)
    scale_vectors(block.q, unit.n_rows * D, f32(call.q_factor))


@compiled
def _score_span(call, block, unit, k, k_pitch, first, n):
    """Finished scores of all rows into block.s [n_rows, SPAN].

    In a constant-time build, 1 if some key may be hidden from a row.
    """
    q_pitch, whole = 4 * padded(call.D, WIDTH), padded(n, WIDTH)
    D, c, s = padded(call.D, WIDTH), f32(call.score_factor), block.s
    for d in range(0, D, CHAIN):
        last = d + CHAIN >= D
        to, by = (s, c if last else f32(1.0)) if d == 0 else (block.spare, f32(1.0))
        dims, at = min(CHAIN, D - d), 4 * d
        score_rows(k + at, k_pitch, whole, block.q + at, q_pitch, dims, unit.n_rows, to, by)
        if d > 0:
            add_scaled(s, block.spare, unit.n_rows * SPAN, c if last else f32(1.0))
    masked = 0
    for i in range(unit.n_rows):
        g, q_idx = split_row(call, unit.b, unit.first_row + i)
        s, head = block.s + i * S_PITCH, unit.h * call.G + g
        if is_constant_time(call):
            masked |= _finish_scores_obliviously(call, unit.b, head, q_idx, first, n, s)
        else:
            _finish_scores(call, unit.b, head, q_idx, first, n, s)
    return masked


@compiled
def _weigh_rows(block, n_rows, n, masked):
    """The maximum of each row of scores, and its weights in their place; −0 marks what is hidden
    where ``masked`` is not 0."""
    for i in range(n_rows):
        s = block.s + i * S_PITCH
        m = max_row(s, n)
        scalar.store(m, block.m + 4 * i)
        base = scalar.pick(m, MINUS_INF, f32(0.0), m)
        if masked:
            exp_and_mark_row(s, n, base)
        else:
            exp_row(s, n, base)


@compiled
def attend_narrow(call, block, unit, span, parts, statistics):
    """All rows of a narrow unit against one span; each row's part goes to the workspace."""
    b, h, n_rows = unit.b, unit.h, unit.n_rows
    first = span * SPAN
    n = min(SPAN, of_sequence(call.kv_len, b) - first)
    pitch = 4 * padded(call.Dv, WIDTH)
    k, k_pitch = _rows_of_span(call, call.k, block, b, h, first, n, call.D, block.k)
    masked = _score_span(call, block, unit, k, k_pitch, first, n)
    v, v_pitch = _rows_of_span(call, call.v, block, b, h, first, n, call.Dv, block.v)
    while True:
        _weigh_rows(block, n_rows, padded(n, WIDTH), masked)
        if masked:
            _accumulate_obliviously(v, v_pitch, n, block.s, n_rows, block.out, pitch, block.l)
            break
        _accumulate_rows(v, v_pitch, n, block.s, n_rows, block.out, pitch, block.l)
        if is_constant_time(call) or _is_finite(block.out, n_rows * pitch // 4):
            break
        # Again, without what a row does not see: its weights are 0, which does not hide a NaN.
        _score_span(call, block, unit, k, k_pitch, first, n)
        masked = 1
    for i in range(n_rows):
        part = unit.workspace + i * unit.n_spans + span - unit.first_span
        scalar.store(scalar.load(block.m + 4 * i), statistics + 8 * part)
        scalar.store(scalar.load(block.l + 4 * i), statistics + 8 * part + 4)
        for d in range(call.Dv):
            value = scalar.load(block.out + i * pitch + 4 * d)
            scalar.store(value, parts + 4 * (part * call.Dv + d))
