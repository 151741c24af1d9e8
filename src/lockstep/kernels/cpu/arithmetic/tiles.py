"""The arithmetic of one tile, in registers.

A tile holds LANES query rows side by side, one per SIMD lane, and loops over keys:

    scores   s[kv, lane]  = c · Σ_d  k[kv, d] · q[d, lane]      keys broadcast from panels
    weights  p[kv, lane]  = e^(s − m),   l[lane] = Σ_kv p
    output   acc[d, lane] = Σ_kv v[kv, d] · p[kv, lane]         values broadcast from panels

Every sum is made of chains of fused multiply-adds in ascending order, per lane. Softmax needs no
step across lanes, and a row's bits do not depend on the rows beside it.

Where weights are equal, every addition of a chain is off by the same, so that errors grow with its
length: a chain takes no more than PIECE keys, and one of weights alone no more than BUNCH. Both
begin at multiples of their size, wherever a row's keys do.

Scores are in natural units, as bias and sinks are, and s − m comes before anything it is
multiplied with: it is exact for scores near the largest, however large they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from lockstep.kernels.cpu.compiler.simd import EXP_ROWS, Emit, Variable, emitter
from lockstep.kernels.cpu.compiler.vectors import (
    LANES,
    LLVM_F32,
    LLVM_I32,
    MR,
    NV,
    WIDTH,
    f32,
    i64,
    vector,
)

ROW = 4 * LANES  # bytes of one tile row
VECTOR = 4 * WIDTH
MINUS_INF = float("-inf")
INTEGERS = vector(WIDTH, LLVM_I32)
# Keys of one chain of Σ p v or Σ dS k, and of one of Σ p: bits depend on them.
PIECE, BUNCH = 64, 8


def _zeros(e: Emit, vectors: int) -> list[list[Variable]]:
    return [[e.variable(e.constant(0.0)) for _ in range(vectors)] for _ in range(MR)]


def is_marked(e: Emit, bits):
    """Weights are never negative: −0 marks what is masked."""
    return e.ir.icmp_signed("==", bits, ir.Constant(INTEGERS, [-0x80000000] * WIDTH))


def _multiply(
    e: Emit, acc, count, a, a_pitch: int, a_step: int, b, b_pitch, a_marks=None, b_marks=None
) -> None:
    """acc[i, j] += Σ_r a[r, i] · b[r, j]: the one inner loop of every matrix product.

    With marks, which lie as a or as b does, terms that are marked are left out, whatever their
    factors are.
    """
    n_columns = len(acc[0])
    with e.loop(count) as r:
        a_row = e.offset(a, r, a_pitch)
        b_row = e.offset(b, r, b_pitch)
        columns = [e.load(b_row, VECTOR * j) for j in range(n_columns)]
        if b_marks is not None:
            marks_row = e.offset(b_marks, r, b_pitch)
            bits = [e.load(marks_row, VECTOR * j, INTEGERS) for j in range(n_columns)]
            hidden = [is_marked(e, x) for x in bits]
        beside = a_step == 4
        factors = e.splats(a_row, MR) if beside else []
        for i in range(MR):
            factor = factors[i] if beside else e.splat(e.load(a_row, a_step * i, LLVM_F32))
            if a_marks is not None:
                mark = e.load(e.offset(a_marks, r, a_pitch), a_step * i, LLVM_I32)
                hidden = [is_marked(e, e.splat(mark))] * n_columns
            for j, column in enumerate(columns):
                before = acc[i][j].get()
                total = e.fma(factor, column, before)
                if a_marks is not None or b_marks is not None:
                    total = e.select(hidden[j], before, total)
                acc[i][j].set(total)


@contextmanager
def bunches(e: Emit, n, size: int = BUNCH) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """A loop over n things by ``size`` of them: which bunch, its first, and how many it has."""
    whole = e.integer(size)
    with e.loop(e.ir.sdiv(e.ir.add(n, e.integer(size - 1)), whole)) as i:
        first = e.ir.mul(i, whole)
        left = e.ir.sub(n, first)
        yield i, first, e.ir.select(e.ir.icmp_signed("<", left, whole), left, whole)


def _scores(e: Emit, k_panel, q_t, s, D, c, m=None) -> None:
    acc = _zeros(e, NV)
    _multiply(e, acc, D, k_panel, 4 * MR, 4, q_t, ROW)
    factor = e.splat(c)
    for j in range(NV):
        largest = None if m is None else e.load(m, VECTOR * j)
        for i in range(MR):
            score = e.ir.fmul(acc[i][j].get(), factor)
            e.store(score, s, ROW * i + VECTOR * j)
            if m is not None:
                largest = e.maximum(score, largest)
        if m is not None:
            e.store(largest, m, VECTOR * j)


@emitter(i64, i64, i64, i64, f32)
def score_tile(e: Emit, k_panel, q_t, s, D, c):
    """s [MR, LANES] = c · k_panel [D, MR]ᵀ · q_t [D, LANES]."""
    _scores(e, k_panel, q_t, s, D, c)


@emitter(i64, i64, i64, i64, f32, i64, i64)
def score_tiles_max(e: Emit, k_panels, q_t, s, D, c, m, n):
    """The same for n panels, and m [LANES] = max(m, s): for tiles that every lane sees whole."""
    with e.loop(n) as i:
        panel = e.offset(k_panels, i, e.ir.mul(D, e.integer(4 * MR)))
        _scores(e, panel, q_t, e.offset(s, i, MR * ROW), D, c, m)


def _accumulate(e: Emit, v_panel, p, acc, n, fresh, marks=None) -> None:
    slots, zero = _zeros(e, NV), e.constant(0.0)
    _multiply(e, slots, n, v_panel, 4 * MR, 4, p, ROW, b_marks=marks)
    is_first = e.ir.icmp_signed("!=", fresh, e.integer(0))
    for i in range(MR):
        for j in range(NV):
            at = ROW * i + VECTOR * j
            before = e.ir.select(is_first, zero, e.load(acc, at))
            e.store(e.ir.fadd(before, slots[i][j].get()), acc, at)


@emitter(i64, i64, i64, i64, i64)
def accumulate_tile(e: Emit, v_panel, p, acc, n, fresh):
    """acc [MR, LANES] += v_panel [n, MR]ᵀ · p [n, LANES], or = where ``fresh`` is not 0."""
    _accumulate(e, v_panel, p, acc, n, fresh)


@emitter(i64, i64, i64, i64, i64, i64)
def accumulate_tile_masked(e: Emit, v_panel, p, acc, n, fresh, marks):
    """The same without the terms that marks [n, LANES] hide."""
    _accumulate(e, v_panel, p, acc, n, fresh, marks)


def _outer(vectors: int, masked: bool = False):
    @emitter(i64, i64, i64, i64, i64, i64, i64)
    def outer(e: Emit, p, rows, out, n, pitch, marks, step):
        line = [e.offset(out, e.integer(i), pitch) for i in range(MR)]
        slots = _zeros(e, vectors)
        with bunches(e, n, LANES) as (tile, before, count):
            at = e.ir.mul(tile, step)
            hidden = e.ir.add(marks, at) if masked else None
            own = e.offset(rows, before, pitch)
            _multiply(e, slots, count, e.ir.add(p, at), 4, ROW, own, pitch, a_marks=hidden)
        for i in range(MR):
            for j in range(vectors):
                total = e.ir.fadd(e.load(line[i], VECTOR * j), slots[i][j].get())
                e.store(total, line[i], VECTOR * j)

    return outer


# out [MR, d] += p [MR, n] · rows [n, d] for d = 1, 2, 3 vectors; rows and out share a pitch. The
# columns of p are in tiles of LANES, ``step`` bytes apart.
outer_tile_1, outer_tile_2, outer_tile_3 = _outer(1), _outer(2), _outer(3)
# The same without the terms that marks [MR, n] hide; the others do not look at them.
outer_masked_1, outer_masked_2, outer_masked_3 = (_outer(n, masked=True) for n in (1, 2, 3))


@emitter(i64, i64, i64)
def max_rows(e: Emit, s, n, m):
    """m [LANES] = max(m, s [n, LANES])."""
    largest = [e.variable(e.load(m, VECTOR * j)) for j in range(NV)]
    with e.loop(n) as kv:
        row = e.offset(s, kv, ROW)
        for j in range(NV):
            largest[j].set(e.maximum(e.load(row, VECTOR * j), largest[j].get()))
    for j in range(NV):
        e.store(largest[j].get(), m, VECTOR * j)


@emitter(i64, i64, i64, i64, i64)
def mask_rows(e: Emit, s, first, n, lo, hi):
    """s = −inf where key first + i lies outside the lane's [lo, hi); s [n, LANES]."""
    low = [e.load(lo, VECTOR * j, INTEGERS) for j in range(NV)]
    high = [e.load(hi, VECTOR * j, INTEGERS) for j in range(NV)]
    minus_inf = e.constant(MINUS_INF)
    with e.loop(n) as i:
        row = e.offset(s, i, ROW)
        kv = e.splat(e.ir.trunc(e.ir.add(first, i), LLVM_I32))
        for j in range(NV):
            after = e.ir.icmp_signed(">=", kv, low[j])
            visible = e.ir.and_(after, e.ir.icmp_signed("<", kv, high[j]))
            e.store_selected(visible, minus_inf, row, VECTOR * j)


