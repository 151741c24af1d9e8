"""Single-lane versions of the tile arithmetic: the same bits, one element at a time."""

from __future__ import annotations

import os

from llvmlite import ir
from numba.core import cgutils, types

from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.simd import Emit, emitter
from lockstep.kernels.cpu.compiler.vectors import (
    BF16,
    F16,
    F32,
    LLVM_F32,
    LLVM_F64,
    LLVM_I32,
    LLVM_I64,
    f32,
    i32,
    i64,
)


@emitter(f32, f32, f32, returns=f32)
def fma(e: Emit, x, y, z):
    return e.fma(x, y, z)


@emitter(f32, returns=f32)
def exp(e: Emit, x):
    return e.exp(x)


@emitter(f32, returns=f32)
def log2(e: Emit, x):
    return e.log2(x)


@emitter(f32, returns=f32)
def tanh(e: Emit, x):
    return e.tanh(x)


@emitter(f32, f32, returns=f32)
def maximum(e: Emit, new, old):
    """The larger one; a NaN in ``new`` is passed over."""
    return e.maximum(new, old)


@emitter(f32, f32, f32, f32, returns=f32)
def pick(e: Emit, x, y, equal, otherwise):
    """``equal if x == y else otherwise``, without a branch."""
    return e.select(e.ir.fcmp_ordered("==", x, y), equal, otherwise)


@emitter(i64, returns=f32)
def load(e: Emit, address):
    return e.load(address, 0, LLVM_F32)


@emitter(f32, i64)
def store(e: Emit, value, address):
    e.store(value, address)


@emitter(i64, returns=i64)
def load_word(e: Emit, address):
    return e.load(address, 0, LLVM_I64)


@emitter(i64, i64)
def store_word(e: Emit, value, address):
    e.store(value, address)


@emitter(i64, i64, returns=i64)
def smaller(e: Emit, x, y):
    """The smaller of two words that differ by less than 2^63: of ``min`` LLVM may make a branch."""
    below = e.ir.sub(x, y)
    return e.ir.add(y, e.ir.and_(below, e.ir.ashr(below, e.integer(63))))


@emitter(i64, i64, returns=i64)
def larger(e: Emit, x, y):
    """The larger of them."""
    below = e.ir.sub(x, y)
    return e.ir.sub(x, e.ir.and_(below, e.ir.ashr(below, e.integer(63))))


@emitter(i64, returns=i32)
def load_int(e: Emit, address):
    return e.load(address, 0, LLVM_I32)


@emitter(i32, i64)
def store_int(e: Emit, value, address):
    e.store(value, address)


@emitter(f32, i64)
def add_f32(e: Emit, value, address):
    e.store(e.ir.fadd(e.load(address, 0, LLVM_F32), value), address)


@emitter(f32, i64)
def add_f64(e: Emit, value, address):
    """Add to a float64 in memory."""
    total = e.load(address, 0, LLVM_F64)
    e.store(e.ir.fadd(total, e.ir.fpext(value, LLVM_F64)), address)


@emitter(i64, returns=f32)
def load_f64(e: Emit, address):
    """A float64, rounded."""
    return e.ir.fptrunc(e.load(address, 0, LLVM_F64), LLVM_F32)


@emitter(f32, returns=types.boolean)
def is_minus_zero(e: Emit, value):
    bits = e.ir.bitcast(value, LLVM_I32)
    return e.ir.icmp_signed("==", bits, ir.Constant(LLVM_I32, -0x80000000))


@emitter(i64, returns=i64)
def fetch_add_one(e: Emit, address):
    """Count up for all threads; returns the count before. Later counters see earlier stores."""
    return e.ir.atomic_rmw("add", e.pointer(address), e.integer(1), "acq_rel")


@emitter(i64, returns=i64)
def load_acquire(e: Emit, address):
    """A word that another thread may write; what it stored before `store_release` is seen after."""
    return e.ir.load_atomic(e.pointer(address), "acquire", 8, typ=LLVM_I64)


@emitter(i64, i64)
def store_release(e: Emit, value, address):
    e.ir.atomic_rmw("xchg", e.pointer(address), value, "release")


@emitter()
def give_way(e: Emit):
    """Let another thread run on this core, if one waits for it."""
    if os.name == "posix":
        signature = ir.FunctionType(LLVM_I32, [])
        e.ir.call(cgutils.get_or_insert_function(e.ir.module, signature, "sched_yield"), [])


def _load_as(kind):
    return emitter(i64, returns=f32)(lambda e, address: e.load_as_f32(address, kind, 1))


def _store_as(kind):
    return emitter(f32, i64)(lambda e, value, address: e.store_from_f32(value, address, kind))


_load_f16, _load_bf16 = _load_as(F16), _load_as(BF16)
_store_f16, _store_bf16 = _store_as(F16), _store_as(BF16)


@compiled
def load_element(kind, address):
    """One tensor element of storage type ``kind``, widened."""
    if kind == F32:
        return load(address)
    if kind == F16:
        return _load_f16(address)
    return _load_bf16(address)


@compiled
def store_element(kind, value, address):
    """One fp32 value rounded to storage type ``kind``."""
    if kind == F32:
        store(value, address)
    elif kind == F16:
        _store_f16(value, address)
    else:
        _store_bf16(value, address)
