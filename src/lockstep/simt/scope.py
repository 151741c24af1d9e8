"""Names while a function is being lowered: what they are bound to, and fresh ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import ir
from .errors import UnsupportedConstruct
from .source import FunctionSource
from .types import Scalar, Type, bool_, fits, float32, int32, round_to_float32, uint32


@dataclass(frozen=True)
class Variable:
    """A register variable; `name` is unique in the kernel, also after inlining."""

    name: str


@dataclass(frozen=True)
class Static:
    """A compile-time object that is not a number: a type, a string."""

    value: Any


class Device:
    """A function marked with `@simt.device`: inlined where a kernel calls it."""

    def __init__(self, function: Callable):
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.__name__} is a device function: only kernels can call it")


@dataclass
class Scope:
    """One function body: the kernel's, or a device function's at one call."""

    source: FunctionSource
    bindings: dict[str, Variable | Static | ir.Array | ir.Expr] = field(default_factory=dict)
    result: str | None = None
    is_device: bool = False
    spent_loop_vars: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        tree = self.source.tree
        stores = (n for n in ast.walk(tree) if isinstance(n, ast.Name))
        self.assigned = {n.id for n in stores if isinstance(n.ctx, ast.Store)}


class Lowering:
    """State shared by the expression, call and statement parts of the front end."""

    def __init__(self, source: FunctionSource):
        self.scope = Scope(source)
        self.out: ir.Block = []
        self.variables: dict[str, Type] = {}
        self.arrays: dict[str, ir.Array] = {}
        self.constants: dict[str, int | float | bool] = {}
        self.device_sources: dict[str, ir.Source] = {}
        self.phase = ""
        self.no_inlining: str | None = None  # why a device call cannot stand here
        self.inlining: list[Device] = []

    def loc(self, node: ast.AST) -> ir.Location:
        return self.scope.source.locate(node)

    def error(self, node: ast.AST | ir.Location, message: str) -> UnsupportedConstruct:
        """The exception to raise for something outside the language."""
        loc = node if isinstance(node, ir.Location) else self.loc(node)
        return UnsupportedConstruct(message, loc)

    def fresh(self, name: str) -> str:
        """`name`, with a number after it if the kernel has one already."""
        taken = {*self.variables, *self.arrays, *self.constants}
        if name not in taken:
            return name
        n = 2
        while f"{name}_{n}" in taken:
            n += 1
        return f"{name}_{n}"

    def number(
        self, value: int | float | bool, loc: ir.Location, name: str | None = None
    ) -> ir.Expr:
        """A literal, or a named constant where the source gives it a name."""
        dtype: Scalar
        if isinstance(value, bool):
            dtype = bool_
        elif isinstance(value, int):
            dtype = int32 if fits(value, int32) else uint32
            if not fits(value, dtype):
                raise self.error(loc, f"{value} does not fit 32 bits; there are no 64-bit integers")
        else:
            dtype = float32
            try:
                value = round_to_float32(value)
            except OverflowError:
                raise self.error(loc, f"{value!r} is beyond the range of float32") from None
        facts: dict[str, Any] = {
            "type": dtype,
            "loc": loc,
            "const": value,
            "uniformity": ir.Uniformity.GRID,
            "nonneg": dtype.is_integer and value >= 0,
        }
        if name is None or self.constants.get(name, value) != value:
            return ir.Literal(**facts)
        self.constants[name] = value
        return ir.NamedConst(name, **facts)
