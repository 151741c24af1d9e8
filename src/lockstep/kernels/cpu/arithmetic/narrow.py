"""A few query rows against one span of keys: decode. Keys ride in SIMD lanes, then head dims.

With one row per KV head the lanes of the wide path would stay empty. Here scores take WIDTH
keys at a time (turned in registers) and outputs WIDTH head dims at a time. For each row the
chain of operations is the wide path's: over d ascending, over keys ascending. Same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.cpu.arithmetic.block import SPAN, padded, steps, zeros_for
from lockstep.kernels.cpu.arithmetic.memory import widen_rows
from lockstep.kernels.cpu.arithmetic.merge import MINUS_INF, fill
from lockstep.kernels.cpu.arithmetic.narrow_pairs import (
    accumulate_clean_pairs,
    accumulate_pairs_1,
    accumulate_pairs_4,
    add_special_to_row,
    round_row,
    score_pairs_1,
    score_pairs_4,
    score_pairs_8,
)
from lockstep.kernels.cpu.arithmetic.narrow_rows import (
    AHEAD,
    AHEAD_BYTES,
    KEYS,
    S_PITCH,
    accumulate_1,
    accumulate_4,
    accumulate_masked,
    alibi_row,
    exp_and_mark_row,
    exp_row,
    is_finite,
    mask_row,
    max_row,
    score_1,
    score_4,
    score_8,
    sum_row,
)
from lockstep.kernels.cpu.arithmetic.pairs import copy_rows
from lockstep.kernels.cpu.arithmetic.tiles import add_scaled, scale_vectors
from lockstep.kernels.cpu.arithmetic.wide import CHAIN, biased
from lockstep.kernels.cpu.call.record import (
    bias_address,
    diagonal_of,
    fill_kv_rows,
    has_tiles,
    is_constant_time,
    key_range,
    of_sequence,
    row_address,
    slope_of,
    split_row,
    visible,
)
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.matrix import DEPTH, TILE_BYTES
from lockstep.kernels.cpu.compiler.vectors import F32, WIDTH, f32

# Up to this many rows are narrow.
NARROW = 8


class Narrow(NamedTuple):
    """Where the parts of a narrow unit lie in scratch, by address."""

    zero_row: int  # [zeros_for(D, Dv)]
    k_rows: int  # [SPAN + AHEAD] addresses
    v_rows: int  # [SPAN + AHEAD] addresses
    q: int  # [NARROW, D]
    k: int  # [SPAN, D]; for the sums of matrix units as they are stored
    v: int  # [SPAN, Dv]; likewise
    s: int  # [NARROW, SPAN]
    spare: int  # [NARROW, SPAN]
    out: int  # [NARROW, Dv]
    chains: int  # [4, Dv]
    m: int  # [NARROW]
    l: int  # [NARROW]
    end: int


@compiled
def carve_narrow(base, D, Dv):
    """Lay a Narrow out from address ``base``; head dims are padded to whole vectors."""
    k_pitch, v_pitch = 4 * padded(D, WIDTH), 4 * padded(Dv, WIDTH)
    k_rows = base + 4 * zeros_for(D, Dv)
    v_rows = k_rows + 8 * (SPAN + AHEAD)
    q = v_rows + 8 * (SPAN + AHEAD)
    k = q + NARROW * 4 * padded(D, DEPTH)
    v = k + SPAN * k_pitch
    s = v + SPAN * v_pitch
    spare = s + NARROW * S_PITCH
    out = spare + NARROW * S_PITCH
    chains = out + NARROW * v_pitch
    m = chains + 4 * v_pitch
    l = m + 4 * NARROW
    return Narrow(base, k_rows, v_rows, q, k, v, s, spare, out, chains, m, l, l + 4 * NARROW)


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
def _rows_ahead(pitch):
    """How many rows ahead of one others are brought near, given the bytes of a row."""
    return min(AHEAD, AHEAD_BYTES // pitch)


@compiled
def _sum_values(call, table, n, block, n_rows, pitch, masked):
    """block.out [n_rows, Dv] = p [n_rows, n] · v [n, Dv] and block.l [n_rows] = Σ p, without what
    is hidden where ``masked`` is not 0. False if it has to be done again, without that."""
    if has_tiles(call):
        return _sum_pairs(table, n, block, call.Dv, n_rows, pitch, masked)
    ahead, row = table + 8 * _rows_ahead(pitch), 0
    while row < n_rows:
        weights, out = block.s + row * S_PITCH, block.out + row * pitch
        if masked:
            accumulate_masked(table, ahead, n, weights, out, pitch, block.chains)
            row += 1
        elif n_rows == 1:
            accumulate_1(table, ahead, n, weights, out, pitch, block.chains)
            row += 1
        else:
            accumulate_4(table, ahead, n, weights, out, pitch, block.chains)
            row += 4
    for i in range(n_rows):
        scalar.store(sum_row(block.s + i * S_PITCH, n), block.l + 4 * i)
    return masked != 0 or is_constant_time(call) or is_finite(block.out, n_rows * pitch // 4)


@compiled
def _sum_pairs(table, n, block, D, n_rows, pitch, masked):
    """The same with the sums of matrix units."""
    for i in range(n_rows):
        scalar.store(sum_row(block.s + i * S_PITCH, n), block.l + 4 * i)
        round_row(block.s + i * S_PITCH, n)
    ahead, row, plain = table + 8 * _rows_ahead(pitch // 2), 0, True
    while row < n_rows:
        weights, out = block.s + row * S_PITCH, block.out + row * pitch
        if masked:
            accumulate_clean_pairs(table, ahead, n, weights, out, pitch)
            add_special_to_row(table, n, D, weights, out)
            row += 1
        elif n_rows == 1:
            plain = accumulate_pairs_1(table, ahead, n, weights, out, pitch)
            row += 1
        else:
            plain = accumulate_pairs_4(table, ahead, n, weights, out, pitch)
            row += 4
    return masked != 0 or plain


@compiled
def _keys_of_span(call, n):
    """How many keys a row of scores has of n: whole groups, or whole steps of matrix units."""
    return padded(n, DEPTH if has_tiles(call) else KEYS)


@compiled
def _rows_of_span(call, tensor, block, b, h, first, n, D, rows, copy):
    """Fill ``rows`` with addresses: the span's rows as fp32 vectors, in place or widened into
    ``copy``, with zeros up to whole groups of keys, or with some of the next span's. For the sums
    of matrix units they stay as they are, and are copied where D is not a multiple of DEPTH."""
    whole, left = _keys_of_span(call, n), of_sequence(call.kv_len, b) - first
    near = min(SPAN + AHEAD, left)
    fill_kv_rows(call, tensor, b, h, first, near, max(near, whole), block.zero_row, rows)
    if has_tiles(call):
        if D % DEPTH != 0:
            pitch = TILE_BYTES * steps(D)
            copy_rows(rows, whole, D, copy, steps(D))
            for i in range(whole):
                scalar.store_word(copy + i * pitch, rows + 8 * i)
    elif call.kind != F32 or D % WIDTH != 0:
        pitch = 4 * padded(D, WIDTH)
        ahead = rows + 8 * _rows_ahead(pitch)
        widen_rows(call.kind, rows, ahead, whole, D, copy, pitch)
        for i in range(whole):
            scalar.store_word(copy + i * pitch, rows + 8 * i)


@compiled
def _scored_together(n_rows):
    """How many rows are scored together: those behind ``n_rows`` are zeros."""
    return 1 if n_rows == 1 else 4 if n_rows <= 4 else 8


@compiled
def _dims_of_queries(call):
    """Head dims of a query, zeros included."""
    return padded(call.D, DEPTH if has_tiles(call) else WIDTH)


@compiled
def load_narrow(call, block, unit):
    """Widen the unit's queries; once per item."""
    fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
    for i in range(unit.n_rows):
        g, q_idx = split_row(call, unit.b, unit.first_row + i)
        first = of_sequence(call.q_first, unit.b)
        row = row_address(call.q, first, unit.b, unit.h * call.G + g, q_idx)
        scalar.store_word(row, block.k_rows + 8 * i)
    D, n = _dims_of_queries(call), unit.n_rows
    fill(block.q, n * D, f32(0.0))
    widen_rows(call.kind, block.k_rows, block.k_rows, n, call.D, block.q, 4 * D)
    scale_vectors(block.q, n * D, f32(call.q_factor))
    fill(block.q + 4 * n * D, (_scored_together(n) - n) * D, f32(0.0))


