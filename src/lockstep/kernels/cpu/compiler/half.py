"""float16 on processors without instructions for it: x86 before F16C, and virtual ones.

LLVM would call functions for each number there that nothing brings with it.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from lockstep.kernels.cpu.compiler.vectors import LLVM_I16, LLVM_I32, vector, width_of

# Places by which float16 and float32 are apart, and their exponents' biases in those of float32.
SHIFT, BIAS = 13, (127 - 15) << 23
# Bits of float32: infinity, the largest multiple of 2 that float16 has no number for, its smallest
# normal number, and 0.5, whose last place is float16's smallest number.
INFINITY, TOO_LARGE, NORMAL, HALF = 0xFF << 23, (127 + 16) << 23, (127 - 14) << 23, 0x3F000000
SIGN, QUIET = 0x8000, 0x7E00


def has_instructions() -> bool:
    """Whether this machine has them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(llvm.get_host_cpu_features().get("f16c"))


def _constant(like: ir.Value, number: int) -> ir.Constant:
    width = width_of(like)
    return ir.Constant(like.type, number if width == 1 else [number] * width)


def widen(e: Any, half: ir.Value) -> ir.Value:
    """float16, as integers of 16 bits, as float32; written by a `simd.Emit`."""
    width = width_of(half)
    bits = e.ir.zext(half, vector(width, LLVM_I32))
    sign = e.ir.shl(e.ir.and_(bits, _constant(bits, SIGN)), _constant(bits, 16))
    size = e.ir.shl(e.ir.and_(bits, _constant(bits, SIGN - 1)), _constant(bits, SHIFT))
    # A product rights the exponent, of subnormal numbers too.
    factor = e.ir.bitcast(_constant(bits, (127 + 112) << 23), vector(width))
    scaled = e.ir.fmul(e.ir.bitcast(size, vector(width)), factor)
    finite = e.ir.icmp_unsigned("<", size, _constant(bits, 0x7C00 << SHIFT))
    other = e.ir.or_(size, _constant(bits, INFINITY))
    found = e.select(finite, e.ir.bitcast(scaled, bits.type), other)
    return e.ir.bitcast(e.ir.or_(found, sign), vector(width))


def narrow(e: Any, value: ir.Value) -> ir.Value:
    """float32 as the nearest float16, the even one from the middle, as integers of 16 bits."""
    width = width_of(value)
    bits = e.ir.bitcast(value, vector(width, LLVM_I32))
    sign = e.ir.and_(e.ir.lshr(bits, _constant(bits, 16)), _constant(bits, SIGN))
    size = e.ir.and_(bits, _constant(bits, 0x7FFFFFFF))
    odd = e.ir.and_(e.ir.lshr(size, _constant(bits, SHIFT)), _constant(bits, 1))
    rounded = e.ir.add(e.ir.add(size, odd), _constant(bits, (1 << (SHIFT - 1)) - 1 - BIAS))
    normal = e.ir.lshr(rounded, _constant(bits, SHIFT))
    half = e.ir.bitcast(_constant(bits, HALF), vector(width))
    shifted = e.ir.fadd(e.ir.bitcast(size, vector(width)), half)
    subnormal = e.ir.sub(e.ir.bitcast(shifted, bits.type), _constant(bits, HALF))
    is_small = e.ir.icmp_unsigned("<", size, _constant(bits, NORMAL))
    found = e.select(is_small, subnormal, normal)
    is_large = e.ir.icmp_unsigned(">=", size, _constant(bits, TOO_LARGE))
    found = e.select(is_large, _constant(bits, INFINITY >> SHIFT & 0x7C00), found)
    is_nan = e.ir.icmp_unsigned(">", size, _constant(bits, INFINITY))
    found = e.select(is_nan, _constant(bits, QUIET), found)
    return e.ir.trunc(e.ir.or_(found, sign), vector(width, LLVM_I16))
