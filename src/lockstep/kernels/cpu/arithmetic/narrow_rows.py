"""SIMD code for single rows of a narrow unit: scores, masks, exponentials, weighted sums.

A row of scores is S_PITCH bytes. Scores take WIDTH keys at a time, sums WIDTH head dims.
"""

from __future__ import annotations

from llvmlite import ir

from lockstep.kernels.cpu.arithmetic.tiles import INTEGERS, PIECE, VECTOR, bunches, is_marked
from lockstep.kernels.cpu.arithmetic.tiles import MINUS_INF as MINUS_INFINITY
from lockstep.kernels.cpu.arithmetic.wide import SPAN
from lockstep.kernels.cpu.compiler.simd import LLVM_F32, LLVM_I32, WIDTH, Emit, emitter, f32, i64

S_PITCH = 4 * SPAN
# Keys are prefetched this many groups of WIDTH ahead.
AHEAD = 2


def _extend_chains(e: Emit, columns, query, q_pitch, scores, rows: int) -> None:
    """Add WIDTH head dims to the scores of ``rows`` rows, interleaved to hide latency."""
    lines = [e.offset(scores, e.integer(r), S_PITCH) for r in range(rows)]
    queries = [e.offset(query, e.integer(r), q_pitch) for r in range(rows)]
    totals = [e.load(line) for line in lines]
    for i, column in enumerate(columns):
        for r in range(rows):
            factor = e.splat(e.load(queries[r], 4 * i, LLVM_F32))
            totals[r] = e.fma(column, factor, totals[r])
    for line, total in zip(lines, totals, strict=True):
        e.store(total, line)


@emitter(i64, i64, i64, i64, i64, i64, i64, i64, f32)
def score_rows(e: Emit, k, k_pitch, n, q, q_pitch, D, n_rows, s, c):
    """s [n_rows, SPAN] = c · q [n_rows, D] · k [n, D]ᵀ; n and D multiples of WIDTH."""
    blocks = e.ir.sdiv(D, e.integer(WIDTH))
    fours = e.ir.sdiv(n_rows, e.integer(4))
    done = e.ir.mul(fours, e.integer(4))
    fours_then_ones = ((fours, e.integer(0), 4), (e.ir.sub(n_rows, done), done, 1))
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as group:
        keys = e.offset(k, group, e.ir.mul(k_pitch, e.integer(WIDTH)))
        scores = e.offset(s, group, VECTOR)
        with e.loop(n_rows) as row:
            e.store(e.constant(0.0), e.offset(scores, row, S_PITCH))
        with e.loop(blocks) as block:
            at = e.offset(keys, block, VECTOR)
            # Columns of a group lie a row apart, which no hardware prefetcher follows.
            ahead = e.ir.mul(k_pitch, e.integer(AHEAD * WIDTH))
            for i in range(WIDTH):
                e.prefetch(e.ir.add(e.offset(at, e.integer(i), k_pitch), ahead))
            lines = [e.load(e.offset(at, e.integer(i), k_pitch)) for i in range(WIDTH)]
            turned = e.transpose(lines)
            for count, first, step in fours_then_ones:
                with e.loop(count) as i:
                    row = e.ir.add(first, e.ir.mul(i, e.integer(step)))
                    query = e.offset(e.offset(q, row, q_pitch), block, VECTOR)
                    _extend_chains(e, turned, query, q_pitch, e.offset(scores, row, S_PITCH), step)
        with e.loop(n_rows) as row:
            out = e.offset(scores, row, S_PITCH)
            e.store(e.ir.fmul(e.load(out), e.splat(c)), out)


@emitter(i64, i64, returns=f32)
def max_row(e: Emit, s, n):
    """The largest of s [n], n a multiple of WIDTH; a NaN is passed over."""
    largest = e.variable(e.constant(MINUS_INFINITY))
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        largest.set(e.maximum(e.load(e.offset(s, i, VECTOR)), largest.get()))
    lanes = largest.get()
    result = e.lane(lanes, 0)
    for i in range(1, WIDTH):
        result = e.maximum(e.lane(lanes, i), result)
    return result


def _exp(mark: bool):
    @emitter(i64, i64, f32)
    def exponentials(e: Emit, s, n, base):
        largest = e.splat(base)
        with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
            at = e.offset(s, i, VECTOR)
            score = e.load(at)
            p = e.exp(e.ir.fsub(score, largest))
            if mark:
                masked = e.ir.fcmp_ordered("==", score, e.constant(MINUS_INFINITY))
                p = e.select(masked, e.constant(-0.0), p)
            e.store(p, at)

    return exponentials


# s = e^(s − base) in place; s [n], n a multiple of WIDTH. The second makes −0 of −inf.
exp_row, exp_and_mark_row = _exp(mark=False), _exp(mark=True)


