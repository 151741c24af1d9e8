"""Expressions of a kernel as Python expressions over the machine's values."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt import ir
from lockstep.simt.types import (
    ACCUMULATOR,
    FragmentType,
    Scalar,
    VectorType,
    float32,
    int32,
    uint32,
)

from . import values
from .records.counters import Site

MATH = {
    "min": values.minimum,
    "max": values.maximum,
    "abs": values.absolute,
    "exp": np.exp,
    "exp2": np.exp2,
    "ct_exp2": values.ct_exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": values.rsqrt,
    "tanh": np.tanh,
    "floor": np.floor,
    "ceil": np.ceil,
    "fma": values.fma,
    "popc": values.popc,
    "clz": values.clz,
    "ffs": values.ffs,
    "brev": values.brev,
}
ARITHMETIC = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
IMPURE = (ir.Load, ir.VectorLoad, ir.FragmentLoad, ir.Atomic, ir.Shuffle, ir.Vote)


class ExpressionWriter:
    """Writes expressions and hands out the sites and constants they refer to."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.constants: dict[str, Any] = {}
        self.names = 0
        self.here: ir.Stmt | None = None  # the statement being written
        self.sites_of: dict[int, str] = {}  # of loads that have one already, by id
        self.gathered: dict[int, str] = {}  # loads whose value has a name, by id

    def site(self, kind: str, space: str, name: str, loc: ir.Location) -> str:
        assert self.here is not None
        number = len(self.sites)
        self.sites.append(Site(number, kind, space, name, loc, self.here.phase))
        return f"S[{number}]"

    def access(self, kind: str, array: ir.Array, loc: ir.Location) -> str:
        return self.site(kind, array.space.value, array.name, loc)

    def constant(self, value: Any) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def fresh(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def index(self, index: tuple[ir.Expr, ...]) -> str:
        return "(" + ", ".join(self.expr(part) for part in index) + ",)"

    def expr(self, expr: ir.Expr) -> str:
        if expr.const is not None:
            if isinstance(expr.type, Scalar) and expr.type.is_float:
                return self.constant(_float_constant(expr.const))
            return repr(expr.const)
        return getattr(self, f"expr_{type(expr).__name__.lower()}")(expr)

    def expr_var(self, expr: ir.Var) -> str:
        if expr.maybe_unassigned:
            return f"m.read({expr.name!r}, {self.site('register', '', expr.name, expr.loc)})"
        return f"m.v[{expr.name!r}]"

    def expr_special(self, expr: ir.Special) -> str:
        return f"m.v[{expr.name!r}]"

    def expr_dim(self, expr: ir.Dim) -> str:
        return f"A[{expr.array.name!r}].shape[{expr.axis}]"

    def expr_unary(self, expr: ir.Unary) -> str:
        operand = self.expr(expr.operand)
        if expr.op == "not":
            return f"logical_not({operand})"
        if expr.type == ACCUMULATOR:
            return self.mapped(np.negative, (expr.operand,), expr)
        return _wrapped(f"{expr.op}{operand}", expr.type)

    def expr_binary(self, expr: ir.Binary) -> str:
        if expr.type == ACCUMULATOR:
            return self.mapped(ARITHMETIC[expr.op], (expr.left, expr.right), expr)
        left, right = self.expr(expr.left), self.expr(expr.right)
        if expr.op == "//":
            return _wrapped(f"floor_divide({left}, {right})", expr.type)
        if expr.op == "%":
            return f"remainder({left}, {right})"
        if expr.op in ("<<", ">>"):
            return _wrapped(f"({left} {expr.op} ({right} & 31))", expr.type)
        return _wrapped(f"({left} {expr.op} {right})", expr.type)

    def expr_compare(self, expr: ir.Compare) -> str:
        return f"({self.expr(expr.left)} {expr.op} {self.expr(expr.right)})"

    def expr_boolop(self, expr: ir.BoolOp) -> str:
        left, right = self.expr(expr.left), self.expr(expr.right)
        if not _impure(expr.right):
            return f"logical_{expr.op}({left}, {right})"
        name = self.fresh("left")
        test = f"({name} := {left})"
        if expr.op == "or":
            test = f"logical_not{test}"
        return f"m.where({test}, lambda: {right}, {expr.op == 'or'})"

    def expr_select(self, expr: ir.Select) -> str:
        test, left, right = (self.expr(e) for e in (expr.test, expr.if_true, expr.if_false))
        if isinstance(expr.type, VectorType):
            return f"select_vector({test}, {left}, {right}, {self.constant(expr.type.dtype)})"
        if expr.constant_time or not (_impure(expr.if_true) or _impure(expr.if_false)):
            return f"select({test}, {left}, {right}, {self.constant(expr.type)})"
        name = self.fresh("test")
        inner = f"m.where(logical_not({name}), lambda: {right}, 0)"
        return f"m.where(({name} := {test}), lambda: {left}, {inner})"

    def expr_cast(self, expr: ir.Cast) -> str:
        source, target = expr.operand.type, expr.type
        assert isinstance(source, Scalar)
        assert isinstance(target, Scalar)
        operand = self.expr(expr.operand)
        if source.is_storage_only and target == float32:
            return operand
        return f"cast({operand}, {self.constant(source)}, {self.constant(target)})"

    def expr_bitcast(self, expr: ir.Bitcast) -> str:
        types = f"{self.constant(expr.operand.type)}, {self.constant(expr.type)}"
        return f"bitcast({self.expr(expr.operand)}, {types})"

    def expr_math(self, expr: ir.Math) -> str:
        if isinstance(expr.type, FragmentType):
            return self.mapped(MATH[expr.name], expr.args, expr)
        arguments = ", ".join(self.expr(a) for a in expr.args)
        return f"math_{expr.name}({arguments})"

    def mapped(self, function: Any, operands: tuple[ir.Expr, ...], expr: ir.Expr) -> str:
        site = self.site("fragment", "", "map", expr.loc)
        arguments = ", ".join(self.expr(e) for e in operands)
        return f"m.fragment_map({site}, {self.constant(function)}, {arguments})"

    def expr_load(self, expr: ir.Load) -> str:
        if id(expr) in self.gathered:
            return self.gathered[id(expr)]
        site = self.sites_of.get(id(expr)) or self.access("load", expr.array, expr.loc)
        if expr.array.dtype == ACCUMULATOR:
            return f"m.load_fragment({site}, {self.fragment_place(expr.array, expr.index)})"
        return f"m.load({site}, A[{expr.array.name!r}], {self.index(expr.index)})"

    def fragment_place(self, array: ir.Array, index: tuple[ir.Expr, ...]) -> str:
        return f"{array.name!r}, {array.shape!r}, {self.index(index)}"

    def expr_shuffle(self, expr: ir.Shuffle) -> str:
        site = self.site("shuffle", "", expr.mode, expr.loc)
        parts = ", ".join(self.expr(e) for e in (expr.mask, expr.value, expr.lane))
        return f"m.shuffle({site}, {expr.mode!r}, {parts})"

    def expr_vote(self, expr: ir.Vote) -> str:
        site = self.site("vote", "", expr.mode, expr.loc)
        return f"m.vote({site}, {expr.mode!r}, {self.expr(expr.mask)}, {self.expr(expr.predicate)})"

    def expr_atomic(self, expr: ir.Atomic) -> str:
        value = self.expr(expr.value)
        compare = "None" if expr.compare is None else self.expr(expr.compare)
        site = self.access("atomic", expr.array, expr.loc)
        place = f"A[{expr.array.name!r}], {self.index(expr.index)}"
        return f"m.atomic({site}, {place}, {expr.op!r}, {value}, {compare})"

    def expr_vectorload(self, expr: ir.VectorLoad) -> str:
        site = self.access("load", expr.array, expr.loc)
        place = f"A[{expr.array.name!r}], {self.index(expr.index)}"
        return f"m.vload({site}, {place}, {expr.type.width})"  # type: ignore[union-attr]

    def expr_vectormake(self, expr: ir.VectorMake) -> str:
        return f"Vector({self.index(expr.items)})"

    def expr_vectoritem(self, expr: ir.VectorItem) -> str:
        return f"{self.expr(expr.vector)}.items[{expr.item}]"

    def expr_fragmentfill(self, expr: ir.FragmentFill) -> str:
        site = self.site("fragment", "", "fill", expr.loc)
        return f"m.fragment_fill({site}, {self.expr(expr.value)})"

    def expr_fragmentload(self, expr: ir.FragmentLoad) -> str:
        site = self.access("load", expr.array, expr.loc)
        place = f"A[{expr.array.name!r}], {self.index(expr.index)}"
        return f"m.fragment_load({site}, {place}, {self.expr(expr.ld)}, {expr.layout!r})"

    def expr_fragmentmma(self, expr: ir.FragmentMma) -> str:
        parts = ", ".join(self.expr(e) for e in (expr.a, expr.b, expr.c))
        return f"m.fragment_mma({self.site('mma', '', '', expr.loc)}, {parts})"


class _FloatConstants(dict):
    """One np.float32 object per value, so that generated code shares them."""

    def __missing__(self, key: tuple) -> np.float32:
        value = self[key] = np.float32(key[0])
        return value


_FLOATS = _FloatConstants()


def _float_constant(value: float) -> np.float32:
    return _FLOATS[(value, str(value))]  # the text tells 0.0 from -0.0


def _wrapped(text: str, dtype: Any) -> str:
    return {int32: f"i32({text})", uint32: f"u32({text})"}.get(dtype, f"({text})")


def _impure(expr: ir.Expr) -> bool:
    return any(isinstance(e, IMPURE) for e in ir.walk_expr(expr))
