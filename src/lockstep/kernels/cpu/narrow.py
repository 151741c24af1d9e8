"""A few query rows against one span of keys: decode. Keys ride in SIMD lanes, then head dims.

With one row per KV head the lanes of the wide path would stay empty. Here scores take WIDTH
keys at a time (turned in registers) and outputs WIDTH head dims at a time. For each row the
chain of operations is the wide path's: over d ascending, over keys ascending. Same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.cpu import scalar
from lockstep.kernels.cpu.call import (
    fill_kv_rows,
    of_sequence,
    row_address,
    split_row,
    visible,
)
from lockstep.kernels.cpu.compile import compiled
from lockstep.kernels.cpu.memory import copy_rows
from lockstep.kernels.cpu.merge import fill
from lockstep.kernels.cpu.simd import (
    LLVM_F32,
    LN2,
    LOG2E,
    WIDTH,
    Emit,
    emitter,
    f32,
    i64,
)
from lockstep.kernels.cpu.tiles import MINUS_INF as MINUS_INFINITY
from lockstep.kernels.cpu.tiles import VECTOR
from lockstep.kernels.cpu.wide import MAX_HEAD_DIM, MINUS_INF, SPAN, padded

# Up to this many rows are narrow.
NARROW = 8
S_PITCH = 4 * SPAN


@emitter(i64, i64, i64, i64, i64, i64, f32)
def _score_rows(e: Emit, k, n, pitch, q, n_rows, s, c):
    """s [n_rows, SPAN] = c · q [n_rows, pitch] · k [n, pitch]ᵀ, zeros padding both to vectors."""
    blocks = e.ir.sdiv(pitch, e.integer(VECTOR))
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as group:
        keys = e.offset(k, group, e.ir.mul(pitch, e.integer(WIDTH)))
        scores = e.offset(s, group, VECTOR)
        with e.loop(n_rows) as row:
            e.store(e.constant(0.0), e.offset(scores, row, S_PITCH))
        with e.loop(blocks) as block:
            at = e.offset(keys, block, VECTOR)
            lines = [e.load(e.offset(at, e.integer(i), pitch)) for i in range(WIDTH)]
            turned = e.transpose(lines)
            with e.loop(n_rows) as row:
                query = e.offset(e.offset(q, row, pitch), block, VECTOR)
                out = e.offset(scores, row, S_PITCH)
                total = e.load(out)
                for i, column in enumerate(turned):
                    total = e.fma(column, e.splat(e.load(query, 4 * i, LLVM_F32)), total)
                e.store(total, out)
        with e.loop(n_rows) as row:
            out = e.offset(scores, row, S_PITCH)
            e.store(e.ir.fmul(e.load(out), e.splat(c)), out)


@emitter(i64, i64, returns=f32)
def _max_row(e: Emit, s, n):
    """The largest of s [n], n a multiple of WIDTH; a NaN is passed over."""
    largest = e.variable(e.constant(MINUS_INFINITY))
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        largest.set(e.maximum(e.load(e.offset(s, i, VECTOR)), largest.get()))
    lanes = largest.get()
    result = e.lane(lanes, 0)
    for i in range(1, WIDTH):
        result = e.maximum(e.lane(lanes, i), result)
    return result


@emitter(i64, i64, f32)
def _exp2_row(e: Emit, s, n, base):
    """s = 2^(s − base) in place; s [n], n a multiple of WIDTH."""
    largest = e.splat(base)
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(s, i, VECTOR)
        e.store(e.exp2(e.ir.fsub(e.load(at), largest)), at)


def _accumulate(rows: int, vectors: int):
    @emitter(i64, i64, i64, i64, i64)
    def accumulate(e: Emit, v, n, pitch, p, out):
        lines = [e.offset(out, e.integer(r), pitch) for r in range(rows)]
        acc = [[e.variable(e.constant(0.0)) for _ in range(vectors)] for _ in range(rows)]
        with e.loop(n) as kv:
            value = e.offset(v, kv, pitch)
            columns = [e.load(value, VECTOR * j) for j in range(vectors)]
            weights = e.offset(p, kv, 4)
            for r in range(rows):
                weight = e.splat(e.load(weights, S_PITCH * r, LLVM_F32))
                for j, column in enumerate(columns):
                    acc[r][j].set(e.fma(column, weight, acc[r][j].get()))
        for r in range(rows):
            for j in range(vectors):
                e.store(acc[r][j].get(), lines[r], VECTOR * j)

    return accumulate


# out [rows, vectors] = p [rows, n] · v [n, vectors]; out and v share a pitch.
_accumulate_1x1, _accumulate_1x4 = _accumulate(1, 1), _accumulate(1, 4)
_accumulate_4x1, _accumulate_4x4 = _accumulate(4, 1), _accumulate(4, 4)


class Narrow(NamedTuple):
    """Where the parts of a narrow unit lie in scratch, by address."""

    zero_row: int  # [MAX_HEAD_DIM]
    rows: int  # [SPAN] addresses
    q: int  # [NARROW, D]
    k: int  # [SPAN, D]
    v: int  # [SPAN, Dv]
    s: int  # [NARROW, SPAN]
    out: int  # [NARROW, Dv]
    end: int


@compiled
def carve_narrow(base, D, Dv):
    """Lay a Narrow out from address ``base``; head dims are padded to whole vectors."""
    k_pitch, v_pitch = 4 * padded(D, WIDTH), 4 * padded(Dv, WIDTH)
    rows = base + 4 * MAX_HEAD_DIM
    q = rows + 8 * SPAN
    k = q + NARROW * k_pitch
    v = k + SPAN * k_pitch
    s = v + SPAN * v_pitch
    out = s + NARROW * S_PITCH
    return Narrow(base, rows, q, k, v, s, out, out + NARROW * v_pitch)


@compiled
def _finish_scores(call, b, head, q_idx, first, n, s):
    """Softcap, bias and mask for one row of scores; −inf up to a whole vector."""
    lo, hi = visible(call, b, q_idx)
    bias = row_address(call.bias, 0, b, head, q_idx) + first * call.bias_col
    for kv in range(padded(n, WIDTH)):
        at = s + 4 * kv
        if first + kv < lo or first + kv >= hi:
            scalar.store(MINUS_INF, at)
        elif call.softcap > 0.0 or call.bias.address != 0:
            score = scalar.load(at)
            if call.softcap > 0.0:
                score = scalar.tanh(score) * f32(call.softcap * LOG2E)
            if call.bias.address != 0:
                value = scalar.load_element(call.bias_kind, bias + kv * call.bias_col)
                score += value * f32(LOG2E)
            scalar.store(score, at)


@compiled
def _accumulate_rows(v, n, pitch, p, n_rows, out):
    """out [n_rows, pitch] = p [n_rows, n] · v [n, pitch], by fours where possible."""
    row = 0
    while row < n_rows:
        fours = n_rows - row >= 4
        weights, to = p + row * S_PITCH, out + row * pitch
        at = 0
        while at < pitch:
            wide = pitch - at >= 4 * VECTOR
            if fours and wide:
                _accumulate_4x4(v + at, n, pitch, weights, to + at)
            elif fours:
                _accumulate_4x1(v + at, n, pitch, weights, to + at)
            elif wide:
                _accumulate_1x4(v + at, n, pitch, weights, to + at)
            else:
                _accumulate_1x1(v + at, n, pitch, weights, to + at)
            at += 4 * VECTOR if wide else VECTOR
        row += 4 if fours else 1


@compiled
def _accumulate_carefully(block, n, pitch, base, s, out):
    """One row when values are not finite: weigh and add only what the row sees."""
    for at in range(0, pitch, 4):
        acc = f32(0.0)
        for kv in range(n):
            score = scalar.load(s + 4 * kv)
            if score != MINUS_INF:
                value = scalar.load(block.v + kv * pitch + at)
                acc = scalar.fma(value, scalar.exp2(score - base), acc)
        scalar.store(acc, out + at)


@compiled
def attend_narrow(call, block, unit, span, parts, lses):
    """All rows of a narrow unit against one span; (out, lse) of each row to the workspace."""
    b, h, n_rows = unit.b, unit.h, unit.n_rows
    first = span * SPAN
    n = min(SPAN, of_sequence(call.kv_len, b) - first)
    whole = padded(n, WIDTH)
    k_pitch, v_pitch = 4 * padded(call.D, WIDTH), 4 * padded(call.Dv, WIDTH)
    fill(block.zero_row, MAX_HEAD_DIM, f32(0.0))
    for i in range(n_rows):
        g, q_idx = split_row(call, b, unit.first_row + i)
        row = row_address(call.q, of_sequence(call.q_first, b), b, h * call.G + g, q_idx)
        scalar.store_word(row, block.rows + 8 * i)
    copy_rows(call.kind, block.rows, n_rows, call.D, block.q, k_pitch)
    fill_kv_rows(call, call.k, b, h, first, n, whole, block.zero_row, block.rows)
    copy_rows(call.kind, block.rows, whole, call.D, block.k, k_pitch)
    factor = call.scale / call.softcap if call.softcap > 0.0 else call.scale * LOG2E
    _score_rows(block.k, whole, k_pitch, block.q, n_rows, block.s, f32(factor))
    fill_kv_rows(call, call.v, b, h, first, n, whole, block.zero_row, block.rows)
    finite = copy_rows(call.kind, block.rows, n, call.Dv, block.v, v_pitch)
    for i in range(n_rows):
        g, q_idx = split_row(call, b, unit.first_row + i)
        s = block.s + i * S_PITCH
        _finish_scores(call, b, h * call.G + g, q_idx, first, n, s)
        m = _max_row(s, whole)
        base = f32(0.0) if m == MINUS_INF else m
        if not finite:
            _accumulate_carefully(block, n, v_pitch, base, s, block.out + i * v_pitch)
        _exp2_row(s, whole, base)
        l = f32(0.0)
        for kv in range(n):
            l += scalar.load(s + 4 * kv)
        part = unit.workspace + i * unit.n_spans + span - unit.first_span
        lse = (m + scalar.log2(l)) * f32(LN2) if l != f32(0.0) else MINUS_INF
        scalar.store(lse, lses + 4 * part)
        # Kept in place of the row's first scratch word until its output is ready.
        scalar.store(f32(1.0) / l if l != f32(0.0) else f32(0.0), block.q + 4 * i)
    if finite:
        _accumulate_rows(block.v, n, v_pitch, block.s, n_rows, block.out)
    for i in range(n_rows):
        part = unit.workspace + i * unit.n_spans + span - unit.first_span
        inverse = scalar.load(block.q + 4 * i)
        for d in range(call.Dv):
            value = scalar.load(block.out + i * v_pitch + 4 * d) * inverse
            scalar.store(value, parts + 4 * (part * call.Dv + d))
