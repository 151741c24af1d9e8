"""Secrets: a proof over the source that a kernel is data-oblivious.

Values derived from a secret parameter are followed through variables and through the elements of
arrays (an array that once receives a secret holds secrets from then on). No branch, loop bound,
early exit or address may depend on them; `ct.select`, `&`, `|`, `min` and `max` compute with them
freely. Since no branch is secret, nothing can flow through control.

The proof is about the source. Where the compiled form of an operation has a data-dependent slow
path (float32 division, sqrt, tanh, exp2), the kernel carries a warning: look at the machine code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import ir
from .errors import SecretLeak
from .types import float32

SLOW_PATHS = ("sqrt", "tanh", "log", "log2", "exp2")


@dataclass(frozen=True)
class _Step:
    """How a variable or an array first came to hold a secret."""

    what: str
    loc: ir.Location
    before: _Step | None

    def chain(self) -> tuple[tuple[str, ir.Location], ...]:
        earlier = self.before.chain() if self.before else ()
        return (*earlier, (self.what, self.loc))


class _Secrets:
    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        self.held: dict[str | ir.Array, _Step] = {}
        self.changed = True
        loc = ir.Location(kernel.source.file, kernel.source.first_line, 1, 0, 0, "")
        for p in kernel.parameters:
            if p.secret:
                key = kernel.arrays.get(p.name, p.name)
                where = key.loc if isinstance(key, ir.Array) else _signature(kernel, loc)
                self.held[key] = _Step(f"'{p.name}' is a secret parameter", where, None)

    def of(self, expr: ir.Expr) -> _Step | None:
        """How `expr` came to be secret; None if it is public."""
        for node in ir.walk_expr(expr):
            if isinstance(node, ir.Var) and node.name in self.held:
                return self.held[node.name]
            array = getattr(node, "array", None)
            if array in self.held and not isinstance(node, ir.Dim):
                return self.held[array]
        return None

    def give(self, key: str | ir.Array, source: _Step | None, stmt: ir.Stmt) -> None:
        if source is not None and key not in self.held:
            name = key.name if isinstance(key, ir.Array) else key
            self.held[key] = _Step(f"carried into '{name}'", stmt.loc, source)
            self.changed = True

    def propagate(self) -> None:
        while self.changed:
            self.changed = False
            for stmt in ir.walk(self.kernel.body):
                for expr in ir.expressions(stmt):
                    if isinstance(expr, ir.Atomic):
                        self.give(expr.array, self.of(expr.value), stmt)
                if isinstance(stmt, ir.Assign):
                    self.give(stmt.target, self.of(stmt.value), stmt)
                elif isinstance(stmt, (ir.Store, ir.VectorStore)):
                    self.give(stmt.array, self.of(stmt.value), stmt)
                elif isinstance(stmt, ir.FragmentStore):
                    self.give(stmt.array, self.of(stmt.fragment), stmt)
                elif isinstance(stmt, ir.AsyncCopy):
                    self.give(stmt.target, self.held.get(stmt.source), stmt)


def _signature(kernel: ir.Kernel, loc: ir.Location) -> ir.Location:
    """The `def` line: scalar parameters have no place of their own."""
    for offset, text in enumerate(kernel.source.lines):
        if text.lstrip().startswith("def "):
            line = kernel.source.first_line + offset
            return ir.Location(loc.file, line, 1, line, len(text) + 1, text)
    return loc


def _observable(stmt: ir.Stmt) -> Iterator[tuple[str, ir.Expr]]:
    """The expressions of one statement that show in time and addresses."""
    if isinstance(stmt, ir.If):
        jumps = (ir.Break, ir.Continue, ir.Return)
        exits = any(isinstance(s, jumps) for s in ir.walk(stmt.body + stmt.orelse))
        yield ("an early exit" if exits else "a branch"), stmt.test
    elif isinstance(stmt, ir.While):
        yield "a loop condition", stmt.test
    elif isinstance(stmt, ir.For):
        yield from (("a loop bound", bound) for bound in (stmt.start, stmt.stop, stmt.step))
    elif isinstance(stmt, (ir.Store, ir.VectorStore, ir.FragmentStore)):
        yield from (("an address", part) for part in stmt.index)
    elif isinstance(stmt, ir.AsyncCopy):
        yield from (("an address", part) for part in stmt.target_index + stmt.source_index)
    elif isinstance(stmt, ir.Declare) and stmt.offset is not None:
        yield "an address", stmt.offset
    if isinstance(stmt, ir.FragmentStore):
        yield "a leading dimension", stmt.ld
    for expr in ir.expressions(stmt):
        if isinstance(expr, ir.Select) and not expr.constant_time:
            yield "a conditional expression (use ct.select)", expr.test
        elif isinstance(expr, ir.BoolOp):
            yield f"the short circuit of '{expr.op}' (use & or |)", expr.left
        elif isinstance(expr, ir.Shuffle):
            yield from (("a shuffle's lane", part) for part in (expr.lane, expr.mask))
        elif isinstance(expr, ir.Vote):
            yield "a vote's mask", expr.mask
        elif isinstance(expr, (ir.Load, ir.VectorLoad, ir.FragmentLoad, ir.Atomic)):
            yield from (("an address", part) for part in expr.index)
        if isinstance(expr, ir.FragmentLoad):
            yield "a leading dimension", expr.ld


def check_secrets(kernel: ir.Kernel) -> None:
    """Raise `SecretLeak` at the first observable that depends on a secret parameter."""
    if not kernel.secrets:
        return
    secrets = _Secrets(kernel)
    secrets.propagate()
    warnings = []
    for stmt in ir.walk(kernel.body):
        for what, expr in _observable(stmt):
            step = secrets.of(expr)
            if step is not None:
                raise SecretLeak(f"{what} depends on a secret", expr.loc, step.chain())
        for expr in ir.expressions(stmt):
            divides = isinstance(expr, ir.Binary) and expr.op == "/" and expr.type == float32
            slow = isinstance(expr, ir.Math) and expr.name in SLOW_PATHS
            if (divides or slow) and secrets.of(expr) is not None:
                what = "division" if divides else expr.name  # type: ignore[attr-defined]
                text = f"{what} of a secret may compile to a data-dependent slow path"
                warnings.append(ir.Warning_(text, expr.loc))
    kernel.warnings += tuple(warnings)
