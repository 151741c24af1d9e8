"""The matrix units of x86 processors (AMX): products of bfloat16, summed in float32.

A tile register holds 16 rows of 64 bytes. One instruction takes a tile of 16 rows of 32 numbers,
and one of 16 columns of 32, and adds 32 products to each of 256 sums: those of the numbers at even
places in ascending order, those at odd places too, each by fused multiply-adds that start from
zero, and then both sums to the one before. Subnormal numbers count as zero in all of this.

So a number of 32 bits that is part of a column holds two: a *pair*, the even place in its low half.

`LOCKSTEP_EMULATE_AMX=1` has the same sums computed without such units, in several times the time,
on processors with AVX-512.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types

from lockstep.kernels.cpu.compiler.entry import X86_MODES
from lockstep.kernels.cpu.compiler.simd import Emit, Variable, emitter
from lockstep.kernels.cpu.compiler.vectors import (
    LANES,
    LLVM_I32,
    LLVM_PTR,
    NV,
    WIDTH,
    i64,
    vector,
)

# Rows of a tile, bytes of one, and how many numbers of 16 bits these are.
TILE, TILE_BYTES, DEPTH = 16, 64, 32
ROW = 4 * LANES
EMULATED = os.environ.get("LOCKSTEP_EMULATE_AMX", "0") not in ("", "0")
FEATURES = ("amx-tile", "amx-bf16")
# Linux saves tiles for processes that have asked for it alone: `arch_prctl` of x86_64, what asks
# (ARCH_REQ_XCOMP_PERM), and the name of their data among the processor's states.
ARCH_PRCTL, ASK, TILE_DATA = 158, 0x1023, 18
# The bits of the upper one of two numbers.
UPPER = -0x10000
# Tiles 0 … NV − 1 are sums, one more has rows, and NV more have columns.
ROWS_TILE, COLUMNS = NV, NV + 1


@lru_cache(maxsize=1)
def refusal() -> str | None:
    """Why the matrix units cannot be used, or None."""
    if EMULATED:
        return None if WIDTH == 16 else "emulates AMX on processors with AVX-512"
    features = llvm.get_host_cpu_features()
    if platform.system() != "Linux" or not all(features.get(name) for name in FEATURES):
        return "needs a processor with AMX, and Linux"
    with suppress(AttributeError):
        if ctypes.CDLL(None).syscall(ARCH_PRCTL, ASK, TILE_DATA) == 0:
            return None
    return "the system does not let this process use AMX"


def tile_emitter(*arguments: types.Type, returns: types.Type = types.void) -> Callable[..., Any]:
    """`emitter` for what kernels with tiles alone do, with vectors of 16 numbers. Where vectors are
    shorter nothing is emitted: other kernels have the same parts, but never get there."""

    def leave_out(e: Emit, *values: ir.Value) -> ir.Value | None:
        return None if returns is types.void else ir.Constant(ir.IntType(1), 0)

    emitted = emitter(*arguments, returns=returns)
    return emitted if WIDTH == TILE else lambda _: emitted(leave_out)


def _call(e: Emit, name: str, *arguments: int | ir.Value) -> None:
    """One of LLVM's tile instructions; numbers name registers."""
    byte = ir.IntType(8)
    values = [ir.Constant(byte, x) if isinstance(x, int) else x for x in arguments]
    signature = ir.FunctionType(ir.VoidType(), [x.type for x in values])
    e.intrinsic(f"x86.{name}", signature, values)


def _multiply_by_tiles(e: Emit, rows, pitch, columns, sums, steps) -> None:
    for j in range(NV):
        _call(e, "tilezero", j)
    with e.loop(steps) as step:
        here = e.offset(rows, step, TILE_BYTES)
        _call(e, "tileloadd64", ROWS_TILE, e.pointer(here), pitch)
        for j in range(NV):
            at = e.pointer(e.offset(columns, step, TILE * ROW), TILE_BYTES * j)
            _call(e, "tileloadd64", COLUMNS + j, at, e.integer(ROW))
            _call(e, "tdpbf16ps", j, ROWS_TILE, COLUMNS + j)
    for j in range(NV):
        _call(e, "tilestored64", j, e.pointer(sums, TILE_BYTES * j), e.integer(ROW))


def begin_chains(e: Emit, n: int) -> list[list[Variable]]:
    """The two chains of n vectors of sums: of even places, and of odd ones."""
    return [[e.variable(e.constant(0.0)) for _ in range(2)] for _ in range(n)]


def joined(e: Emit, total: ir.Value, chains: list[Variable]) -> ir.Value:
    """A sum with its two chains, which have DEPTH products between them."""
    even, odd = (chain.get() for chain in chains)
    return e.ir.fadd(total, e.ir.fadd(even, odd))


def halves(e: Emit, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The numbers at even places and those at odd ones, as float32."""
    integers = pairs.type
    high = ir.Constant(integers, [UPPER] * integers.count)
    return e.float_of(pairs, 16), e.ir.bitcast(e.ir.and_(pairs, high), vector(integers.count))


def _emulate(e: Emit, rows, pitch, columns, sums, steps) -> None:
    with e.loop(e.integer(TILE)) as i:
        totals = [e.variable(e.constant(0.0)) for _ in range(NV)]
        row = e.offset(rows, i, pitch)
        with e.loop(steps) as step:
            chains = begin_chains(e, NV)
            with e.loop(e.integer(TILE)) as k:
                place = e.ir.add(e.ir.mul(step, e.integer(TILE)), k)
                left = e.splat(e.load(e.offset(row, place, 4), 0, LLVM_I32))
                column = e.offset(columns, place, ROW)
                for j in range(NV):
                    right = e.load(column, TILE_BYTES * j, vector(WIDTH, LLVM_I32))
                    _extend(e, chains[j], left, right)
            for total, pair in zip(totals, chains, strict=True):
                total.set(joined(e, total.get(), pair))
        for j, total in enumerate(totals):
            e.store(total.get(), e.offset(sums, i, ROW), TILE_BYTES * j)


def _extend(e: Emit, chains: list[Variable], left: ir.Value, right: ir.Value) -> None:
    for chain, x, y in zip(chains, halves(e, left), halves(e, right), strict=True):
        chain.set(e.fma(x, y, chain.get()))


@contextmanager
def flushing(e: Emit) -> Iterator[None]:
    """Here subnormal numbers count as zero, as they do for the units. What is inside has to load
    what it computes with, and to store what it computes, in a loop: other instructions may move."""
    signature = ir.FunctionType(ir.VoidType(), [LLVM_PTR])
    before, needed = (cgutils.alloca_once(e.ir, LLVM_I32) for _ in range(2))
    e.ir.store(ir.Constant(LLVM_I32, X86_MODES[True]), needed)
    e.intrinsic("x86.sse.stmxcsr", signature, [before])
    e.intrinsic("x86.sse.ldmxcsr", signature, [needed])
    yield
    e.intrinsic("x86.sse.ldmxcsr", signature, [before])


@tile_emitter(i64, i64, i64, i64, i64, i64)
def multiply(e: Emit, rows, pitch, columns, sums, n, steps):
    """sums [TILE · n, LANES] = rows [TILE · n, DEPTH · steps] · columns [DEPTH · steps, LANES],
    which are pairs [TILE · steps, LANES]; rows are ``pitch`` bytes apart."""
    with flushing(e) if EMULATED else nullcontext(), e.loop(n) as i:
        block = e.offset(rows, i, e.ir.mul(pitch, e.integer(TILE)))
        product = _emulate if EMULATED else _multiply_by_tiles
        product(e, block, pitch, columns, e.offset(sums, i, TILE * ROW), steps)
