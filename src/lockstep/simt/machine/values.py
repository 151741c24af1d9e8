"""Numbers as a GPU computes them: wrap-around, conversions, roundings.

A value is a Python int or bool, an `np.float32`, or an array of int32, uint32, bool or float32
that broadcasts to (threads, blocks). 16-bit floats are held as the float32 they equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt.types import Scalar, bfloat16, bool_, float16, float32, int32, uint32

Value = Any  # int | bool | np.float32 | np.ndarray

NUMPY = {
    int32: np.dtype(np.int32),
    uint32: np.dtype(np.uint32),
    bool_: np.dtype(np.bool_),
    float32: np.dtype(np.float32),
    float16: np.dtype(np.float32),
    bfloat16: np.dtype(np.float32),
}
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def i32(x: Value) -> Value:
    """Wrap a Python int to int32; arrays wrap by themselves."""
    if type(x) is int and not -0x80000000 <= x <= 0x7FFFFFFF:
        return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    return x


def u32(x: Value) -> Value:
    return x & 0xFFFFFFFF if type(x) is int else x


def logical_not(x: Value) -> Value:
    return ~x if isinstance(x, np.ndarray) else not x


def logical_and(x: Value, y: Value) -> Value:
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return np.logical_and(x, y)
    return x and y


def logical_or(x: Value, y: Value) -> Value:
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return np.logical_or(x, y)
    return x or y


def select(test: Value, x: Value, y: Value, dtype: Scalar) -> Value:
    if isinstance(test, np.ndarray):
        return np.where(test, x, y).astype(NUMPY[dtype], copy=False)
    return x if test else y


def floor_divide(x: Value, y: Value) -> Value:
    """Python's //; zero where the divisor is zero, which a GPU leaves undefined."""
    if type(x) is int and type(y) is int:
        return x // y if y else 0
    return np.floor_divide(x, y)


def remainder(x: Value, y: Value) -> Value:
    if type(x) is int and type(y) is int:
        return x % y if y else 0
    return np.remainder(x, y)


def minimum(x: Value, y: Value) -> Value:
    """CUDA's min: of a NaN and a number, the number."""
    if type(x) is int and type(y) is int:
        return min(x, y)
    return np.fmin(x, y)


def maximum(x: Value, y: Value) -> Value:
    if type(x) is int and type(y) is int:
        return max(x, y)
    return np.fmax(x, y)


def absolute(x: Value) -> Value:
    return i32(abs(x)) if type(x) is int else np.abs(x)


def fma(x: Value, y: Value, z: Value) -> Value:
    """x * y + z with one rounding.

    The product is exact in float64. The sum is rounded to odd there, and float64 has enough bits
    left that rounding it again to float32 cannot go wrong.
    """
    product = np.multiply(x, y, dtype=np.float64)
    z = np.asarray(z, np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    inexact = (error != 0) & even & np.isfinite(total)
    result = np.where(inexact, np.nextafter(total, towards), total).astype(np.float32)
    return result if result.ndim else np.float32(result)


def ct_exp2(x: Value) -> Value:
    """2^x, without subnormal results."""
    result = np.exp2(x)
    return np.where(result < SMALLEST_NORMAL, np.float32(0), result)[()]


def rsqrt(x: Value) -> Value:
    return np.float32(1) / np.sqrt(x)


def bits(x: Value) -> Value:
    """The 32 bits of an integer, unsigned."""
    return x & 0xFFFFFFFF if type(x) is int else x.view(np.uint32)


def popc(x: Value) -> Value:
    x = bits(x)
    return x.bit_count() if type(x) is int else np.bitwise_count(x).astype(np.int32)


def clz(x: Value) -> Value:
    x = bits(x)
    if type(x) is int:
        return 32 - x.bit_length()
    # float64 holds 32-bit integers exactly, and its exponent counts their bits
    return (32 - np.frexp(x.astype(np.float64))[1]).astype(np.int32)


def ffs(x: Value) -> Value:
    x = bits(x)
    if type(x) is int:
        return (x & -x).bit_length()
    lowest = x & (~x + np.uint32(1))
    return np.frexp(lowest.astype(np.float64))[1].astype(np.int32)


def brev(x: Value) -> Value:
    if type(x) is int:
        flipped = int(f"{x & 0xFFFFFFFF:032b}"[::-1], 2)
        return i32(flipped) if x < 0 else flipped
    b = x.view(np.uint32)
    out = np.zeros_like(b)
    for i in range(32):
        out |= ((b >> np.uint32(i)) & np.uint32(1)) << np.uint32(31 - i)
    return out.view(x.dtype)


def round_to_half(x: Value) -> Value:
    return np.float32(np.float16(x)) if not isinstance(x, np.ndarray) else _half(x)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as uint16."""
    b = x.view(np.uint32)
    rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (b >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def from_bfloat_bits(b: np.ndarray) -> np.ndarray:
    return (b.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat(x: Value) -> Value:
    if isinstance(x, np.ndarray):
        return from_bfloat_bits(bfloat_bits(x))
    return from_bfloat_bits(bfloat_bits(np.array([x], np.float32)))[0]


def cast(x: Value, source: Scalar, target: Scalar) -> Value:
    """A value conversion as CUDA does it: towards zero and saturating from float to integer."""
    scalar = not isinstance(x, np.ndarray)
    if target == bool_:
        return bool(x) if scalar else x != 0
    if target == float16:
        return round_to_half(cast(x, source, float32))
    if target == bfloat16:
        return round_to_bfloat(cast(x, source, float32))
    if target == float32:
        return np.float32(x) if scalar else x.astype(np.float32, copy=False)
    if source.is_float:
        low, high = (0, 2**32 - 1) if target == uint32 else (-(2**31), 2**31 - 1)
        wide = np.nan_to_num(np.asarray(x, np.float64), nan=0.0, posinf=high, neginf=low)
        whole = np.clip(np.trunc(wide), low, high)
        return int(whole) if scalar else whole.astype(NUMPY[target])
    if scalar:
        return i32(int(x)) if target == int32 else u32(int(x))
    return x.astype(NUMPY[target])


def bitcast(x: Value, source: Scalar, target: Scalar) -> Value:
    """The bits of `x` read as another 32-bit type, or as the other 16-bit float."""
    if target.bits == 16:
        if target == source:
            return x
        a = np.atleast_1d(np.asarray(x, np.float32))
        if source == float16:
            out = from_bfloat_bits(a.astype(np.float16).view(np.uint16))
        else:
            out = bfloat_bits(a).view(np.float16).astype(np.float32)
        return out if isinstance(x, np.ndarray) else out[0]
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(NUMPY[target])
    out = np.array([x], NUMPY[source]).view(NUMPY[target])[0]
    return out if target.is_float else int(out)