@emitter(i64, i64, i64, i64, i64)
def alibi_rows(e: Emit, s, first, n, diagonals, slopes):
    """s −= slope · |diagonal − key| for keys first + i; s [n, LANES], diagonals [LANES] int32."""
    diagonal = [e.load(diagonals, VECTOR * j, INTEGERS) for j in range(NV)]
    slope = [e.ir.fneg(e.load(slopes, VECTOR * j)) for j in range(NV)]
    with e.loop(n) as i:
        row = e.offset(s, i, ROW)
        kv = e.splat(e.ir.trunc(e.ir.add(first, i), LLVM_I32))
        for j in range(NV):
            distance = e.distance(diagonal[j], kv)
            e.store(e.fma(slope[j], distance, e.load(row, VECTOR * j)), row, VECTOR * j)


@emitter(i64, i64, f32, i64)
def softcap_rows(e: Emit, s, n, cap, slopes):
    """s = cap · tanh(s) in place; slopes = 1 − tanh², unless its address is 0."""
    factor = e.splat(cap)
    wanted = e.ir.icmp_signed("!=", slopes, e.integer(0))
    one = e.constant(1.0)
    with e.loop(n) as i:
        row = e.offset(s, i, ROW)
        for j in range(NV):
            t = e.tanh(e.load(row, VECTOR * j))
            e.store(e.ir.fmul(t, factor), row, VECTOR * j)
            with e.ir.if_then(wanted):
                slope = e.fma(e.ir.fneg(t), t, one)
                e.store(slope, e.offset(slopes, i, ROW), VECTOR * j)


