"""Expressions: Python syntax trees to typed nodes."""

from __future__ import annotations

import ast
import types as python_types
from typing import Any

from . import ir
from .conversions import Conversions
from .folding import COMPARISONS, describe, fold
from .language import SpecialValue
from .scope import Static, Variable
from .types import (
    ACCUMULATOR,
    FragmentType,
    Scalar,
    VectorType,
    bool_,
    float32,
    int32,
    scalar_named,
    uint32,
    wrap,
)

BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
COMPARE = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
BITWISE = ("&", "|", "^")
INTEGER_ONLY = ("//", "%", "<<", ">>")
NOT_STATIC = object()


class Expressions(Conversions):
    """Lowers expressions; calls are in `calls.Calls`."""

    def expr(self, node: ast.expr) -> ir.Expr:
        """Lower one expression."""
        method = getattr(self, f"expr_{type(node).__name__.lower()}", None)
        if method is None:
            raise self.error(node, f"{describe(node)} cannot be used in a kernel")
        return method(node)

    def scalar(self, node: ast.expr) -> ir.Expr:
        """Lower an expression that must be a single value per thread."""
        expr = self.expr(node)
        if not isinstance(expr.type, Scalar):
            raise self.error(node, f"expected a scalar, got {expr.type}")
        return expr

    def static(self, node: ast.expr) -> Any:
        """The compile-time object a name or attribute stands for, or NOT_STATIC."""
        if isinstance(node, ast.Name):
            bound = self.scope.bindings.get(node.id)
            if isinstance(bound, Static):
                return bound.value
            if bound is not None or node.id in self.scope.assigned:
                return NOT_STATIC
            if node.id not in self.scope.source.names:
                raise self.error(node, f"unknown name '{node.id}'")
            return self.scope.source.names[node.id]
        if isinstance(node, ast.Attribute):
            if node.attr == "dtype" and (array := self.array_named(node.value)):
                return array.dtype
            owner = self.static(node.value)
            if owner is NOT_STATIC:
                return NOT_STATIC
            if not hasattr(owner, node.attr):
                raise self.error(node, f"'{ast.unparse(node.value)}' has no '{node.attr}'")
            return getattr(owner, node.attr)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return NOT_STATIC

    def array_named(self, node: ast.expr) -> ir.Array | None:
        """The array a name is bound to, if it is one."""
        if isinstance(node, ast.Name):
            bound = self.scope.bindings.get(node.id)
            return bound if isinstance(bound, ir.Array) else None
        return None

    def array(self, node: ast.expr) -> ir.Array:
        found = self.array_named(node)
        if found is None:
            raise self.error(node, f"expected the name of an array, got '{ast.unparse(node)}'")
        return found

    def scalar_type(self, node: ast.expr) -> Scalar:
        found = scalar_named(self.static(node))
        if found is None:
            raise self.error(node, f"expected a type of the language, got '{ast.unparse(node)}'")
        return found

    def constant_int(self, node: ast.expr, what: str) -> int:
        expr = self.expr(node)
        if expr.const is None or not isinstance(expr.type, Scalar) or not expr.type.is_integer:
            raise self.error(node, f"{what} must be an integer known at compile time")
        return int(expr.const)

    # Leaves

    def expr_constant(self, node: ast.Constant) -> ir.Expr:
        if not isinstance(node.value, (bool, int, float)):
            raise self.error(
                node, f"a {type(node.value).__name__} literal cannot be used as a value"
            )
        return self.number(node.value, self.loc(node))

    def expr_name(self, node: ast.Name) -> ir.Expr:
        bound = self.scope.bindings.get(node.id)
        if isinstance(bound, Variable):
            if node.id in self.scope.spent_loop_vars:
                raise self.error(
                    node, f"loop variable '{node.id}' is read after its loop; copy it in the loop"
                )
            return ir.Var(bound.name, type=self.variables[bound.name], loc=self.loc(node))
        if isinstance(bound, ir.Array):
            raise self.error(node, f"array '{node.id}' must be indexed here")
        if isinstance(bound, ir.Expr):
            return self.number(bound.const, self.loc(node), getattr(bound, "name", None))
        if bound is None and node.id in self.scope.assigned:
            raise self.error(node, f"'{node.id}' is read before any assignment to it")
        return self.static_value(node, self.static(node), node.id)

    def expr_attribute(self, node: ast.Attribute) -> ir.Expr:
        if self.array_named(node.value) and node.attr in ("shape", "size", "ndim"):
            raise self.error(node, f"use .shape[axis] with a constant axis instead of .{node.attr}")
        static = self.static(node)
        if static is NOT_STATIC:
            vector = self.expr(node.value)
            if isinstance(vector.type, VectorType) and node.attr in "xyzw"[: vector.type.width]:
                return self.vector_item(vector, "xyzw".index(node.attr), node)
            raise self.error(node, f"{vector.type} has no attribute '{node.attr}'")
        return self.static_value(node, static, None)

    def static_value(self, node: ast.expr, value: Any, name: str | None) -> ir.Expr:
        """A compile-time object in the place of a value."""
        if isinstance(value, (bool, int, float)):
            return self.number(value, self.loc(node), name)
        if isinstance(value, SpecialValue):
            return ir.Special(value.name, type=int32, loc=self.loc(node))
        kind = "module" if isinstance(value, python_types.ModuleType) else type(value).__name__
        raise self.error(
            node,
            f"'{ast.unparse(node)}' is a {kind}; a kernel captures only numbers",
        )

    # Operators

    def expr_unaryop(self, node: ast.UnaryOp) -> ir.Expr:
        loc = self.loc(node)
        if isinstance(node.op, ast.Not):
            operand = self.condition(node.operand)
            const = None if operand.const is None else not operand.const
            return ir.Unary("not", operand, type=bool_, loc=loc, const=const)
        operand = self.widen(self.expr(node.operand))
        if isinstance(node.op, ast.UAdd):
            return operand
        if isinstance(node.op, ast.Invert):
            if not isinstance(operand.type, Scalar) or not operand.type.is_integer:
                raise self.error(
                    node, f"~ needs an integer, got {operand.type}; for bool_ use 'not'"
                )
            const = None if operand.const is None else wrap(~int(operand.const), operand.type)
            return ir.Unary("~", operand, type=operand.type, loc=loc, const=const)
        if operand.type == bool_ or isinstance(operand.type, VectorType):
            raise self.error(node, f"cannot negate {operand.type}")
        if isinstance(operand, ir.Literal):
            return self.number(-operand.const, loc)  # type: ignore[operator]
        const = None if operand.const is None else -operand.const
        if const is not None and isinstance(operand.type, Scalar) and operand.type.is_integer:
            const = wrap(int(const), operand.type)
        return ir.Unary("-", operand, type=operand.type, loc=loc, const=const)

    def expr_binop(self, node: ast.BinOp) -> ir.Expr:
        left, right = self.expr(node.left), self.expr(node.right)
        if isinstance(node.op, ast.Pow):
            if left.const is None or right.const is None:
                raise self.error(
                    node, "** needs operands known at compile time; multiply, or use exp2"
                )
            return self.number(left.const**right.const, self.loc(node))
        if type(node.op) not in BINARY:
            raise self.error(node, f"operator {describe(node.op)} cannot be used in a kernel")
        return self.binary(BINARY[type(node.op)], left, right, node)

    def binary(self, op: str, left: ir.Expr, right: ir.Expr, node: ast.AST) -> ir.Expr:
        """`left op right` with the language's typing rules."""
        loc = self.loc(node)
        if ACCUMULATOR in (left.type, right.type):
            if op not in ("+", "-", "*", "/"):
                raise self.error(node, f"accumulators take + - * / element by element, not {op}")
            left, right = (self.accumulator_operand(e, node) for e in (left, right))
            return ir.Binary(op, left, right, type=ACCUMULATOR, loc=loc)
        left, right = self.unify(left, right, node, f"operands of {op}")
        dtype = left.type
        if dtype == bool_ and op not in BITWISE:
            raise self.error(node, f"{op} does not apply to bool_; cast to int32 first")
        if dtype == float32 and op in (*BITWISE, *INTEGER_ONLY):
            raise self.error(node, f"{op} needs integers, got float32")
        if op == "/" and dtype != float32:
            raise self.error(
                node, f"/ on {dtype} would be a float64 in Python; use //, or float32(x) / y"
            )
        const = fold(op, left, right, dtype)
        return ir.Binary(op, left, right, type=dtype, loc=loc, const=const)

    def accumulator_operand(self, expr: ir.Expr, node: ast.AST) -> ir.Expr:
        return expr if expr.type == ACCUMULATOR else self.coerce(expr, float32, node, "the scalar")

    def expr_compare(self, node: ast.Compare) -> ir.Expr:
        if len(node.ops) != 1:
            raise self.error(node, "chained comparison; write 'a < b and b < c'")
        if type(node.ops[0]) not in COMPARE:
            raise self.error(node, f"comparison {describe(node.ops[0])} cannot be used in a kernel")
        op = COMPARE[type(node.ops[0])]
        names = [self.static(side) for side in (node.left, node.comparators[0])]
        if op in ("==", "!=") and all(isinstance(n, (str, Scalar)) for n in names):
            return self.number((names[0] == names[1]) == (op == "=="), self.loc(node))
        left, right = self.scalar(node.left), self.scalar(node.comparators[0])
        left, right = self.unify(left, right, node, f"operands of {op}")
        const = None
        if left.const is not None and right.const is not None:
            const = bool(COMPARISONS[op](left.const, right.const))
        return ir.Compare(op, left, right, type=bool_, loc=self.loc(node), const=const)

    def expr_boolop(self, node: ast.BoolOp) -> ir.Expr:
        op = "and" if isinstance(node.op, ast.And) else "or"
        result = self.condition(node.values[0])
        for value in node.values[1:]:
            if result.const is not None and bool(result.const) == (op == "or"):
                return result
            with_const = result.const is not None
            right = self.not_hoisting(f"the right operand of '{op}'", self.condition, value)
            if with_const:  # a constant that does not decide leaves its neighbour alone
                result = right
                continue
            result = ir.BoolOp(op, result, right, type=bool_, loc=self.loc(node))
        return result

    def expr_ifexp(self, node: ast.IfExp) -> ir.Expr:
        test = self.condition(node.test)
        if test.const is not None:
            return self.expr(node.body if test.const else node.orelse)
        what = "an arm of a conditional expression"
        left = self.not_hoisting(what, self.scalar, node.body)
        right = self.not_hoisting(what, self.scalar, node.orelse)
        left, right = self.unify(left, right, node, "the two arms", widen=False)
        return ir.Select(test, left, right, constant_time=False, type=left.type, loc=self.loc(node))

    def condition(self, node: ast.expr) -> ir.Expr:
        """A truth value: bool_ as it is, an integer compared with zero."""
        expr = self.scalar(node)
        if expr.type == bool_:
            return expr
        if not isinstance(expr.type, Scalar) or not expr.type.is_integer:
            raise self.error(node, f"a condition must be bool_ or an integer, got {expr.type}")
        zero = ir.Literal(
            type=expr.type, loc=expr.loc, const=0, uniformity=ir.Uniformity.GRID, nonneg=True
        )
        const = None if expr.const is None else expr.const != 0
        return ir.Compare("!=", expr, zero, type=bool_, loc=expr.loc, const=const)

    def not_hoisting(self, where: str, lower: Any, node: ast.expr) -> ir.Expr:
        """Lower where a device function must not be inlined: it is evaluated conditionally."""
        outer, self.no_inlining = self.no_inlining, where
        try:
            return lower(node)
        finally:
            self.no_inlining = outer

    # Memory

    def indices(self, array: ir.Array, node: ast.expr) -> tuple[ir.Expr, ...]:
        """One integer per dimension of `array`."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        if len(parts) != array.ndim:
            raise self.error(
                node, f"'{array.name}' has {array.ndim} dimension(s), {len(parts)} indices given"
            )
        lowered = []
        for part in parts:
            if isinstance(part, ast.Slice):
                raise self.error(part, "slices cannot be used in a kernel; index single elements")
            index = self.scalar(part)
            if index.type not in (int32, uint32):
                raise self.error(part, f"an index must be int32 or uint32, got {index.type}")
            lowered.append(index)
        return tuple(lowered)

    def expr_subscript(self, node: ast.Subscript) -> ir.Expr:
        base = node.value
        if isinstance(base, ast.Attribute) and base.attr == "shape":
            return self.extent(self.array(base.value), node)
        array = self.array_named(base)
        if array is None:
            vector = self.expr(base)
            if not isinstance(vector.type, VectorType):
                raise self.error(node, f"{vector.type} cannot be indexed")
            return self.vector_item(vector, self.constant_int(node.slice, "a vector item"), node)
        index = self.indices(array, node.slice)
        return ir.Load(array, index, type=array.dtype, loc=self.loc(node))

    def extent(self, array: ir.Array, node: ast.Subscript) -> ir.Expr:
        axis = self.constant_int(node.slice, "the axis")
        if not 0 <= axis < array.ndim:
            raise self.error(node, f"'{array.name}' has {array.ndim} dimension(s), no axis {axis}")
        if array.shape is not None:
            return self.number(array.shape[axis], self.loc(node))
        if array.dynamic:
            raise self.error(
                node, "the length of dynamic shared memory is the launch's; pass it along"
            )
        return ir.Dim(array, axis, type=int32, loc=self.loc(node))

    def vector_item(self, vector: ir.Expr, item: int, node: ast.AST) -> ir.Expr:
        assert isinstance(vector.type, VectorType)
        if not 0 <= item < vector.type.width:
            raise self.error(node, f"{vector.type} has no item {item}")
        return ir.VectorItem(vector, item, type=vector.type.dtype, loc=self.loc(node))

    def elementwise(self, expr: ir.Expr, node: ast.AST) -> ir.Expr:
        """An operand of a math function: float32, or an accumulator taken element by element."""
        if isinstance(expr.type, FragmentType) and expr.type == ACCUMULATOR:
            return expr
        return self.coerce(expr, float32, node, "the argument")
