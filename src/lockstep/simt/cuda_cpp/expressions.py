"""Expressions: typed nodes to C++ text with no more parentheses than it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lockstep.simt import ir
from lockstep.simt.types import FragmentType, Scalar, VectorType, bfloat16, float16, float32, int32

from .spelling import BUILTIN_VECTORS, SCALARS, c_name, c_type, constant_name, number

# How tightly C++ operators bind.
ATOM, UNARY, TERNARY = 16, 15, 2
BINDING = {
    "*": 13,
    "/": 13,
    "%": 13,
    "+": 12,
    "-": 12,
    "<<": 11,
    ">>": 11,
    "<": 9,
    "<=": 9,
    ">": 9,
    ">=": 9,
    "==": 8,
    "!=": 8,
    "&": 7,
    "^": 6,
    "|": 5,
    "&&": 4,
    "||": 3,
}
BITWISE = ("<<", ">>", "&", "|", "^")
# Their low 32 bits do not depend on whether the operands are signed.
SIGN_BLIND = ("+", "-", "*", "<<", "&", "|", "^")

FLOAT_MATH = {
    "min": "fminf",
    "max": "fmaxf",
    "abs": "fabsf",
    "exp": "expf",
    "exp2": "exp2f",
    "ct_exp2": "ct_exp2",
    "log": "logf",
    "log2": "log2f",
    "sqrt": "sqrtf",
    "rsqrt": "rsqrtf",
    "tanh": "tanhf",
    "floor": "floorf",
    "ceil": "ceilf",
    "fma": "fmaf",
}
INTEGER_MATH = {"popc": "__popc", "clz": "__clz", "ffs": "__ffs", "brev": "__brev"}
SHUFFLES = {
    "idx": "__shfl_sync",
    "up": "__shfl_up_sync",
    "down": "__shfl_down_sync",
    "xor": "__shfl_xor_sync",
}
ATOMICS = {
    "add": "atomicAdd",
    "sub": "atomicSub",
    "min": "atomicMin",
    "max": "atomicMax",
    "and": "atomicAnd",
    "or": "atomicOr",
    "xor": "atomicXor",
    "exch": "atomicExch",
    "cas": "atomicCAS",
}
TO_FLOAT = {float16: "__half2float", bfloat16: "__bfloat162float"}
FROM_FLOAT = {float16: "__float2half_rn", bfloat16: "__float2bfloat16_rn"}
BITCASTS = {
    (float32, "int"): "__float_as_int",
    (float32, "uint"): "__float_as_uint",
    ("int", float32): "__int_as_float",
    ("uint", float32): "__uint_as_float",
}


class Code(NamedTuple):
    """C++ text and how tightly its outermost operator binds."""

    text: str
    binding: int = ATOM


class Expressions:
    """Emits expressions. Notes in `needs` which headers and helpers they call for.

    CUDA's threadIdx and its like are unsigned. `signed` says that a reader of the text minds: it
    compares, divides or converts, and the value may be negative. Everywhere else the cast is left
    out, as a person would.
    """

    def __init__(self, strided: frozenset[str]):
        self.strided = strided  # global arrays whose last dimension is not contiguous
        self.needs: set[str] = set()
        self.strides: set[tuple[str, int]] = set()  # (array, axis) that the launch must pass
        self.extents: set[tuple[str, int]] = set()

    def expr(self, expr: ir.Expr, signed: bool = False) -> str:
        """`expr` where any operator may stand."""
        return self.code(expr, signed).text

    def within(self, expr: ir.Expr, binding: int, signed: bool = False) -> str:
        """`expr` as an operand of something that binds as tightly as `binding`."""
        code = self.code(expr, signed)
        return code.text if code.binding >= binding else f"({code.text})"

    def code(self, expr: ir.Expr, signed: bool) -> Code:
        emit: Callable[[ir.Expr, bool], Code] = getattr(self, f"code_{type(expr).__name__.lower()}")
        return emit(expr, signed)

    def call(self, function: str, *args: ir.Expr | str, signed: bool = True) -> Code:
        texts = [a if isinstance(a, str) else self.expr(a, signed) for a in args]
        return Code(f"{function}({', '.join(texts)})")

    # Leaves

    def code_literal(self, expr: ir.Literal, signed: bool) -> Code:
        assert expr.const is not None
        assert isinstance(expr.type, Scalar)
        text = number(expr.const, expr.type)
        if "CUDART" in text:
            self.needs.add("infinity")
        return Code(text, UNARY if text.startswith("-") else ATOM)

    def code_namedconst(self, expr: ir.NamedConst, signed: bool) -> Code:
        return Code(constant_name(expr.name))

    def code_var(self, expr: ir.Var, signed: bool) -> Code:
        return Code(c_name(expr.name))

    def code_special(self, expr: ir.Special, signed: bool) -> Code:
        if expr.name in ("laneid", "warpid"):
            self.needs.add("lane_id")
            return Code("lane_id()" if expr.name == "laneid" else "warp_id()")
        return Code(f"int({expr.name})" if signed else expr.name)

    def code_dim(self, expr: ir.Dim, signed: bool) -> Code:
        self.extents.add((expr.array.name, expr.axis))
        return Code(extent_name(expr.array, expr.axis))

    # Operators

    def code_unary(self, expr: ir.Unary, signed: bool) -> Code:
        operand = self.within(expr.operand, UNARY, signed)
        if expr.op == "not":
            return Code(f"!{operand}", UNARY)
        space = " " if operand.startswith(expr.op) else ""
        return Code(f"{expr.op}{space}{operand}", UNARY)

    def code_binary(self, expr: ir.Binary, signed: bool) -> Code:
        op = expr.op
        if op not in SIGN_BLIND:
            signed = not (expr.left.nonneg and expr.right.nonneg)
        if op in ("//", "%"):
            if signed and isinstance(expr.const, int) and isinstance(expr.type, Scalar):
                return Code(number(expr.const, expr.type), UNARY)
            if signed:
                function = "floor_div" if op == "//" else "floor_mod"
                self.needs.add(function)
                return self.call(function, expr.left, expr.right)
            op = "/" if op == "//" else op
        binding = BINDING[op]
        sides = []
        for side, needed in ((expr.left, binding), (expr.right, binding + 1)):
            # few readers know how shifts and bitwise operators bind among each other
            mixes = op in BITWISE and isinstance(side, ir.Binary) and side.op != op
            sides.append(self.within(side, UNARY if mixes else needed, signed))
        return Code(f" {op} ".join(sides), binding)

    def code_compare(self, expr: ir.Compare, signed: bool) -> Code:
        binding = BINDING[expr.op]
        mixed = not (expr.left.nonneg and expr.right.nonneg)
        left = self.within(expr.left, binding, mixed)
        return Code(f"{left} {expr.op} {self.within(expr.right, binding + 1, mixed)}", binding)

    def code_boolop(self, expr: ir.BoolOp, signed: bool) -> Code:
        op = "&&" if expr.op == "and" else "||"
        # `a || b && c` is legal C++, and every compiler warns
        inside = BINDING["=="] if op == "||" else BINDING[op]
        parts = []
        for operand in (expr.left, expr.right):
            same = isinstance(operand, ir.BoolOp) and operand.op == expr.op
            parts.append(self.within(operand, BINDING[op] if same else inside))
        return Code(f" {op} ".join(parts), BINDING[op])

    def code_select(self, expr: ir.Select, signed: bool) -> Code:
        if expr.constant_time:
            self.needs.add("ct_select")
            if isinstance(expr.type, VectorType):
                self.needs.add("ct_select_vector")
                return self.call("ct_select_vector", expr.test, expr.if_true, expr.if_false)
            if expr.type in (float16, bfloat16):
                self.needs.add("ct_select_fp16" if expr.type == float16 else "ct_select_bf16")
            return self.call("ct_select", expr.test, expr.if_true, expr.if_false)
        arms = [self.within(e, TERNARY + 1, signed) for e in (expr.if_true, expr.if_false)]
        return Code(f"{self.within(expr.test, TERNARY + 1)} ? {arms[0]} : {arms[1]}", TERNARY)

    # Conversions

    def code_cast(self, expr: ir.Cast, signed: bool) -> Code:
        source, target = expr.operand.type, expr.type
        assert isinstance(source, Scalar)
        assert isinstance(target, Scalar)
        self.note_type(target)
        if isinstance(expr.operand, ir.Literal) and expr.const is not None:
            return Code(number(expr.const, target))
        operand = self.expr(expr.operand, signed=target.is_float and not expr.operand.nonneg)
        if source.is_storage_only:
            operand = f"{TO_FLOAT[source]}({operand})"
            source = float32
        if source == target:
            return Code(operand)
        if target.is_storage_only:
            value = operand if source == float32 else f"float({operand})"
            return Code(f"{FROM_FLOAT[target]}({value})")
        return Code(f"{SCALARS[target]}({operand})")

    def code_bitcast(self, expr: ir.Bitcast, signed: bool) -> Code:
        source, target = expr.operand.type, expr.type
        assert isinstance(source, Scalar)
        assert isinstance(target, Scalar)
        if source == target:
            return self.code(expr.operand, signed)
        if source == float16:
            return self.call("__ushort_as_bfloat16", f"__half_as_ushort({self.expr(expr.operand)})")
        if source == bfloat16:
            return self.call("__ushort_as_half", f"__bfloat16_as_ushort({self.expr(expr.operand)})")
        if source == float32:
            return self.call(BITCASTS[source, target.kind], expr.operand)
        if target == float32:
            return self.call(BITCASTS[source.kind, target], expr.operand)
        return self.call(SCALARS[target], expr.operand)

    # Functions

    def code_math(self, expr: ir.Math, signed: bool) -> Code:
        if expr.name in INTEGER_MATH:
            code = self.call(INTEGER_MATH[expr.name], expr.args[0])
            # __brev is unsigned
            return Code(f"int({code.text})") if expr.name == "brev" and expr.type == int32 else code
        if expr.type == float32 or isinstance(expr.type, FragmentType):
            if expr.name == "ct_exp2":
                self.needs.add("ct_exp2")
            return self.call(FLOAT_MATH[expr.name], *expr.args)
        return self.call(expr.name, *expr.args)

    def code_shuffle(self, expr: ir.Shuffle, signed: bool) -> Code:
        return self.call(SHUFFLES[expr.mode], expr.mask, expr.value, expr.lane)

    def code_vote(self, expr: ir.Vote, signed: bool) -> Code:
        return self.call(f"__{expr.mode}_sync", expr.mask, expr.predicate)

    def code_atomic(self, expr: ir.Atomic, signed: bool) -> Code:
        operands = [expr.value] if expr.compare is None else [expr.compare, expr.value]
        return self.call(ATOMICS[expr.op], f"&{self.element(expr.array, expr.index)}", *operands)

    # Memory

    def element(self, array: ir.Array, index: tuple[ir.Expr, ...]) -> str:
        """An element as an lvalue."""
        name = c_name(array.name)
        if array.space is not ir.Space.GLOBAL:
            return name + "".join(f"[{self.expr(i, signed=not i.nonneg)}]" for i in index)
        terms: list[str] = []
        for axis, part in enumerate(index):
            mixed = not part.nonneg
            if axis == array.ndim - 1 and array.name not in self.strided:
                # a zero adds nothing to the terms before it
                if part.const != 0 or not terms:
                    terms.append(self.within(part, BINDING["+"], mixed))
            elif part.const != 0:
                self.strides.add((array.name, axis))
                stride = self.stride_name(array, axis)
                terms.append(f"{self.within(part, BINDING['*'], mixed)} * {stride}")
        return f"{name}[{' + '.join(terms) or '0'}]"

    def stride_name(self, array: ir.Array, axis: int) -> str:
        """Elements from one index to the next along an axis; unnumbered if there is only one."""
        strides = array.ndim - (array.name not in self.strided)
        return f"{array.name}_stride{axis if strides > 1 else ''}"

    def code_load(self, expr: ir.Load, signed: bool) -> Code:
        return Code(self.element(expr.array, expr.index))

    def vector_at(self, array: ir.Array, index: tuple[ir.Expr, ...], dtype: VectorType) -> str:
        self.note_type(dtype)
        const = "" if array.written else "const "
        where = self.element(array, index)
        return f"*reinterpret_cast<{const}{c_type(dtype)} *>(&{where})"

    def code_vectorload(self, expr: ir.VectorLoad, signed: bool) -> Code:
        assert isinstance(expr.type, VectorType)
        return Code(self.vector_at(expr.array, expr.index, expr.type), UNARY)

    def code_vectormake(self, expr: ir.VectorMake, signed: bool) -> Code:
        assert isinstance(expr.type, VectorType)
        self.note_type(expr.type)
        if expr.type.dtype in BUILTIN_VECTORS:
            return self.call(f"make_{c_type(expr.type)}", *expr.items)
        items = ", ".join(self.expr(item, signed=True) for item in expr.items)
        return Code(f"{c_type(expr.type)}{{{items}}}")

    def code_vectoritem(self, expr: ir.VectorItem, signed: bool) -> Code:
        dtype = expr.vector.type
        assert isinstance(dtype, VectorType)
        builtin = dtype.dtype in BUILTIN_VECTORS
        item = f".{'xyzw'[expr.item]}" if builtin else f".item[{expr.item}]"
        return Code(self.within(expr.vector, ATOM) + item)

    def note_type(self, dtype: Scalar | VectorType | FragmentType) -> None:
        """Ask for what a type needs declared."""
        if isinstance(dtype, VectorType) and dtype.dtype not in BUILTIN_VECTORS:
            self.needs.add("vector")
        if isinstance(dtype, FragmentType):
            self.needs.add("wmma")
        element = dtype if isinstance(dtype, Scalar) else dtype.dtype
        if element in (float16, bfloat16):
            self.needs.add("fp16" if element == float16 else "bf16")


def extent_name(array: ir.Array, axis: int) -> str:
    """The parameter that holds the extent of a global array along an axis."""
    return f"{array.name}_extent{axis if array.ndim > 1 else ''}"
