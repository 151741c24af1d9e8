"""Where each variable can be declared in C++.

Python variables live in the whole function, C++ variables in a block. A variable is declared
where it is assigned, once for each stretch of code that gives it a value of its own before reading
it; only where a value has to outlive the block it was assigned in, it goes to the top.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.simt import ir


class _Escapes(Exception):
    """The variable needs a declaration further out."""


def place(kernel: ir.Kernel) -> tuple[frozenset[int], tuple[str, ...]]:
    """The `id`s of the `Assign` and `For` statements that declare their variable, and the names
    that have to be declared at the top."""
    uses = _uses_by_statement(kernel.body)
    parameters = {p.name for p in kernel.parameters}
    declaring: set[int] = set()
    top = []
    for name in kernel.variables:
        if name in parameters or name not in uses.get(id(kernel.body), ()):
            continue
        try:
            declaring |= set(_localise(kernel.body, name, uses))
        except _Escapes:
            top.append(name)
    return frozenset(declaring), tuple(top)


def _localise(body: ir.Block, name: str, uses: dict[int, set[str]]) -> Iterator[int]:
    for stmt in flatten(body):
        if name not in uses[id(stmt)]:
            continue
        if any(isinstance(e, ir.Var) and e.name == name for e in ir.expressions(stmt)):
            raise _Escapes
        if isinstance(stmt, ir.Assign):
            yield id(stmt)
            return
        if isinstance(stmt, ir.For) and stmt.var == name:
            yield id(stmt)
            continue
        for inner in ir.blocks(stmt):
            yield from _localise(inner, name, uses)


def flatten(body: ir.Block) -> Iterator[ir.Stmt]:
    """The statements of one C++ scope: phases and inlined functions open none."""
    for stmt in body:
        if isinstance(stmt, (ir.Phase, ir.Inlined)):
            yield from flatten(stmt.body)
        else:
            yield stmt


def _uses_by_statement(body: ir.Block) -> dict[int, set[str]]:
    """Variables read or assigned, by `id` of statement (with all inside it) and of block."""
    found: dict[int, set[str]] = {}

    def visit(block: ir.Block) -> set[str]:
        names: set[str] = set()
        for stmt in block:
            own = {e.name for e in ir.expressions(stmt) if isinstance(e, ir.Var)}
            if isinstance(stmt, ir.Assign):
                own.add(stmt.target)
            elif isinstance(stmt, ir.For):
                own.add(stmt.var)
            for inner in ir.blocks(stmt):
                own |= visit(inner)
            found[id(stmt)] = own
            names |= own
        found[id(block)] = names
        return names

    visit(body)
    return found
