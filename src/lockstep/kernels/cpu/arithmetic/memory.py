"""Moving tensor rows into fp32 tiles and back.

Rows are found through *tables*: int64 row addresses, themselves given by address. Contiguous,
strided, packed and paged storage differ in how a table is filled and nowhere else. Each mover
exists once per storage type; the public names take the type's code and choose.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.scalar import store_word
from lockstep.kernels.cpu.compiler.simd import Emit, emitter
from lockstep.kernels.cpu.compiler.vectors import (
    BF16,
    BLOCK,
    F16,
    F32,
    ITEMSIZE,
    LLVM_I32,
    LLVM_I64,
    MR,
    WIDTH,
    f32,
    i64,
    vector,
)

LINE = 64  # bytes


def _rows_of(e: Emit, table: ir.Value, first: int = 0, n: int = BLOCK) -> list[ir.Value]:
    return [e.load(table, 8 * (first + i), LLVM_I64) for i in range(n)]


def _gather_columns(kind: int) -> Any:
    """BLOCK rows of D elements become D rows of BLOCK: dst[d, i] = row_i[d].

    The next BLOCK rows of the table are brought near on the way. Behind its end may lie anything.
    """
    size = ITEMSIZE[kind]

    @emitter(i64, i64, i64, i64)
    def gather(e: Emit, table, D, dst, pitch):
        rows, ahead = _rows_of(e, table), _rows_of(e, table, BLOCK)
        blocks = e.ir.sdiv(D, e.integer(BLOCK))
        with e.loop(blocks) as block:
            at = e.offset(e.integer(0), block, BLOCK * size)
            for row in ahead:
                e.prefetch(e.ir.add(row, at))
            out = e.offset(dst, block, e.ir.mul(pitch, e.integer(BLOCK)))
            values = [e.load_as_f32(e.ir.add(row, at), kind, BLOCK) for row in rows]
            for i, column in enumerate(e.transpose(values)):
                e.store(column, e.offset(out, e.integer(i), pitch))
        _gather_rest(e, rows, kind, blocks, BLOCK, D, dst, pitch)

    return gather


@emitter(i64, i64, i64)
def _interleave(e: Emit, table, D, dst):
    """MR float32 rows of D elements become D rows of MR, without gaps between them."""
    n = min(MR, WIDTH)  # rows that are turned together
    rows, ahead = _rows_of(e, table, 0, MR), _rows_of(e, table, MR, MR)
    blocks = e.ir.sdiv(D, e.integer(WIDTH))
    with e.loop(blocks) as block:
        at, out = e.ir.mul(block, e.integer(4 * WIDTH)), e.offset(dst, block, 4 * WIDTH * MR)
        for row in ahead:
            e.prefetch(e.ir.add(row, at))
        values = [e.load(e.ir.add(row, at)) for row in rows]
        for first in range(0, MR, n):
            for i, columns in enumerate(e.transpose(values[first : first + n])):
                e.store(columns, out, 4 * (first + MR * WIDTH // n * i))
    _gather_rest(e, rows, F32, blocks, WIDTH, D, dst, e.integer(4 * MR))


def _gather_rest(
    e: Emit,
    rows: list[ir.Value],
    kind: int,
    blocks: ir.Value,
    width: int,
    D: ir.Value,
    dst: ir.Value,
    pitch: ir.Value,
) -> None:
    """Columns behind whole blocks of ``width``, one by one."""
    size = ITEMSIZE[kind]
    done = e.ir.mul(blocks, e.integer(width))
    with e.loop(e.ir.sub(D, done)) as rest:
        d = e.ir.add(done, rest)
        out = e.offset(dst, d, pitch)
        for i, row in enumerate(rows):
            e.store(e.load_as_f32(e.offset(row, d, size), kind, 1), out, 4 * i)


def _scatter_columns(kind: int) -> Any:
    """The way back: row_i[d] = src[d, i], rounded to the storage type."""
    size = ITEMSIZE[kind]

    @emitter(i64, i64, i64, i64)
    def scatter(e: Emit, table, D, src, pitch):
        rows, ahead = _rows_of(e, table), _rows_of(e, table, BLOCK)
        blocks = e.ir.sdiv(D, e.integer(BLOCK))
        with e.loop(blocks) as block:
            at = e.offset(e.integer(0), block, BLOCK * size)
            for row in ahead:
                e.prefetch(e.ir.add(row, at), to_write=True)
            start = e.offset(src, block, e.ir.mul(pitch, e.integer(BLOCK)))
            columns = [
                e.load_as_f32(e.offset(start, e.integer(i), pitch), F32, BLOCK)
                for i in range(BLOCK)
            ]
            for row, values in zip(rows, e.transpose(columns), strict=True):
                e.store_from_f32(values, e.ir.add(row, at), kind)
        done = e.ir.mul(blocks, e.integer(BLOCK))
        with e.loop(e.ir.sub(D, done)) as rest:
            d = e.ir.add(done, rest)
            start = e.offset(src, d, pitch)
            for i, row in enumerate(rows):
                value = e.load_as_f32(start, F32, 1, 4 * i)
                e.store_from_f32(value, e.offset(row, d, size), kind)

    return scatter


def _write(kind: int) -> Any:
    """row[d] = src[d] · c + 0 for D elements, rounded to the storage type; + 0 leaves one kind of
    zero."""
    size = ITEMSIZE[kind]

    @emitter(i64, i64, i64, f32)
    def write(e: Emit, src, D, row, c):
        def some(first: ir.Value, count: ir.Value, width: int) -> None:
            with e.loop(count) as i:
                d = e.ir.add(first, e.ir.mul(i, e.integer(width)))
                x = e.load_as_f32(e.offset(src, d, 4), F32, width)
                x = e.ir.fadd(e.ir.fmul(x, e.splat(c, width)), e.constant(0.0, width))
                e.store_from_f32(x, e.offset(row, d, size), kind)

        vectors = e.ir.sdiv(D, e.integer(WIDTH))
        done = e.ir.mul(vectors, e.integer(WIDTH))
        some(e.integer(0), vectors, WIDTH)
        some(done, e.ir.sub(D, done), 1)

    return write


def _copy(kind: int, chunk: int) -> Any:
    """n rows in chunks: chunk j of row i goes to dst + i·pitch + j·step; zeros beyond D.

    Returns a number that is 0 if everything was finite and NaN otherwise.
    """
    size = ITEMSIZE[kind]

    @emitter(i64, i64, i64, i64, i64, i64, returns=f32)
    def copy(e: Emit, table, n, D, dst, pitch, step):
        zero, bits = e.constant(0.0, chunk), vector(chunk, LLVM_I32)
        # x − x and x·0 are 0 for finite x and NaN otherwise. Bits are joined faster than added.
        witness, last = e.variable(e.ir.bitcast(zero, bits)), e.variable(e.constant(0.0, 1))
        whole = e.ir.sdiv(D, e.integer(chunk))
        done = e.ir.mul(whole, e.integer(chunk))
        rest = e.ir.sub(D, done)
        with e.loop(n) as i:
            row = e.load(e.offset(table, i, 8), 0, LLVM_I64)
            to = e.offset(dst, i, pitch)
            with e.loop(whole) as j:
                value = e.load_as_f32(e.offset(row, j, chunk * size), kind, chunk)
                e.store(value, e.offset(to, j, step))
                apart = e.ir.bitcast(e.ir.fsub(value, value), bits)
                witness.set(e.ir.or_(witness.get(), apart))
            with e.ir.if_then(e.ir.icmp_signed(">", rest, e.integer(0))):
                tail = e.offset(to, whole, step)
                e.store(zero, tail)
                with e.loop(rest) as j:
                    value = e.load_as_f32(e.offset(row, e.ir.add(done, j), size), kind, 1)
                    e.store(value, e.offset(tail, j, 4))
                    last.set(e.fma(value, e.constant(0.0, 1), last.get()))
        total, lanes = last.get(), e.ir.bitcast(witness.get(), zero.type)
        for i in range(chunk):
            total = e.ir.fadd(total, e.lane(lanes, i))
        return total

    return copy


def _widen(kind: int) -> Any:
    """n rows widened to dst [n, pitch / 4], zeros up to a whole vector behind D. Rows ``ahead`` of
    each in the table are brought near meanwhile."""
    size = ITEMSIZE[kind]

    @emitter(i64, i64, i64, i64, i64, i64)
    def widen(e: Emit, table, ahead, n, D, dst, pitch):
        whole = e.ir.sdiv(D, e.integer(WIDTH))
        done = e.ir.mul(whole, e.integer(WIDTH))
        rest = e.ir.sub(D, done)
        lines = e.ir.sdiv(e.offset(e.integer(LINE - 1), D, size), e.integer(LINE))
        with e.loop(n) as i:
            row, to = e.load(e.offset(table, i, 8), 0, LLVM_I64), e.offset(dst, i, pitch)
            later = e.load(e.offset(ahead, i, 8), 0, LLVM_I64)
            with e.loop(lines) as line:
                e.prefetch(e.offset(later, line, LINE))
            with e.loop(whole) as j:
                value = e.load_as_f32(e.offset(row, j, WIDTH * size), kind, WIDTH)
                e.store(value, e.offset(to, j, 4 * WIDTH))
            with e.ir.if_then(e.ir.icmp_signed(">", rest, e.integer(0))):
                e.store(e.constant(0.0), e.offset(to, done, 4))
                with e.loop(rest) as j:
                    d = e.ir.add(done, j)
                    value = e.load_as_f32(e.offset(row, d, size), kind, 1)
                    e.store(value, e.offset(to, d, 4))

    return widen


@emitter(i64)
def prefetch_some(e: Emit, ahead):
    """Start bringing the next rows of a list (see `plan_ahead`) into the second-level cache: a few,
    as more would wait for each other, and what comes next for them."""
    table, left, lines, step = (e.load(ahead, 8 * i, LLVM_I64) for i in range(4))
    n = e.ir.select(e.ir.icmp_signed("<", left, step), left, step)
    with e.loop(n) as i:
        row = e.load(e.offset(table, i, 8), 0, LLVM_I64)
        with e.loop(lines) as line:
            e.prefetch(e.offset(row, line, LINE), level=2)
    e.store(e.offset(table, n, 8), ahead)
    e.store(e.ir.sub(left, n), ahead, 8)


_gather_f32, _gather_f16, _gather_bf16 = (_gather_columns(kind) for kind in (F32, F16, BF16))
_scatter_f32, _scatter_f16, _scatter_bf16 = (_scatter_columns(kind) for kind in (F32, F16, BF16))
_write_f32, _write_f16, _write_bf16 = (_write(kind) for kind in (F32, F16, BF16))
_panel_f32, _panel_f16, _panel_bf16 = (_copy(kind, MR) for kind in (F32, F16, BF16))
_widen_f32, _widen_f16, _widen_bf16 = (_widen(kind) for kind in (F32, F16, BF16))
_wide_f32, _wide_f16, _wide_bf16 = (_copy(kind, WIDTH) for kind in (F32, F16, BF16))


@compiled
def gather_columns(kind, table, n, D, dst, pitch):
    """Turn n rows (a multiple of BLOCK) into columns: dst[d, i] = row_i[d]; dst [D, n]."""
    for i in range(0, n, BLOCK):
        if kind == F32:
            _gather_f32(table + 8 * i, D, dst + 4 * i, pitch)
        elif kind == F16:
            _gather_f16(table + 8 * i, D, dst + 4 * i, pitch)
        else:
            _gather_bf16(table + 8 * i, D, dst + 4 * i, pitch)


@compiled
def scatter_columns(kind, table, n, D, src, pitch):
    """row_i[d] = src[d, i] for n rows (a multiple of BLOCK); src [D, n] fp32."""
    for i in range(0, n, BLOCK):
        if kind == F32:
            _scatter_f32(table + 8 * i, D, src + 4 * i, pitch)
        elif kind == F16:
            _scatter_f16(table + 8 * i, D, src + 4 * i, pitch)
        else:
            _scatter_bf16(table + 8 * i, D, src + 4 * i, pitch)


@compiled
def plan_ahead(kind, ahead, table, n, D, steps):
    """Note n rows of D elements that `prefetch_some` will be called for about this many times."""
    size = 4 if kind == F32 else 2
    store_word(table, ahead)
    store_word(n, ahead + 8)
    store_word((size * D + LINE - 1) // LINE, ahead + 16)
    store_word((n + steps - 1) // steps, ahead + 24)


@compiled
def write_scaled(kind, src, D, row, c):
    """row [D] = src [D] fp32 · c."""
    if kind == F32:
        _write_f32(src, D, row, c)
    elif kind == F16:
        _write_f16(src, D, row, c)
    else:
        _write_bf16(src, D, row, c)


@compiled
def gather_panels(kind, table, n, D, dst):
    """n rows (a multiple of MR) as panels of MR interleaved rows: dst [n / MR, D, MR]."""
    for i in range(0, n, MR):
        rows, panel = table + 8 * i, dst + 4 * i * D
        if kind == F32:
            _interleave(rows, D, panel)
        else:
            gather_columns(kind, rows, MR, D, panel, 4 * MR)


@compiled
def copy_panels(kind, table, n, D, dst, panel_rows):
    """n rows cut into panels of MR columns: dst [D / MR, panel_rows, MR]. True if all finite."""
    pitch, step = 4 * MR, 4 * MR * panel_rows
    if kind == F32:
        witness = _panel_f32(table, n, D, dst, pitch, step)
    elif kind == F16:
        witness = _panel_f16(table, n, D, dst, pitch, step)
    else:
        witness = _panel_bf16(table, n, D, dst, pitch, step)
    return witness == f32(0.0)


@compiled
def copy_rows(kind, table, n, D, dst, pitch):
    """n rows widened and zero-padded to whole vectors: dst [n, pitch / 4]. True if all finite."""
    if kind == F32:
        witness = _wide_f32(table, n, D, dst, pitch, 4 * WIDTH)
    elif kind == F16:
        witness = _wide_f16(table, n, D, dst, pitch, 4 * WIDTH)
    else:
        witness = _wide_bf16(table, n, D, dst, pitch, 4 * WIDTH)
    return witness == f32(0.0)


@compiled
def widen_rows(kind, table, ahead, n, D, dst, pitch):
    """n rows widened and zero-padded to whole vectors: dst [n, pitch / 4]. Those of the table
    ``ahead``, whatever they are, are brought near meanwhile."""
    if kind == F32:
        _widen_f32(table, ahead, n, D, dst, pitch)
    elif kind == F16:
        _widen_f16(table, ahead, n, D, dst, pitch)
    else:
        _widen_bf16(table, ahead, n, D, dst, pitch)