@compiled
def _multiply(call, block, n_rows, n):
    """block.s [n_rows, SPAN] = c · q · kᵀ of n keys, by chains of CHAIN head dims."""
    D, together = _dims_of_queries(call), _scored_together(n_rows)
    c, s, table = f32(call.score_factor), block.s, block.k_rows
    ahead = table + 8 * _rows_ahead(4 * D)
    for d in range(0, D, CHAIN):
        last = d + CHAIN >= D
        to, by = (s, c if last else f32(1.0)) if d == 0 else (block.spare, f32(1.0))
        q, dims = block.q + 4 * d, min(CHAIN, D - d)
        if together == 1:
            score_1(table, ahead, 4 * d, n, q, 4 * D, dims, to, by)
        elif together == 4:
            score_4(table, ahead, 4 * d, n, q, 4 * D, dims, to, by)
        else:
            score_8(table, ahead, 4 * d, n, q, 4 * D, dims, to, by)
        if d > 0:
            add_scaled(s, block.spare, n_rows * SPAN, c if last else f32(1.0))


@compiled
def _multiply_pairs(call, block, n_rows, n):
    """The same with the sums of matrix units."""
    D, together = _dims_of_queries(call), _scored_together(n_rows)
    c, s, table = f32(call.score_factor), block.s, block.k_rows
    ahead = table + 8 * _rows_ahead(2 * D)
    if together == 1:
        score_pairs_1(table, ahead, n, block.q, 4 * D, steps(call.D), s, c)
    elif together == 4:
        score_pairs_4(table, ahead, n, block.q, 4 * D, steps(call.D), s, c)
    else:
        score_pairs_8(table, ahead, n, block.q, 4 * D, steps(call.D), s, c)


