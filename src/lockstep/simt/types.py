"""The types of the language.

Computation happens in `int32`, `uint32`, `bool_` and `float32`. `float16` and `bfloat16` are
storage types: they widen exactly to `float32` as soon as arithmetic touches them, and narrowing
is always spelled (`float16(x)`). There is no 64-bit type, so there can be no silent one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

WARP_SIZE = 32
MAX_THREADS = 1024  # of a block
FRAGMENT = 16  # rows, columns and depth of a warp matrix fragment, m16n16k16
SECTOR = 32  # bytes that global memory moves at a time
SHARED_ALIGNMENT = 32  # bytes, what a fragment asks for; vectors and copies ask for less


@dataclass(frozen=True)
class Scalar:
    """A scalar type. Subscripting makes an array type, as in numba: `float32[:, :]`."""

    name: str
    kind: str  # "int", "uint", "bool" or "float"
    bits: int

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return max(self.bits // 8, 1)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_storage_only(self) -> bool:
        return self.bits == 16

    def __getitem__(self, dims: slice | tuple[slice, ...]) -> ArrayType:
        return ArrayType(self, len(dims) if isinstance(dims, tuple) else 1)

    def __call__(self, value: object) -> object:
        raise TypeError(f"{self.name}(...) converts a value inside a kernel; outside it is a type")

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ArrayType:
    """An array in global memory with `ndim` dimensions."""

    dtype: Scalar
    ndim: int

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join([':'] * self.ndim)}]"


@dataclass(frozen=True)
class VectorType:
    """`width` neighbouring elements held in registers by one thread, as CUDA's float4."""

    dtype: Scalar
    width: int

    @property
    def size(self) -> int:
        return self.dtype.size * self.width

    def __repr__(self) -> str:
        return f"{self.dtype}x{self.width}"


@dataclass(frozen=True)
class FragmentType:
    """A 16x16 matrix spread over the registers of one warp."""

    role: str  # "a", "b" or "accumulator"
    dtype: Scalar
    layout: str  # memory layout an operand was loaded from, "row" or "col"; "" for accumulators

    def __repr__(self) -> str:
        return f"fragment_{self.role}<{self.dtype}{', ' + self.layout if self.layout else ''}>"


Type = Scalar | VectorType | FragmentType

int32 = Scalar("int32", "int", 32)
uint32 = Scalar("uint32", "uint", 32)
bool_ = Scalar("bool_", "bool", 8)
float32 = Scalar("float32", "float", 32)
float16 = Scalar("float16", "float", 16)
bfloat16 = Scalar("bfloat16", "float", 16)
SCALARS = {t.name: t for t in (int32, uint32, bool_, float32, float16, bfloat16)}
ACCUMULATOR = FragmentType("accumulator", float32, "")


def scalar_named(obj: object) -> Scalar | None:
    """The scalar type `obj` stands for: ours, a NumPy or torch dtype of the same name, or None.

    >>> import torch
    >>> scalar_named(torch.bfloat16)
    bfloat16
    """
    if isinstance(obj, Scalar):
        return obj
    if obj is bool:
        return bool_
    name = getattr(obj, "__name__", None) or str(obj).removeprefix("torch.")
    return bool_ if name == "bool" else SCALARS.get(name)


def fits(value: int, dtype: Scalar) -> bool:
    """Whether a Python integer is a value of `dtype`."""
    low, high = (0, 2**32) if dtype.kind == "uint" else (-(2**31), 2**31)
    return low <= value < high


def wrap(value: int, dtype: Scalar) -> int:
    """`value` modulo 2**32, in the range of `dtype`."""
    value &= 0xFFFFFFFF
    return value - 2**32 if dtype.kind == "int" and value >= 2**31 else value


def round_to_float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python float. Raises OverflowError beyond its range."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