@emitter(i64, i64, i64, i64, i64)
def mask_row(e: Emit, s, first, n, lo, hi):
    """s = −inf where key first + i lies outside [lo, hi); s [n], n a multiple of WIDTH."""
    low, high, start = (e.splat(e.ir.trunc(x, LLVM_I32)) for x in (lo, hi, first))
    lanes = ir.Constant(INTEGERS, list(range(WIDTH)))
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(s, i, VECTOR)
        step = e.splat(e.ir.trunc(e.ir.mul(i, e.integer(WIDTH)), LLVM_I32))
        kv = e.ir.add(e.ir.add(start, step), lanes)
        after = e.ir.icmp_signed(">=", kv, low)
        seen = e.ir.and_(after, e.ir.icmp_signed("<", kv, high))
        e.store_selected(seen, e.constant(MINUS_INFINITY), at)


@emitter(i64, i64, i64, i64, f32)
def alibi_row(e: Emit, s, first, n, diagonal, slope):
    """s −= slope · |diagonal − key| for keys first + i; s [n], n a multiple of WIDTH."""
    start, middle = (e.splat(e.ir.trunc(x, LLVM_I32)) for x in (first, diagonal))
    factor = e.splat(e.ir.fneg(slope))
    lanes = ir.Constant(INTEGERS, list(range(WIDTH)))
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(s, i, VECTOR)
        step = e.splat(e.ir.trunc(e.ir.mul(i, e.integer(WIDTH)), LLVM_I32))
        distance = e.distance(middle, e.ir.add(e.ir.add(start, step), lanes))
        e.store(e.fma(factor, distance, e.load(at)), at)


def _accumulate(rows: int, vectors: int, masked: bool = False):
    @emitter(i64, i64, i64, i64, i64, i64, i64)
    def accumulate(e: Emit, v, v_pitch, n, p, out, out_pitch, l):
        zero = e.constant(0.0)
        sums = [e.variable(e.constant(0.0, 1)) for _ in range(rows)]
        lines = [e.offset(out, e.integer(r), out_pitch) for r in range(rows)]
        places = [(r, j) for r in range(rows) for j in range(vectors)]
        for r, j in places:
            e.store(zero, lines[r], VECTOR * j)
        with bunches(e, n, PIECE) as (_, first, count):
            values, weights = e.offset(v, first, v_pitch), e.offset(p, first, 4)
            acc = [[e.variable(zero) for _ in range(vectors)] for _ in range(rows)]
            found = add_piece(e, acc, values, v_pitch, count, weights)
            for total, x in zip(sums, found, strict=True):
                total.set(e.ir.fadd(total.get(), x))
            for r, j in places:
                before = e.load(lines[r], VECTOR * j)
                e.store(e.ir.fadd(before, acc[r][j].get()), lines[r], VECTOR * j)
        for r in range(rows):
            e.store(sums[r].get(), l, 4 * r)

    def add_piece(e: Emit, acc, v, v_pitch, n, p):
        """One chain of each sum in ``acc``; returns the sums of the weights."""
        totals = [e.variable(e.constant(0.0, 1)) for _ in range(rows)]
        with bunches(e, n) as (_, first, count):
            sums = [e.variable(e.constant(0.0, 1)) for _ in range(rows)]
            with e.loop(count) as i:
                kv = e.ir.add(first, i)
                value, weights = e.offset(v, kv, v_pitch), e.offset(p, kv, 4)
                columns = [e.load(value, VECTOR * j) for j in range(vectors)]
                for r in range(rows):
                    scalar_weight = e.load(weights, S_PITCH * r, LLVM_F32)
                    # A chain of its own: its latency hides behind the products.
                    sums[r].set(e.ir.fadd(sums[r].get(), scalar_weight))
                    weight = e.splat(scalar_weight)
                    if masked:
                        bits = e.load(weights, S_PITCH * r, LLVM_I32)
                        hidden = is_marked(e, e.splat(bits))
                    for j, column in enumerate(columns):
                        before = acc[r][j].get()
                        total = e.fma(column, weight, before)
                        acc[r][j].set(e.select(hidden, before, total) if masked else total)
            for r in range(rows):
                totals[r].set(e.ir.fadd(totals[r].get(), sums[r].get()))
        return [total.get() for total in totals]

    return accumulate


# out [rows, vectors] = p [rows, n] · v [n, vectors], and l [rows] = Σ p.
accumulate_1x1, accumulate_1x4 = _accumulate(1, 1), _accumulate(1, 4)
accumulate_4x1, accumulate_4x4 = _accumulate(4, 1), _accumulate(4, 4)
# The same without the terms that −0 hides in p; −0 adds nothing to l.
masked_1x1, masked_1x4 = _accumulate(1, 1, masked=True), _accumulate(1, 4, masked=True)
