"""Which reads may find a variable unassigned, and where a variable can be declared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from . import ir


def check_assignments(kernel: ir.Kernel) -> None:
    """Mark every `Var` that some path reaches without an assignment."""
    assigned = {p.name for p in kernel.parameters}
    _flow(kernel.body, assigned)


def _flow(body: ir.Block, assigned: set[str]) -> set[str] | None:
    """Names assigned for certain after `body`; None if control never gets there."""
    for stmt in body:
        for expr in ir.expressions(stmt):
            if isinstance(expr, ir.Var):
                expr.maybe_unassigned = expr.name not in assigned
        if isinstance(stmt, ir.Assign):
            assigned = assigned | {stmt.target}
        elif isinstance(stmt, ir.If):
            arms = [_flow(arm, assigned) for arm in (stmt.body, stmt.orelse)]
            alive = [arm for arm in arms if arm is not None]
            if not alive:
                return None
            assigned = set.intersection(*alive)
        elif isinstance(stmt, ir.For):
            _flow(stmt.body, assigned | {stmt.var})
        elif isinstance(stmt, ir.While):
            _flow(stmt.body, assigned)
        elif isinstance(stmt, (ir.Phase, ir.Inlined)):
            behind = _flow(stmt.body, assigned)
            if behind is None:
                return None
            assigned = behind
        elif isinstance(stmt, (ir.Break, ir.Continue, ir.Return)):
            return None
    return assigned


# A place in the tree: (block, position) from the kernel body inwards. Phases and inlined bodies
# open no scope, so their statements count as part of the block around them.
_Place = tuple[tuple[int, int], ...]


def place_declarations(kernel: ir.Kernel) -> None:
    """Set `declares` on assignments and loops, `hoisted` for variables that have no place."""
    uses: dict[str, list[tuple[_Place, ir.Assign | ir.For | None]]] = defaultdict(list)
    _places(kernel.body, ((id(kernel.body), 0),), count(), uses)
    parameters = {p.name for p in kernel.parameters}
    hoisted = []
    for name in kernel.variables:
        if name in parameters or name not in uses:
            continue
        owners = [owner for _, owner in uses[name] if owner is not None]
        if all(isinstance(owner, ir.For) for owner in owners):
            for owner in owners:
                owner.declares = True
            continue
        place, first = uses[name][0]
        inside = all(_behind(place, other) for other, _ in uses[name][1:])
        if isinstance(first, ir.Assign) and inside:
            first.declares = True
        else:
            hoisted.append(name)
    kernel.hoisted = tuple(hoisted)


def _behind(place: _Place, other: _Place) -> bool:
    depth = len(place) - 1
    if len(other) <= depth or other[:depth] != place[:depth]:
        return False
    return other[depth][0] == place[depth][0] and other[depth][1] > place[depth][1]


def _places(body: ir.Block, outer: _Place, clock: Iterator[int], uses: dict) -> None:
    """Record where each variable is used; `outer` ends with (this block, anything)."""
    for stmt in body:
        here = (*outer[:-1], (outer[-1][0], next(clock)))
        for expr in ir.expressions(stmt):
            if isinstance(expr, ir.Var):
                uses[expr.name].append((here, None))
        if isinstance(stmt, ir.Assign):
            uses[stmt.target].append((here, stmt))
        elif isinstance(stmt, ir.For):
            uses[stmt.var].append((here, stmt))
        for inner in ir.blocks(stmt):
            opens_scope = not isinstance(stmt, (ir.Phase, ir.Inlined))
            _places(inner, (*here, (id(inner), 0)) if opens_scope else here, clock, uses)
