"""Single rows of a narrow unit with the sums of matrix units: scores and weighted sums (`matrix`).

For so few rows the units themselves would be mostly idle. Rows of keys and values are those of
tensors, as pairs of bfloat16. Each DEPTH products make two chains, of even places and of odd ones.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from lockstep.kernels.cpu.arithmetic.narrow_rows import S_PITCH
from lockstep.kernels.cpu.arithmetic.pairs import (
    PAIRS,
    every,
    is_special,
    none_of,
    rounded,
    shorts,
)
from lockstep.kernels.cpu.arithmetic.tiles import VECTOR, is_marked
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.matrix import (
    DEPTH,
    TILE,
    TILE_BYTES,
    UPPER,
    begin_chains,
    flushing,
    halves,
    joined,
    tile_emitter,
)
from lockstep.kernels.cpu.compiler.simd import Emit
from lockstep.kernels.cpu.compiler.vectors import (
    LLVM_F32,
    LLVM_I16,
    LLVM_I32,
    LLVM_I64,
    WIDTH,
    f32,
    i64,
    vector,
)

# Vectors of head dims that are summed together: for one row, and for several.
ONE_ROW, SEVERAL_ROWS = (4, 1), (2, 1)


def _score(rows: int):
    @tile_emitter(i64, i64, i64, i64, i64, i64, i64, f32)
    def score(e: Emit, table, ahead, n, q, q_pitch, steps, s, c):
        queries = [e.offset(q, e.integer(r), q_pitch) for r in range(rows)]
        with flushing(e), e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as group:
            here, near = (e.offset(x, group, 8 * WIDTH) for x in (table, ahead))
            totals = [e.variable(e.constant(0.0)) for _ in range(rows)]
            with e.loop(steps) as step:
                at = e.elsewhere(e.ir.mul(step, e.integer(TILE_BYTES)))
                extend(e, totals, here, near, at, queries)
            for r, total in enumerate(totals):
                scores = e.offset(s, group, VECTOR)
                e.store(e.ir.fmul(total.get(), e.splat(c)), scores, S_PITCH * r)

    def extend(e: Emit, totals, table, ahead, at, queries):
        """Add DEPTH head dims, ``at`` bytes behind the first, to the scores of WIDTH keys."""
        keys = [e.ir.add(e.load(table, 8 * i, LLVM_I64), at) for i in range(WIDTH)]
        for i in range(WIDTH):
            e.prefetch(e.ir.add(e.load(ahead, 8 * i, LLVM_I64), at))
        chains = begin_chains(e, len(queries))
        factors = [e.ir.add(query, e.ir.add(at, at)) for query in queries]
        for i, pairs in enumerate(e.transpose([e.load(key, 0, PAIRS) for key in keys])):
            for place, column in enumerate(halves(e, pairs)):
                for chain, factor in zip(chains, factors, strict=True):
                    q = e.splat(e.load(factor, 8 * i + 4 * place, LLVM_F32))
                    chain[place].set(e.fma(column, q, chain[place].get()))
        for total, pair in zip(totals, chains, strict=True):
            total.set(joined(e, total.get(), pair))

    return score


# s [rows, n] = c · q [rows, DEPTH · steps] fp32 · k [n, DEPTH · steps]ᵀ; a table has the addresses
# of the rows of k, another one those of rows that are brought near meanwhile. n is a multiple of
# DEPTH.
score_pairs_1, score_pairs_4, score_pairs_8 = _score(1), _score(4), _score(8)


@tile_emitter(i64, i64)
def round_row(e: Emit, p, n):
    """p [n] = the bfloat16 nearest to each, as `pairs` rounds weights; n is a multiple of WIDTH."""
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at = e.offset(p, i, VECTOR)
        e.store(e.ir.and_(rounded(e, e.load(at)), every(PAIRS, UPPER)), at)


def _accumulate(rows: int, sizes: tuple[int, ...], clean: bool = False):
    @tile_emitter(i64, i64, i64, i64, i64, i64, returns=types.boolean)
    def accumulate(e: Emit, table, ahead, n, p, out, pitch):
        lines = [e.offset(out, e.integer(r), pitch) for r in range(rows)]
        for line in lines:
            with e.loop(e.ir.sdiv(pitch, e.integer(VECTOR))) as i:
                e.store(e.constant(0.0), e.offset(line, i, VECTOR))
        found = e.variable(every(vector(WIDTH, ir.IntType(1)), 0))
        with flushing(e), e.loop(e.ir.sdiv(n, e.integer(DEPTH))) as some:
            here, near = (e.offset(x, some, 8 * DEPTH) for x in (table, ahead))
            weights = e.offset(p, some, 4 * DEPTH)
            at, left = e.variable(e.integer(0)), e.ir.sdiv(pitch, e.integer(VECTOR))
            for vectors in sizes:
                times = e.ir.sdiv(left, e.integer(vectors))
                left = e.ir.sub(left, e.ir.mul(times, e.integer(vectors)))
                with e.loop(times):
                    chains = begin_chains(e, rows * vectors)
                    add_keys(e, chains, vectors, here, near, at.get(), weights, found)
                    for i, pair in enumerate(chains):
                        to = e.ir.add(lines[i // vectors], at.get())
                        total = joined(e, e.load(to, VECTOR * (i % vectors)), pair)
                        e.store(total, to, VECTOR * (i % vectors))
                    at.set(e.ir.add(at.get(), e.integer(VECTOR * vectors)))
        return none_of(e, found.get())

    def add_keys(e: Emit, chains, vectors: int, table, ahead, at, p, found):
        offset = e.ir.lshr(at, e.integer(1))  # numbers of 16 bits
        with e.loop(e.integer(TILE)) as i:
            here, near, weights = (e.offset(x, i, y) for x, y in ((table, 16), (ahead, 16), (p, 8)))
            for place in range(2):
                value = e.ir.add(e.load(here, 8 * place, LLVM_I64), offset)
                later = e.ir.add(e.load(near, 8 * place, LLVM_I64), offset)
                for byte in range(0, 2 * WIDTH * vectors, TILE_BYTES):
                    e.prefetch(e.ir.add(later, e.integer(byte)))
                values = []
                for j in range(vectors):
                    number = e.load(value, 2 * WIDTH * j, vector(WIDTH, LLVM_I16))
                    special = is_special(e, number)
                    found.set(e.ir.or_(found.get(), special))
                    if clean:
                        number = e.ir.select(special, every(number.type, 0), number)
                    values.append(e.float_of(e.ir.zext(number, PAIRS), 16))
                for r in range(rows):
                    weight = e.load(weights, S_PITCH * r + 4 * place, LLVM_I32)
                    factor = e.ir.bitcast(e.splat(weight), e.constant(0.0).type)
                    for j, x in enumerate(values):
                        chain = chains[vectors * r + j][place]
                        chain.set(e.fma(x, factor, chain.get()))

    return accumulate


# out [rows, Dv] = p [rows, n] · v [n, Dv], with the addresses of the rows of v as above, and
# weights that `round_row` has rounded. n is a multiple of DEPTH. True if no value is special.
accumulate_pairs_1 = _accumulate(1, ONE_ROW)
accumulate_pairs_4 = _accumulate(4, SEVERAL_ROWS)
# The same without what is special.
accumulate_clean_pairs = _accumulate(1, ONE_ROW, clean=True)


@tile_emitter(i64, i64, i64, i64)
def _add_special(e: Emit, row, D, p, out):
    """out [D] += what is special in row [D], times a weight, unless that is marked."""
    weight = e.splat(e.load(p, 0, LLVM_I32))
    hidden, factor = is_marked(e, weight), e.ir.bitcast(weight, vector())
    with e.loop(e.ir.sdiv(e.ir.add(D, e.integer(WIDTH - 1)), e.integer(WIDTH))) as i:
        left = e.ir.sub(D, e.ir.mul(i, e.integer(WIDTH)))
        number, line = shorts(e, e.offset(row, i, 2 * WIDTH), WIDTH, left), e.offset(out, i, VECTOR)
        value, before = e.float_of(e.ir.zext(number, PAIRS), 16), e.load(line)
        after = e.select(hidden, before, e.ir.fadd(before, e.ir.fmul(value, factor)))
        e.store(e.select(is_special(e, number), after, before), line)


@compiled
def add_special_to_row(table, n, D, p, out):
    """out [D] += what is special in n rows, times their weights p [n], but for those marked."""
    for i in range(n):
        _add_special(scalar.load_word(table + 8 * i), D, p + 4 * i, out)