def finite_or_zero(e: Emit, m):
    """A row that has seen no key has m = −inf; its weights are e^(−inf − 0) = 0."""
    return e.select(e.ir.fcmp_ordered("==", m, e.constant(MINUS_INF)), e.constant(0.0), m)


@emitter(i64, i64, i64, i64)
def exp_rows(e: Emit, s, n, m, l):
    """s = e^(s − m) in place, l [LANES] += Σ s; s [n, LANES], from a multiple of BUNCH on;
    n is a multiple of MR."""
    _exp_rows(e, s, n, m, l, mark=False)


@emitter(i64, i64, i64, i64)
def exp_and_mark_rows(e: Emit, s, n, m, l):
    """The same; a score of −inf becomes −0."""
    _exp_rows(e, s, n, m, l, mark=True)


def _exp_rows(e: Emit, s, n, m, l, mark: bool) -> None:
    largest = [finite_or_zero(e, e.load(m, VECTOR * j)) for j in range(NV)]
    total = [e.variable(e.constant(0.0)) for _ in range(NV)]
    with bunches(e, n) as (_, first, count):
        part = [e.variable(e.constant(0.0)) for _ in range(NV)]
        with e.loop(e.ir.sdiv(count, e.integer(EXP_ROWS))) as i:
            rows = e.offset(e.offset(s, first, ROW), i, EXP_ROWS * ROW)
            scores = [e.load(rows, VECTOR * j) for j in range(EXP_ROWS * NV)]
            weights = e.exps([e.ir.fsub(x, largest[j % NV]) for j, x in enumerate(scores)])
            for j, (score, weight) in enumerate(zip(scores, weights, strict=True)):
                p = weight
                if mark:
                    masked = e.ir.fcmp_ordered("==", score, e.constant(MINUS_INF))
                    p = e.select(masked, e.constant(-0.0), p)
                e.store(p, rows, VECTOR * j)
                part[j % NV].set(e.ir.fadd(part[j % NV].get(), p))
        for j in range(NV):
            total[j].set(e.ir.fadd(total[j].get(), part[j].get()))
    for j in range(NV):
        e.store(e.ir.fadd(e.load(l, VECTOR * j), total[j].get()), l, VECTOR * j)


@emitter(i64, i64, i64, i64, i64, i64, i64)
def fold_span(e: Emit, acc, D, m, l, part, part_m, part_l):
    """Fold a part into the running (acc, m, l): the split-KV formula."""
    old_weight, new_weight = [], []
    for j in range(NV):
        old, new = e.load(m, VECTOR * j), e.load(part_m, VECTOR * j)
        largest = e.maximum(new, old)
        base = finite_or_zero(e, largest)
        old_weight.append(e.exp(e.ir.fsub(old, base)))
        new_weight.append(e.exp(e.ir.fsub(new, base)))
        # A masked store otherwise, of what is larger.
        e.store(largest, e.elsewhere(m), VECTOR * j)
        fresh = e.ir.fmul(e.load(part_l, VECTOR * j), new_weight[j])
        e.store(e.fma(e.load(l, VECTOR * j), old_weight[j], fresh), l, VECTOR * j)
    with e.loop(D) as d:
        run, row = e.offset(acc, d, ROW), e.offset(part, d, ROW)
        for j in range(NV):
            fresh = e.ir.fmul(e.load(row, VECTOR * j), new_weight[j])
            e.store(e.fma(e.load(run, VECTOR * j), old_weight[j], fresh), run, VECTOR * j)