@compiled
def _score_span(call, block, unit, first, n):
    """Finished scores of all rows into block.s [n_rows, SPAN].

    In a constant-time build, 1 if some key may be hidden from a row.
    """
    if has_tiles(call):
        n = _keys_of_span(call, n)
        _multiply_pairs(call, block, unit.n_rows, n)
    else:
        _multiply(call, block, unit.n_rows, _keys_of_span(call, n))
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
def _softmax_rows(block, n_rows, n, masked):
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
    pitch, keys = 4 * padded(call.Dv, WIDTH), n
    if has_tiles(call):
        keys = _keys_of_span(call, n)
    _rows_of_span(call, call.k, block, b, h, first, n, call.D, block.k_rows, block.k)
    masked = _score_span(call, block, unit, first, n)
    _rows_of_span(call, call.v, block, b, h, first, n, call.Dv, block.v_rows, block.v)
    while True:
        _softmax_rows(block, n_rows, padded(keys, WIDTH), masked)
        if _sum_values(call, block.v_rows, keys, block, n_rows, pitch, masked):
            break
        # Again, without what a row does not see: its weights are 0, which does not hide a NaN.
        _score_span(call, block, unit, first, n)
        masked = 1
    for i in range(n_rows):
        part = unit.workspace + i * unit.n_spans + span - unit.first_span
        scalar.store(scalar.load(block.m + 4 * i), statistics + 8 * part)
        scalar.store(scalar.load(block.l + 4 * i), statistics + 8 * part + 4)
        for d in range(call.Dv):
            value = scalar.load(block.out + i * pitch + 4 * d)
            scalar.store(value, parts + 4 * (part * call.Dv + d))
