"""How C++ spells the language's types, numbers and names."""

from __future__ import annotations

import math

from lockstep.simt.types import (
    FragmentType,
    Scalar,
    Type,
    VectorType,
    bfloat16,
    bool_,
    float16,
    float32,
    int32,
    round_to_float32,
    uint32,
)

SCALARS = {
    int32: "int",
    uint32: "unsigned",
    bool_: "bool",
    float32: "float",
    float16: "__half",
    bfloat16: "__nv_bfloat16",
}
BUILTIN_VECTORS = {int32: "int", uint32: "uint", float32: "float"}

# What a Python name must not be called in C++: keywords, and what the emitted code itself calls.
_TAKEN = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept
    const constexpr const_cast continue decltype default delete do double dynamic_cast else enum
    explicit export extern false float for friend goto if inline int long mutable namespace new
    noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast return short signed sizeof static static_assert static_cast struct switch
    template this thread_local throw true try typedef typeid typename union unsigned using virtual
    void volatile wchar_t while xor xor_eq

    abs ceilf exp2f expf fabsf floorf fmaf fmaxf fminf log2f logf max min rsqrtf sqrtf tanhf
    atomicAdd atomicAnd atomicCAS atomicExch atomicMax atomicMin atomicOr atomicSub atomicXor
    blockDim blockIdx gridDim threadIdx warpSize nvcuda wmma
    ct_select ct_select_vector floor_div floor_mod lane_id warp_id shared_memory Vector Accumulator
    load_shared NULL
"""
RESERVED = frozenset(_TAKEN.split())
# Names CUDA's headers take at file scope; a local variable may hide them.
HEADER_TYPES = frozenset(("half", "half2", "nv_bfloat16", "nv_bfloat162"))


def c_name(name: str) -> str:
    """`name`, with an underscore after it where C++ reserves it."""
    return f"{name}_" if name in RESERVED else name


def constant_name(name: str) -> str:
    """`name` for a constant at file scope, with an underscore where a CUDA header has it."""
    return f"{name}_" if name in HEADER_TYPES else c_name(name)


def c_type(dtype: Type) -> str:
    if isinstance(dtype, VectorType):
        if dtype.dtype in BUILTIN_VECTORS:
            return f"{BUILTIN_VECTORS[dtype.dtype]}{dtype.width}"
        return f"Vector<{SCALARS[dtype.dtype]}, {dtype.width}>"
    if isinstance(dtype, FragmentType):
        return fragment_name(dtype)
    return SCALARS[dtype]


def fragment_name(dtype: FragmentType) -> str:
    """The alias of a fragment type: `Accumulator`, `RowAHalf`, `ColBBf16`, ..."""
    if dtype.role == "accumulator":
        return "Accumulator"
    kind = "Half" if dtype.dtype == float16 else "Bf16"
    return f"{dtype.layout.capitalize()}{dtype.role.upper()}{kind}"


def fragment_alias(dtype: FragmentType) -> str:
    """The declaration of that alias."""
    use = "accumulator" if dtype.role == "accumulator" else f"matrix_{dtype.role}"
    layout = f", wmma::{dtype.layout}_major" if dtype.layout else ""
    shape = f"wmma::{use}, 16, 16, 16, {SCALARS[dtype.dtype]}{layout}"
    return f"using {fragment_name(dtype)} = wmma::fragment<{shape}>;"


def number(value: int | float | bool, dtype: Scalar) -> str:
    """A literal.

    >>> number(0.1, float32), number(0xFFFFFFFF, uint32), number(-1, int32)
    ('0.1f', '0xffffffffu', '-1')
    """
    if dtype == bool_:
        return "true" if value else "false"
    if dtype == uint32:
        return f"{value:#x}u" if value > 0xFFFF else f"{value}u"
    if dtype == int32:
        return "(-2147483647 - 1)" if value == -(2**31) else str(value)
    if math.isnan(value):
        return "CUDART_NAN_F"
    if math.isinf(value):
        return "CUDART_INF_F" if value > 0 else "-CUDART_INF_F"
    return f"{_shortest(float(value))}f"


def _shortest(value: float) -> str:
    """The fewest digits that still give this float32."""
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        try:
            if round_to_float32(float(text)) == value:
                return repr(float(text))
        except OverflowError:  # rounded up beyond the largest float32
            continue
    return repr(value)


def constant_type(value: int | float | bool) -> Scalar:
    """The type the front end gives a named constant."""
    if isinstance(value, bool):
        return bool_
    if isinstance(value, int):
        return int32 if value < 2**31 else uint32
    return float32
