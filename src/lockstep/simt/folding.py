"""Constant expressions, evaluated with the machine's own rounding; and syntax in plain words."""

from __future__ import annotations

import ast
import operator

from . import ir
from .types import Type, bool_, float32, round_to_float32, wrap

COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}


def fold(op: str, left: ir.Expr, right: ir.Expr, dtype: Type) -> int | float | bool | None:
    """The value of a constant expression, None if it is not constant or not defined."""
    if left.const is None or right.const is None:
        return None
    try:
        value = ARITHMETIC[op](left.const, right.const)
        if dtype == float32:
            return round_to_float32(value)
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return value if dtype == bool_ else wrap(value, dtype)  # type: ignore[arg-type]


def describe(node: ast.AST) -> str:
    """The name of a syntax node for error messages."""
    return {
        "ListComp": "a list comprehension",
        "GeneratorExp": "a generator",
        "List": "a list",
        "Dict": "a dict",
        "Set": "a set",
        "Tuple": "a tuple",
        "JoinedStr": "an f-string",
        "Lambda": "a lambda",
        "NamedExpr": "an assignment expression",
        "Try": "try",
        "Raise": "raise",
        "With": "with",
        "Import": "import",
        "ImportFrom": "import",
        "FunctionDef": "a nested function",
        "ClassDef": "a class",
        "Delete": "del",
        "Global": "global",
        "Nonlocal": "nonlocal",
        "Assert": "assert",
        "MatMult": "@",
        "Match": "match",
        "Slice": "a slice",
        "In": "in",
        "NotIn": "not in",
        "Is": "is",
        "IsNot": "is not",
    }.get(type(node).__name__, f"{type(node).__name__.lower()}")
