"""What the matrix units multiply, laid out: rows of bfloat16, and columns of pairs (``matrix``).

    scores   s[kv, lane] = Σ_d  k[kv, d] · q[d, lane]       rows are keys, columns are queries
    output   acc[d, lane] = Σ_kv v[kv, d] · p[kv, lane]     rows are head dims, columns are weights

Queries are pairs of head dims, weights pairs of keys, rounded to bfloat16. Rows have zeros up to
whole steps of DEPTH numbers, keys up to whole steps of DEPTH rows.

Some values are *special*: NaN and infinities, which would show in rows that do not see their keys,
and numbers so small that products of them would be subnormal, and count as zero. Zeros stand in
their place, and they are added afterwards to the rows that see them.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from lockstep.kernels.cpu.arithmetic.memory import gather_columns
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.arithmetic.tiles import (
    BUNCH,
    MINUS_INF,
    ROW,
    VECTOR,
    bunches,
    finite_or_zero,
    is_marked,
)
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.matrix import (
    DEPTH,
    TILE,
    TILE_BYTES,
    UPPER,
    halves,
    tile_emitter,
)
from lockstep.kernels.cpu.compiler.simd import Emit
from lockstep.kernels.cpu.compiler.vectors import (
    F32,
    LANES,
    LLVM_I16,
    LLVM_I32,
    LLVM_I64,
    NV,
    WIDTH,
    f32,
    i64,
    vector,
)

# Bits of the smallest number of bfloat16 that is not special, 2**−100, and of infinity.
SMALLEST, INFINITY = 27 << 7, 0x7F80
PAIRS = vector(WIDTH, LLVM_I32)
SHORTS = vector(2 * WIDTH, LLVM_I16)


def every(type: ir.VectorType, value: int) -> ir.Constant:
    """A vector of one number."""
    return ir.Constant(type, [value] * type.count)


def shorts(e: Emit, address: ir.Value, width: int, n: ir.Value) -> ir.Value:
    """The first n of ``width`` numbers of 16 bits, and zeros; nothing behind them is touched."""
    type = vector(width, LLVM_I16)
    numbers = vector(width, LLVM_I32)
    places = ir.Constant(numbers, list(range(width)))
    mask = e.ir.icmp_signed("<", places, e.splat(e.ir.trunc(n, LLVM_I32), width))
    arguments = [e.pointer(address), ir.Constant(LLVM_I32, 2), mask, every(type, 0)]
    signature = ir.FunctionType(type, [x.type for x in arguments])
    return e.intrinsic(f"masked.load.v{width}i16.p0", signature, arguments)


@tile_emitter(i64, i64, i64, i64, i64)
def copy_rows(e: Emit, table, n, D, dst, steps):
    """dst [n, DEPTH · steps] = n rows of D numbers of 16 bits, and zeros."""
    pitch = e.ir.mul(steps, e.integer(TILE_BYTES))
    with e.loop(n) as i:
        row, to = e.load(e.offset(table, i, 8), 0, LLVM_I64), e.offset(dst, i, pitch)
        with e.loop(steps) as step:
            left = e.ir.sub(D, e.ir.mul(step, e.integer(DEPTH)))
            values = shorts(e, e.offset(row, step, TILE_BYTES), DEPTH, left)
            e.store(values, e.offset(to, step, TILE_BYTES))


def is_special(e: Emit, numbers: ir.Value) -> ir.Value:
    """Which of a vector of numbers of 16 bits are special."""
    type = numbers.type
    sizes = e.ir.and_(numbers, every(type, 0x7FFF))
    # What is smaller wraps around.
    apart = e.ir.sub(sizes, every(type, SMALLEST))
    outside = e.ir.icmp_unsigned(">=", apart, every(type, INFINITY - SMALLEST))
    return e.ir.and_(outside, e.ir.icmp_unsigned("!=", sizes, every(type, 0)))


def none_of(e: Emit, flags: ir.Value) -> ir.Value:
    """Whether a vector of flags has none."""
    bits = e.ir.bitcast(flags, ir.IntType(flags.type.count))
    return e.ir.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))


@tile_emitter(i64, i64, i64, i64, i64, returns=types.boolean)
def turn_rows(e: Emit, table, n, D, dst, pitch):
    """dst [D, n] = n rows of D numbers of bfloat16, n a multiple of DEPTH and D padded to one of
    TILE; rows of dst are ``pitch`` bytes apart. True if none is special."""
    no = every(vector(SHORTS.count, ir.IntType(1)), 0)
    found = e.variable(no)
    with (
        e.loop(e.ir.sdiv(n, e.integer(DEPTH))) as some,
        e.loop(e.ir.sdiv(e.ir.add(D, e.integer(TILE - 1)), e.integer(TILE))) as block,
    ):
        rows, at = e.offset(table, some, 8 * DEPTH), e.ir.mul(block, e.integer(2 * TILE))
        left = e.ir.sub(D, e.ir.mul(block, e.integer(TILE)))
        pairs = []
        for i in range(0, DEPTH, 2):
            low, high = (
                e.ir.zext(shorts(e, e.ir.add(row, at), TILE, left), PAIRS)
                for row in (e.load(rows, 8 * (i + k), LLVM_I64) for k in range(2))
            )
            pairs.append(e.ir.or_(low, e.ir.shl(high, every(PAIRS, 16))))
            special = is_special(e, e.ir.bitcast(pairs[-1], SHORTS))
            found.set(e.ir.or_(found.get(), special))
        to = e.offset(e.offset(dst, some, TILE_BYTES), block, e.ir.mul(pitch, e.integer(TILE)))
        for i, column in enumerate(e.transpose(pairs)):
            e.store(column, e.offset(to, e.integer(i), pitch))
    return none_of(e, found.get())


@tile_emitter(i64, i64)
def clean(e: Emit, address, n):
    """Zeros in place of what is special, in n numbers of bfloat16, a multiple of DEPTH."""
    with e.loop(e.ir.sdiv(n, e.integer(DEPTH))) as i:
        at = e.offset(address, i, TILE_BYTES)
        numbers = e.load(at, 0, SHORTS)
        e.store(e.ir.select(is_special(e, numbers), every(SHORTS, 0), numbers), at)


def rounded(e: Emit, weights: ir.Value) -> ir.Value:
    """Bits whose upper halves are the bfloat16 nearest to weights, the larger of two; a mark
    stays."""
    return e.ir.add(e.ir.bitcast(weights, PAIRS), every(PAIRS, 0x8000))


def _paired(e: Emit, low: ir.Value, high: ir.Value) -> ir.Value:
    """Pairs of the upper halves of two vectors."""
    below = e.ir.lshr(low, every(PAIRS, 16))
    return e.ir.or_(below, e.ir.and_(high, every(PAIRS, UPPER)))


@tile_emitter(i64, i64, f32)
def _scale_pairs(e: Emit, address, n, c):
    """n vectors of pairs times a power of two."""
    with e.loop(n) as i:
        at = e.offset(address, i, VECTOR)
        scaled = (e.ir.fmul(x, e.splat(c)) for x in halves(e, e.load(at, 0, PAIRS)))
        # A subnormal number has more bits than are kept; it counts as zero.
        e.store(_paired(e, *(e.ir.bitcast(x, PAIRS) for x in scaled)), at)


@tile_emitter(i64, i64, i64)
def _last_of_rows(e: Emit, table, place, dst):
    """dst [LANES] int32 = the number of 16 bits at one place of each row."""
    with e.loop(e.integer(LANES)) as i:
        row = e.load(e.offset(table, i, 8), 0, LLVM_I64)
        value = e.load(e.offset(row, place, 2), 0, LLVM_I16)
        e.store(e.ir.zext(value, LLVM_I32), e.offset(dst, i, 4))


@compiled
def load_pairs(table, D, dst, steps, c):
    """dst [TILE · steps, LANES] = LANES rows of D numbers of bfloat16, times a power of two c, as
    columns of pairs, and zeros."""
    gather_columns(F32, table, LANES, D // 2, dst, ROW)
    done = D // 2
    if D % 2 != 0:
        _last_of_rows(table, D - 1, dst + done * ROW)
        done += 1
    _scale_pairs(dst, NV * done, c)
    fill(dst + done * ROW, (TILE * steps - done) * LANES, f32(0.0))


@tile_emitter(i64, i64, f32, i64)
def scale_and_max_rows(e: Emit, s, n, c, m):
    """s [n, LANES] *= c, and m [LANES] = max(m, s)."""
    factor = e.splat(c)
    largest = [e.variable(e.load(m, VECTOR * j)) for j in range(NV)]
    with e.loop(n) as i:
        row = e.offset(s, i, ROW)
        for j in range(NV):
            score = e.ir.fmul(e.load(row, VECTOR * j), factor)
            e.store(score, row, VECTOR * j)
            largest[j].set(e.maximum(score, largest[j].get()))
    for j in range(NV):
        e.store(largest[j].get(), m, VECTOR * j)


def _exp_pairs(mark: bool):
    @tile_emitter(i64, i64, i64, i64, i64)
    def exponentials(e: Emit, s, n, m, l, pairs):
        largest = [finite_or_zero(e, e.load(m, VECTOR * j)) for j in range(NV)]
        total = [e.variable(e.constant(0.0)) for _ in range(NV)]
        with bunches(e, n) as (bunch, first, _):
            part = [e.constant(0.0) for _ in range(NV)]
            for i in range(0, BUNCH, 2):
                rows = e.offset(s, first, ROW)
                scores = [
                    e.load(rows, ROW * (i + j // NV) + VECTOR * (j % NV)) for j in range(2 * NV)
                ]
                weights = e.exps([e.ir.fsub(x, largest[j % NV]) for j, x in enumerate(scores)])
                if mark:
                    hidden = (e.ir.fcmp_ordered("==", x, e.constant(MINUS_INF)) for x in scores)
                    marked = zip(hidden, weights, strict=True)
                    weights = [e.select(here, e.constant(-0.0), p) for here, p in marked]
                to = e.offset(e.offset(pairs, bunch, BUNCH // 2 * ROW), e.integer(i // 2), ROW)
                for j in range(NV):
                    low, high = weights[j], weights[NV + j]
                    part[j] = e.ir.fadd(e.ir.fadd(part[j], low), high)
                    e.store(_paired(e, rounded(e, low), rounded(e, high)), to, VECTOR * j)
            for j in range(NV):
                total[j].set(e.ir.fadd(total[j].get(), part[j]))
        for j in range(NV):
            e.store(e.ir.fadd(e.load(l, VECTOR * j), total[j].get()), l, VECTOR * j)

    return exponentials


# pairs = e^(s − m), l [LANES] += Σ e^(s − m); s [n, LANES] from a multiple of BUNCH on, n one, too.
# Pairs [n / 2, LANES] may take the place of s. In the second, −inf becomes −0.
exp_pairs, exp_and_mark_pairs = _exp_pairs(mark=False), _exp_pairs(mark=True)


@tile_emitter(i64, i64, i64, i64, i64)
def _add_special(e: Emit, row, D, pairs, odd, acc):
    """acc [D, LANES] += row [D] · weights [LANES], for what is special in row and not marked in
    weights: those at even or odd places of pairs [LANES]."""
    is_odd = e.ir.icmp_signed("!=", odd, e.integer(0))
    weights = []
    for j in range(NV):
        low, high = halves(e, e.load(pairs, VECTOR * j, PAIRS))
        weights.append(e.ir.select(is_odd, high, low))
    with e.loop(D) as d:
        number = e.load(e.offset(row, d, 2), 0, LLVM_I16)
        with e.ir.if_then(e.lane(is_special(e, e.splat(number)), 0)):
            bits = e.ir.zext(number, LLVM_I32)
            value, line = e.splat(e.float_of(bits, 16)), e.offset(acc, d, ROW)
            for j, weight in enumerate(weights):
                hidden = is_marked(e, e.ir.bitcast(weight, PAIRS))
                before = e.load(line, VECTOR * j)
                after = e.ir.fadd(before, e.ir.fmul(value, weight))
                e.store(e.select(hidden, before, after), line, VECTOR * j)


@compiled
def add_special(table, n, D, pairs, acc):
    """acc [D, LANES] += what is special in n rows, times their weights, in pairs [n / 2, LANES],
    but for those that are marked."""
    for i in range(n):
        row = scalar.load_word(table + 8 * i)
        _add_special(row, D, pairs + i // 2 * ROW, i % 2, acc)
