"""A typed kernel as a whole, and ways through its statements and expressions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from lockstep.simt.types import ArrayType, Scalar, Type

from .expressions import Array, Expr, Location
from .statements import Block, For, If, Inlined, Phase, Stmt, While


@dataclass(frozen=True)
class Parameter:
    name: str
    type: Scalar | ArrayType
    secret: bool = False


@dataclass(frozen=True)
class Warning_:
    """Something legal that deserves a look."""

    message: str
    loc: Location


@dataclass(frozen=True)
class Source:
    """Text of the kernel. `comments` maps a line to (column, text without the #)."""

    file: str
    first_line: int
    lines: tuple[str, ...]
    comments: dict[int, tuple[int, str]]


@dataclass(eq=False)
class Kernel:
    name: str
    doc: str | None
    parameters: tuple[Parameter, ...]
    constants: dict[str, int | float | bool]
    arrays: dict[str, Array]
    variables: dict[str, Type]
    body: Block
    source: Source
    device_sources: dict[str, Source] = field(default_factory=dict)
    hoisted: tuple[str, ...] = ()
    warnings: tuple[Warning_, ...] = ()

    @property
    def secrets(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters if p.secret)


def operands(node: Expr | Stmt) -> list[Expr]:
    """The expressions a node holds directly, in evaluation order."""
    found = []
    for name in _own_fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, Expr):
            found.append(value)
        elif isinstance(value, tuple):
            found += [v for v in value if isinstance(v, Expr)]
    return found


@functools.cache
def _own_fields(kind: type[Expr | Stmt]) -> list[str]:
    """Names of the fields that not every node has; those hold no expressions."""
    common = {f.name for f in fields(Expr if issubclass(kind, Expr) else Stmt)}
    return [f.name for f in fields(kind) if f.name not in common]


def walk_expr(expr: Expr) -> list[Expr]:
    """`expr` and everything under it, operands before their users."""
    return [*expressions(expr), expr]


def expressions(node: Expr | Stmt) -> list[Expr]:
    """All expressions under a node, not those of the blocks inside a statement."""
    found: list[Expr] = []
    for child in operands(node):
        found += walk_expr(child)
    return found


def blocks(stmt: Stmt) -> tuple[Block, ...]:
    """The statement lists inside a statement."""
    if isinstance(stmt, If):
        return (stmt.body, stmt.orelse)
    if isinstance(stmt, (For, While, Phase, Inlined)):
        return (stmt.body,)
    return ()


def walk(body: Block) -> Iterator[Stmt]:
    """Every statement of a block in source order, the nested ones too."""
    for stmt in body:
        yield stmt
        for inner in blocks(stmt):
            yield from walk(inner)
