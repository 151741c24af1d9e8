"""Types of operands: what converts without a cast, and what does not."""

from __future__ import annotations

import ast
from typing import Any

from . import ir
from .scope import Lowering
from .types import Scalar, Type, fits, float32, round_to_float32


class Conversions(Lowering):
    """Brings expressions to one type where that is exact."""

    def widen(self, expr: ir.Expr) -> ir.Expr:
        """A 16-bit float as the float32 it equals; anything else as it is."""
        if isinstance(expr.type, Scalar) and expr.type.is_storage_only:
            return ir.Cast(expr, implicit=True, type=float32, loc=expr.loc, const=expr.const)
        return expr

    def unify(
        self, left: ir.Expr, right: ir.Expr, node: ast.AST, what: str, widen: bool = True
    ) -> tuple[ir.Expr, ir.Expr]:
        """Both operands in one type. Constants follow the other operand; nothing else converts."""
        if widen or left.type != right.type:
            left, right = self.widen(left), self.widen(right)
        if left.type == right.type and isinstance(left.type, Scalar):
            return left, right
        for a, b, swap in ((left, right, False), (right, left, True)):
            adapted = self.adapt(a, b.type)
            if adapted is not None:
                return (b, adapted) if swap else (adapted, b)
        raise self.error(node, f"{what} have types {left.type} and {right.type}; cast one of them")

    def adapt(self, expr: ir.Expr, dtype: Type) -> ir.Expr | None:
        """A constant in another type, if it is exact there."""
        value = expr.const
        if value is None or isinstance(value, bool) or not isinstance(dtype, Scalar):
            return None
        if dtype == expr.type:
            return expr
        if isinstance(value, int) and dtype == float32 and round_to_float32(value) == value:
            value = float(value)
        elif not (isinstance(value, int) and dtype.is_integer and fits(value, dtype)):
            return None
        facts: dict[str, Any] = {
            "type": dtype,
            "loc": expr.loc,
            "const": value,
            "uniformity": ir.Uniformity.GRID,
            "nonneg": dtype.is_integer and value >= 0,
        }
        if isinstance(expr, ir.Literal):
            return ir.Literal(**facts)
        return ir.Cast(expr, implicit=True, **facts)

    def coerce(self, expr: ir.Expr, dtype: Type, node: ast.AST, what: str) -> ir.Expr:
        """`expr` as `dtype`, where that loses nothing; else an error that asks for a cast."""
        if expr.type == dtype:
            return expr
        if dtype == float32 and self.widen(expr) is not expr:
            return self.widen(expr)
        adapted = self.adapt(expr, dtype)
        if adapted is None:
            hint = f"; write {dtype}(...)" if isinstance(dtype, Scalar) else ""
            raise self.error(node, f"{what} must be {dtype}, got {expr.type}{hint}")
        return adapted
