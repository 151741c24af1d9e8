"""SIMD code for single rows of a narrow unit: scores, masks, exponentials, weighted sums.

A row of scores is S_PITCH bytes. Scores take WIDTH keys at a time, sums WIDTH head dims.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from lockstep.kernels.cpu.arithmetic.block import SPAN
from lockstep.kernels.cpu.arithmetic.tiles import INTEGERS, PIECE, VECTOR, bunches, is_marked
from lockstep.kernels.cpu.arithmetic.tiles import MINUS_INF as MINUS_INFINITY
from lockstep.kernels.cpu.compiler.simd import Emit, emitter
from lockstep.kernels.cpu.compiler.vectors import LLVM_F32, LLVM_I32, LLVM_I64, WIDTH, f32, i64

S_PITCH = 4 * SPAN
# Tables of rows have whole groups of KEYS, and up to AHEAD more rows: while some are at work, those
# that lie AHEAD_BYTES behind them are brought near.
KEYS, AHEAD = 16, 64
AHEAD_BYTES = 1 << 14
# Head dims in a cache line.
LINE = 16
# How values are summed, for one row and for several: by so many keys before the next head dims have
# their turn, so that memory is read about as it lies; and by so many vectors of head dims, of which
# one row has registers for 64 head dims.
ONE_ROW = 8, (4, 1) if WIDTH == 16 else (64 // WIDTH, 4, 1)
SEVERAL_ROWS = 16, (4, 1)


def _score(rows: int):
    @emitter(i64, i64, i64, i64, i64, i64, i64, i64, f32)
    def score(e: Emit, table, ahead, offset, n, q, q_pitch, D, s, c):
        queries = [e.offset(q, e.integer(r), q_pitch) for r in range(rows)]
        lines = e.ir.sdiv(D, e.integer(LINE))
        done = e.ir.mul(lines, e.integer(LINE))
        blocks = e.ir.sdiv(e.ir.sub(D, done), e.integer(WIDTH))
        # One vector of keys at a time: they are read side by side, and more streams are slow.
        with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as group:
            here, near = (e.offset(x, group, 8 * WIDTH) for x in (table, ahead))
            totals = [e.variable(e.constant(0.0)) for _ in range(rows)]
            with e.loop(lines) as line:
                at = e.ir.mul(line, e.integer(4 * LINE))
                extend(e, totals, here, near, offset, at, queries, LINE)
            with e.loop(blocks) as block:
                at = e.offset(e.ir.mul(done, e.integer(4)), block, VECTOR)
                extend(e, totals, here, near, offset, at, queries, WIDTH)
            for r, total in enumerate(totals):
                scores = e.offset(s, group, VECTOR)
                e.store(e.ir.fmul(total.get(), e.splat(c)), scores, S_PITCH * r)

    def extend(e: Emit, totals, table, ahead, offset, at, queries, dims: int):
        """Add some head dims, from ``at`` on, to the scores of WIDTH keys."""
        at = e.elsewhere(at)  # LLVM would count up one address for each key
        beside = e.ir.add(at, offset)
        keys = [e.ir.add(e.load(table, 8 * i, LLVM_I64), beside) for i in range(WIDTH)]
        for i in range(WIDTH):
            e.prefetch(e.ir.add(e.load(ahead, 8 * i, LLVM_I64), beside))
        for d in range(0, 4 * dims, VECTOR):
            factors = [e.splats(e.ir.add(query, at), WIDTH, d) for query in queries]
            for i, column in enumerate(e.transpose([e.load(key, d) for key in keys])):
                for r, total in enumerate(totals):
                    total.set(e.fma(column, factors[r][i], total.get()))

    return score


# s [rows, n] = c · q [rows, D] · k [n, D]ᵀ; the rows of k are ``offset`` bytes behind the addresses
# of a table, those that are brought near meanwhile behind the ones of another. n is a multiple of
# KEYS, D of WIDTH.
score_1, score_4, score_8 = _score(1), _score(4), _score(8)


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


def _accumulate(rows: int, sizes: tuple[int, tuple[int, ...]], masked: bool = False):
    n_keys, steps = sizes

    @emitter(i64, i64, i64, i64, i64, i64, i64)
    def accumulate(e: Emit, table, ahead, n, p, out, pitch, chains):
        for r in range(rows):
            line = e.offset(out, e.integer(r), pitch)
            with e.loop(e.ir.sdiv(pitch, e.integer(VECTOR))) as i:
                e.store(e.constant(0.0), e.offset(line, i, VECTOR))
        pieces = bunches(e, n, PIECE)
        with pieces as (_, start, count), bunches(e, count, n_keys) as (_, before, few):
            is_first = e.ir.icmp_signed("==", before, e.integer(0))
            is_last = e.ir.icmp_signed("==", e.ir.add(before, few), count)
            kv = e.ir.add(start, before)
            rows_here, rows_near = (e.offset(x, kv, 8) for x in (table, ahead))
            weights = e.offset(p, kv, 4)
            at, left = e.variable(e.integer(0)), e.ir.sdiv(pitch, e.integer(VECTOR))
            for vectors in steps:
                times = e.ir.sdiv(left, e.integer(vectors))
                left = e.ir.sub(left, e.ir.mul(times, e.integer(vectors)))
                with e.loop(times):
                    kept = e.ir.add(chains, at.get())
                    acc = begin(e, vectors, kept, pitch, is_first)
                    add_keys(e, acc, rows_here, rows_near, at.get(), few, weights)
                    with e.ir.if_else(is_last) as (whole, part):
                        with whole:
                            add_piece(e, acc, e.ir.add(out, at.get()), pitch)
                        with part:
                            keep(e, acc, kept, pitch)
                    at.set(e.ir.add(at.get(), e.integer(VECTOR * vectors)))

    def begin(e: Emit, vectors: int, chains, pitch, is_first):
        """The chains of some head dims, by row and vector: new ones, or those that were kept."""
        acc = {}
        for r in range(rows):
            line = e.offset(chains, e.integer(r), pitch)
            for j in range(vectors):
                before = e.load(line, VECTOR * j)
                acc[r, j] = e.variable(e.ir.select(is_first, e.constant(0.0), before))
        return acc

    def add_piece(e: Emit, acc, out, pitch):
        for (r, j), total in acc.items():
            line = e.offset(out, e.integer(r), pitch)
            e.store(e.ir.fadd(e.load(line, VECTOR * j), total.get()), line, VECTOR * j)

    def keep(e: Emit, acc, chains, pitch):
        for (r, j), total in acc.items():
            e.store(total.get(), e.offset(chains, e.integer(r), pitch), VECTOR * j)

    def add_keys(e: Emit, acc, table, ahead, at, n, p):
        with e.loop(e.ir.sdiv(e.ir.add(n, e.integer(3)), e.integer(4))) as i:
            here, near = (e.offset(x, i, 32) for x in (table, ahead))
            add_four(e, acc, len(acc) // rows, here, near, at, e.offset(p, i, 16))

    def add_four(e: Emit, acc, vectors: int, table, ahead, at, p):
        """Four keys; those that do not exist are zeros and have a weight of 0."""
        weights = [e.splats(p, 4, S_PITCH * r) for r in range(rows)]
        for i in range(4):
            value = e.ir.add(e.load(table, 8 * i, LLVM_I64), at)
            later = e.ir.add(e.load(ahead, 8 * i, LLVM_I64), at)
            for byte in range(0, VECTOR * vectors, 4 * LINE):
                e.prefetch(e.ir.add(later, e.integer(byte)))
            values = [e.load(value, VECTOR * j) for j in range(vectors)]
            for r in range(rows):
                if masked:
                    bits = e.load(p, S_PITCH * r + 4 * i, LLVM_I32)
                    hidden = is_marked(e, e.splat(bits))
                for j in range(vectors):
                    before = acc[r, j].get()
                    total = e.fma(values[j], weights[r][i], before)
                    acc[r, j].set(e.select(hidden, before, total) if masked else total)

    return accumulate


# out [rows, Dv] = p [rows, n] · v [n, Dv]; tables have the addresses of the rows of v, and of those
# that are brought near meanwhile. chains [rows, Dv] holds sums that are not complete.
accumulate_1, accumulate_4 = _accumulate(1, ONE_ROW), _accumulate(4, SEVERAL_ROWS)
# The same without the terms that −0 hides in p.
accumulate_masked = _accumulate(1, SEVERAL_ROWS, masked=True)


@emitter(i64, i64, returns=f32)
def sum_row(e: Emit, p, n):
    """Σ p [n], by chains of BUNCH keys, which are added up to pieces; −0 adds nothing."""
    total = e.variable(e.constant(0.0, 1))
    with bunches(e, n, PIECE) as (_, first, count):
        piece = e.variable(e.constant(0.0, 1))
        with bunches(e, count) as (_, start, few):
            chain = e.variable(e.constant(0.0, 1))
            weights = e.offset(p, e.ir.add(first, start), 4)
            with e.loop(few) as i:
                weight = e.load(e.offset(weights, i, 4), 0, LLVM_F32)
                chain.set(e.ir.fadd(chain.get(), weight))
            piece.set(e.ir.fadd(piece.get(), chain.get()))
        total.set(e.ir.fadd(total.get(), piece.get()))
    return total.get()


@emitter(i64, i64, returns=types.boolean)
def is_finite(e: Emit, x, n):
    """Whether all of x [n] is finite; n is a multiple of WIDTH."""
    # x − x is +0 for finite x and NaN otherwise.
    zero = ir.Constant(INTEGERS, [0] * WIDTH)
    witness = e.variable(zero)
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        value = e.load(e.offset(x, i, VECTOR))
        apart = e.ir.bitcast(e.ir.fsub(value, value), INTEGERS)
        witness.set(e.ir.or_(witness.get(), apart))
    found, lanes = ir.Constant(LLVM_I32, 0), witness.get()
    for i in range(WIDTH):
        found = e.ir.or_(found, e.lane(lanes, i))
    return e.ir.icmp_signed("==", found, ir.Constant(LLVM_I32, 0))