@emitter(i64, i64, i64)
def close_rows(e: Emit, acc, D, l):
    """acc [D, LANES] = acc / l in place; a row without keys stays 0."""
    zero = e.constant(0.0)
    totals = []
    for j in range(NV):
        total = e.load(l, VECTOR * j)
        empty = e.ir.fcmp_ordered("==", total, zero)
        totals.append(e.select(empty, e.constant(1.0), total))
    with e.loop(D) as d:
        row = e.offset(acc, d, ROW)
        for j in range(NV):
            out = e.ir.fdiv(e.load(row, VECTOR * j), totals[j])
            # A masked key adds +0 or nothing at all: + 0 makes both give the same zero.
            e.store(e.ir.fadd(out, zero), row, VECTOR * j)


@emitter(i64, i64, i64, i64, i64, i64, i64)
def score_gradient_rows(e: Emit, s, dp, n, m, inverse, delta, slopes):
    """s = p = e^(s − m) · inverse, dp = p · (dp − delta) · slope; inverse = 1 / l.

    A score of −inf gives p = −0 and dp = 0: weights are never negative, so −0 marks what is
    masked, and adds nothing in sums that do not look for the mark.
    """
    zero, minus_inf = e.constant(0.0), e.constant(MINUS_INF)
    largest = [e.load(m, VECTOR * j) for j in range(NV)]
    inverses = [e.load(inverse, VECTOR * j) for j in range(NV)]
    deltas = [e.load(delta, VECTOR * j) for j in range(NV)]

    def rows(capped: bool) -> None:
        with e.loop(e.ir.sdiv(n, e.integer(EXP_ROWS))) as i:
            some, grad = e.offset(s, i, EXP_ROWS * ROW), e.offset(dp, i, EXP_ROWS * ROW)
            scores = [e.load(some, VECTOR * j) for j in range(EXP_ROWS * NV)]
            dps = [e.load(grad, VECTOR * j) for j in range(EXP_ROWS * NV)]
            weights = e.exps([e.ir.fsub(x, largest[j % NV]) for j, x in enumerate(scores)])
            for j in range(EXP_ROWS * NV):
                p = e.ir.fmul(weights[j], inverses[j % NV])
                ds = e.ir.fmul(p, e.ir.fsub(dps[j], deltas[j % NV]))
                if capped:
                    slope = e.load(e.offset(slopes, i, EXP_ROWS * ROW), VECTOR * j)
                    ds = e.ir.fmul(ds, slope)
                masked = e.ir.fcmp_ordered("==", scores[j], minus_inf)
                e.store(e.select(masked, e.constant(-0.0), p), some, VECTOR * j)
                e.store(e.select(masked, zero, ds), grad, VECTOR * j)

    with e.ir.if_else(e.ir.icmp_signed("!=", slopes, e.integer(0))) as (wanted, unwanted):
        with wanted:
            rows(capped=True)
        with unwanted:
            rows(capped=False)


@emitter(i64, i64, i64, i64)
def dot_columns(e: Emit, x, y, D, out):
    """out [LANES] = Σ_d x [D, LANES] · y [D, LANES]."""
    totals = [e.variable(e.constant(0.0)) for _ in range(NV)]
    with e.loop(D) as d:
        left, right = e.offset(x, d, ROW), e.offset(y, d, ROW)
        for j in range(NV):
            product = e.fma(e.load(left, VECTOR * j), e.load(right, VECTOR * j), totals[j].get())
            totals[j].set(product)
    for j in range(NV):
        e.store(totals[j].get(), out, VECTOR * j)


@emitter(i64, i64, i64, f32)
def add_scaled(e: Emit, x, y, n, c):
    """x = (x + y) · c for n floats, a multiple of WIDTH."""
    factor = e.splat(c)
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(x, i, VECTOR)
        total = e.ir.fadd(e.load(at), e.load(e.offset(y, i, VECTOR)))
        e.store(e.ir.fmul(total, factor), at)


@emitter(i64, i64, i64)
def add_vectors(e: Emit, x, y, n):
    """x += y for n floats, a multiple of WIDTH."""
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(x, i, VECTOR)
        e.store(e.ir.fadd(e.load(at), e.load(e.offset(y, i, VECTOR))), at)


@emitter(i64, i64, f32)
def scale_vectors(e: Emit, x, n, c):
    """x *= c for n floats, a multiple of WIDTH."""
    factor = e.splat(c)
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(x, i, VECTOR)
        e.store(e.ir.fmul(e.load(at), factor), at)
