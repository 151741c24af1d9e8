"""The types of vectors, and how many numbers the registers and tiles of this machine hold."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types

f32 = types.float32
i32 = types.int32
i64 = types.int64

LLVM_F32 = ir.FloatType()
LLVM_F64 = ir.DoubleType()
LLVM_F16 = ir.HalfType()
LLVM_I16 = ir.IntType(16)
LLVM_I32 = ir.IntType(32)
LLVM_I64 = ir.IntType(64)
LLVM_PTR = ir.PointerType()

# Storage types of tensor elements, by the code that kernels pass around.
F32, F16, BF16 = 0, 1, 2
ITEMSIZE = (4, 2, 2)


def _host_lanes() -> int:
    """How many float32 the widest vector register of this machine holds."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") and features.get("fma") else 4


WIDTH = _host_lanes()
# One matrix tile is MR broadcast rows × NV vectors, held in registers: 24 accumulators of the
# 32 that AVX-512 and NEON have, 12 of AVX2's 16.
MR = 4 if WIDTH == 8 else 8
NV = 3
LANES = NV * WIDTH
# Rows that become columns of a tile are turned by square blocks of so many; LANES is a multiple.
BLOCK = 8 if WIDTH == 16 else 4


def vector(width: int = WIDTH, element: ir.Type = LLVM_F32) -> ir.Type:
    """The LLVM type of ``width`` elements; one element is a plain scalar."""
    return element if width == 1 else ir.VectorType(element, width)


def width_of(value: ir.Value) -> int:
    """How many elements a vector has; a scalar is one."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 1
