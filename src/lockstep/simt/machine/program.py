"""From a typed kernel to Python code that drives the machine.

The generated function executes each statement once for all active lanes; `m` is the machine, and
`m.v` the variables of the active frame. It is compiled under the kernel's own file name and line
numbers, so that a traceback shows the kernel.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.simt import ir
from lockstep.simt.types import ACCUMULATOR

from . import values
from .control import ForLoop, Loop
from .frames import Vector, select_vector
from .gathers import Load, gather, sum_of
from .operations import operations
from .program_expressions import MATH, ExpressionWriter
from .records.counters import Site, StraightLine

JUMPS = (ir.Break, ir.Continue, ir.Return)


@dataclass
class Program:
    """The generated code and what it counts into."""

    source: str
    code: Any
    sites: list[Site]
    lines: list[StraightLine]
    checked: frozenset[str] = field(default_factory=frozenset)

    def counters(self) -> tuple[list[Site], list[StraightLine]]:
        """Sites and lines for one run of the code, with nothing counted yet."""
        return [replace(s) for s in self.sites], [replace(line) for line in self.lines]


def compile_kernel(kernel: ir.Kernel) -> Program:
    return _Generator(kernel).program()


class _Generator(ExpressionWriter):
    def __init__(self, kernel: ir.Kernel):
        super().__init__()
        self.kernel = kernel
        self.lines: list[StraightLine] = []
        self.open: StraightLine | None = None  # statements so far of a straight line
        self.text: list[tuple[int, str, int]] = []  # indentation, code, line of the kernel
        every = (e for s in ir.walk(kernel.body) for e in ir.expressions(s))
        self.checked = frozenset(
            e.name for e in every if isinstance(e, ir.Var) and e.maybe_unassigned
        )
        self.declared_in: dict[str, int] = {}
        _find_declarations(kernel.body, self.declared_in)

    def program(self) -> Program:
        self.block(self.kernel.body, 1, None)
        lines = [f"{'    ' * indent}{text}" for indent, text, _ in self.text]
        source = "\n".join(["def run(m, S, L, A):", *lines, "    return"])
        tree = ast.parse(source)
        first = self.kernel.source.first_line
        of_kernel = [first, *(line for _, _, line in self.text), first]
        for node in ast.walk(tree):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = of_kernel[node.lineno - 1]
        namespace: dict[str, Any] = {
            "np": np,
            "ForLoop": ForLoop,
            "Loop": Loop,
            "Vector": Vector,
            "Load": Load,
            "gather": gather,
            "select_vector": select_vector,
            **{name: getattr(values, name) for name in _HELPERS},
            **{f"math_{name}": function for name, function in MATH.items()},
            **self.constants,
        }
        exec(compile(tree, self.kernel.source.file, "exec"), namespace)
        return Program(source, namespace["run"], self.sites, self.lines, self.checked)

    # Bookkeeping

    def emit(self, indent: int, text: str) -> None:
        assert self.here is not None
        self.text.append((indent, text, self.here.loc.line))

    def count(self, indent: int, stmt: ir.Stmt) -> None:
        """Add a statement to the straight line it belongs to."""
        kinds = operations(stmt)
        if self.open is None:
            self.open = StraightLine(stmt.phase)
            self.lines.append(self.open)
            self.emit(indent, f"m.tick(L[{len(self.lines) - 1}])")
        self.open.add(stmt.loc, kinds)

    # Statements

    def block(self, body: ir.Block, indent: int, loop: str | None) -> None:
        """Write statements; what follows a jump is only for the lanes that did not take it."""
        self.open = None
        for i, stmt in enumerate(body):
            self.statement(stmt, indent, loop)
            if isinstance(stmt, JUMPS):
                break
            if i + 1 < len(body) and _jumps(stmt):
                self.here = stmt
                self.emit(indent, f"if {loop or 'm'}.survivors():")
                indent += 1
                self.emit(indent, "pass")
                self.open = None
        self.open = None

    def statement(self, stmt: ir.Stmt, indent: int, loop: str | None) -> None:
        self.here = stmt
        if not isinstance(stmt, (ir.Phase, ir.Inlined, ir.Declare, ir.For, ir.While)):
            self.count(indent, stmt)
        method = getattr(self, f"stmt_{type(stmt).__name__.lower()}")
        method(stmt, indent, loop)
        if ir.blocks(stmt):
            self.open = None

    def merged(self, stmt: ir.Stmt, bodies: tuple[ir.Block, ...]) -> str:
        """Variables assigned inside that live on outside, as a tuple of names."""
        names = []
        inside = {id(b) for body in bodies for b in (body, *_inner_blocks(body))}
        for body in bodies:
            for s in ir.walk(body):
                target = s.target if isinstance(s, ir.Assign) else None
                target = s.var if isinstance(s, ir.For) else target
                if isinstance(s, ir.Store) and s.array.dtype == ACCUMULATOR:
                    names += [f"{s.array.name}[{i}]" for i in range(s.array.size)]
                if target is None or self.declared_in.get(target) in inside:
                    continue
                names.append(target)
                if target in self.checked:
                    names.append(f"{target}?")
        return repr(tuple(dict.fromkeys(names)))

    def stmt_declare(self, stmt: ir.Declare, indent: int, loop: str | None) -> None:
        array = stmt.array
        if array.dynamic:
            assert array.offset is not None
            self.emit(indent, f"m.declare_dynamic({array.name!r}, {self.expr(array.offset)})")

    def stmt_assign(self, stmt: ir.Assign, indent: int, loop: str | None) -> None:
        self.emit(indent, f"m.v[{stmt.target!r}] = {self.expr(stmt.value)}")
        if stmt.target in self.checked:
            self.emit(indent, f"m.v[{stmt.target + '?'!r}] = True")

    def stmt_evaluate(self, stmt: ir.Evaluate, indent: int, loop: str | None) -> None:
        self.emit(indent, self.expr(stmt.value))

    def stmt_store(self, stmt: ir.Store, indent: int, loop: str | None) -> None:
        value = self.expr(stmt.value)
        site = self.access("store", stmt.array, stmt.loc)
        if stmt.array.dtype == ACCUMULATOR:
            place = self.fragment_place(stmt.array, stmt.index)
            self.emit(indent, f"m.store_fragment({site}, {place}, {value})")
            return
        place = f"A[{stmt.array.name!r}], {self.index(stmt.index)}"
        self.emit(indent, f"m.store({site}, {place}, {value})")

    def stmt_vectorstore(self, stmt: ir.VectorStore, indent: int, loop: str | None) -> None:
        value = self.expr(stmt.value)
        site = self.access("store", stmt.array, stmt.loc)
        place = f"A[{stmt.array.name!r}], {self.index(stmt.index)}"
        self.emit(indent, f"m.vstore({site}, {place}, {value})")

    def stmt_fragmentstore(self, stmt: ir.FragmentStore, indent: int, loop: str | None) -> None:
        value = self.expr(stmt.fragment)
        site = self.access("store", stmt.array, stmt.loc)
        place = f"A[{stmt.array.name!r}], {self.index(stmt.index)}"
        ld = self.expr(stmt.ld)
        self.emit(indent, f"m.fragment_store({site}, {place}, {value}, {ld}, {stmt.layout!r})")

    def stmt_asynccopy(self, stmt: ir.AsyncCopy, indent: int, loop: str | None) -> None:
        sites = ", ".join(
            self.access("copy", array, stmt.loc) for array in (stmt.source, stmt.target)
        )
        target = f"A[{stmt.target.name!r}], {self.index(stmt.target_index)}"
        source = f"A[{stmt.source.name!r}], {self.index(stmt.source_index)}"
        self.emit(indent, f"m.copy_async(({sites}), {target}, {source}, {stmt.count})")

    def stmt_asynccommit(self, stmt: ir.AsyncCommit, indent: int, loop: str | None) -> None:
        self.emit(indent, f"m.commit({self.site('commit', '', '', stmt.loc)})")

    def stmt_asyncwait(self, stmt: ir.AsyncWait, indent: int, loop: str | None) -> None:
        self.emit(indent, f"m.wait({self.site('wait', '', '', stmt.loc)}, {stmt.pending})")

    def stmt_barrier(self, stmt: ir.Barrier, indent: int, loop: str | None) -> None:
        self.emit(indent, f"m.syncthreads({self.site('barrier', '', 'syncthreads', stmt.loc)})")

    def stmt_fence(self, stmt: ir.Fence, indent: int, loop: str | None) -> None:
        self.emit(indent, f"m.threadfence({self.site('fence', '', 'threadfence', stmt.loc)})")

    def stmt_warpbarrier(self, stmt: ir.WarpBarrier, indent: int, loop: str | None) -> None:
        site = self.site("warp barrier", "", "syncwarp", stmt.loc)
        self.emit(indent, f"m.syncwarp({site}, {self.expr(stmt.mask)})")

    def stmt_if(self, stmt: ir.If, indent: int, loop: str | None) -> None:
        test, frame = self.fresh("test"), self.fresh("frame")
        self.emit(indent, f"{test} = {self.expr(stmt.test)}")
        self.emit(indent, f"{frame} = m.frame")
        site = self.site("branch", "", "if", stmt.loc)
        for body, entry in (
            (stmt.body, f"m.enter({test}, {site})"),
            (stmt.orelse, f"m.enter(logical_not({test}))"),
        ):
            if body or body is stmt.body:
                self.here = stmt
                self.emit(indent, f"if {entry}:")
                self.block(body, indent + 1, loop)
                self.here = stmt
                self.emit(indent + 1, f"m.leave({frame}, {self.merged(stmt, (body,))})")

    def stmt_for(self, stmt: ir.For, indent: int, loop: str | None) -> None:
        self.count(indent, stmt)
        name = self.fresh("loop")
        bounds = ", ".join(self.expr(e) for e in (stmt.start, stmt.stop, stmt.step))
        site = self.site("branch", "", "for", stmt.loc)
        names = self.merged(stmt, (stmt.body,))
        head = f"ForLoop(m, {stmt.var!r}, ({bounds}), {stmt.descending}, {names}, {site})"
        self.emit(indent, f"{name} = {head}")
        first = len(self.lines)
        summed = sum_of(stmt)
        if summed is not None:
            self.at_once(name, stmt, summed, indent)
        self.emit(indent, f"while {name}.advance():")
        self.trip(stmt, indent + 1)
        self.block(stmt.body, indent + 1, name)
        self.here = stmt
        assert summed is None or len(self.lines) == first + 2  # the trip, and its one statement

    def at_once(
        self, loop: str, stmt: ir.For, summed: tuple[str, str, ir.Expr], indent: int
    ) -> None:
        """Have `gathers` run all rounds, if it can. Loads keep the sites they have in the loop."""
        target, step, summand = summed
        self.here = stmt.body[0]
        loads = [e for e in ir.walk_expr(summand) if isinstance(e, ir.Load)]
        texts = []
        for number, load in enumerate(loads):
            site = self.access("load", load.array, load.loc)
            self.sites_of[id(load)] = site
            self.gathered[id(load)] = f"g[{number}]"
            index = ", ".join(
                "None" if isinstance(part, ir.Var) and part.name == stmt.var else self.expr(part)
                for part in load.index
            )
            texts.append(f"Load({site}, A[{load.array.name!r}], ({index},))")
        value = self.expr(summand)
        self.gathered.clear()
        lines = f"(L[{len(self.lines)}], L[{len(self.lines) + 1}])"
        call = f"gather({loop}, {lines}, {target!r}, {step!r}, ({', '.join(texts)},)"
        self.here = stmt
        self.emit(indent, f"{call}, lambda g: {value})")

    def trip(self, stmt: ir.For | ir.While, indent: int) -> None:
        """The cost of every trip besides the body: counting, comparing, branching."""
        line = StraightLine(stmt.phase)
        kinds = Counter({"integer": 1, "compare": 1, "branch": 1})
        line.add(stmt.loc, kinds if isinstance(stmt, ir.For) else operations(stmt))
        self.lines.append(line)
        self.emit(indent, f"m.tick(L[{len(self.lines) - 1}])")

    def stmt_while(self, stmt: ir.While, indent: int, loop: str | None) -> None:
        name = self.fresh("loop")
        site = self.site("branch", "", "while", stmt.loc)
        names = self.merged(stmt, (stmt.body,))
        self.emit(indent, f"{name} = Loop(m, {names}, {site})")
        self.emit(indent, f"while {name}.next() and {name}.test({self.expr(stmt.test)}):")
        self.trip(stmt, indent + 1)
        self.block(stmt.body, indent + 1, name)
        self.here = stmt

    def stmt_break(self, stmt: ir.Break, indent: int, loop: str | None) -> None:
        self.emit(indent, f"{loop}.break_()")

    def stmt_continue(self, stmt: ir.Continue, indent: int, loop: str | None) -> None:
        self.emit(indent, f"{loop}.continue_()")

    def stmt_return(self, stmt: ir.Return, indent: int, loop: str | None) -> None:
        self.emit(indent, "m.return_()")

    def stmt_phase(self, stmt: ir.Phase, indent: int, loop: str | None) -> None:
        before = self.fresh("phase")
        self.emit(indent, f"{before} = m.enter_phase({stmt.name!r})")
        self.block(stmt.body, indent, loop)
        self.here = stmt
        self.emit(indent, f"m.enter_phase({before})")

    def stmt_inlined(self, stmt: ir.Inlined, indent: int, loop: str | None) -> None:
        for inner in stmt.body:
            self.statement(inner, indent, loop)


_HELPERS = (
    "i32",
    "u32",
    "logical_not",
    "logical_and",
    "logical_or",
    "select",
    "floor_divide",
    "remainder",
    "cast",
    "bitcast",
)


def _jumps(stmt: ir.Stmt) -> bool:
    """Whether a lane in `stmt` may jump past its end: by return, or by break or continue of a loop
    around it."""
    inside = [s for body in ir.blocks(stmt) for s in body]
    if isinstance(stmt, (ir.For, ir.While)):
        return any(isinstance(s, ir.Return) for s in ir.walk(inside))
    return any(isinstance(s, JUMPS) or _jumps(s) for s in inside)


def _inner_blocks(body: ir.Block) -> list[ir.Block]:
    return [b for s in ir.walk(body) for b in ir.blocks(s)]


def _find_declarations(body: ir.Block, found: dict[str, int]) -> None:
    """The block in which each variable is declared."""
    for stmt in body:
        if isinstance(stmt, ir.Assign) and stmt.declares:
            found[stmt.target] = id(body)
        elif isinstance(stmt, ir.For) and stmt.declares:
            found[stmt.var] = id(stmt.body)
        for inner in ir.blocks(stmt):
            _find_declarations(inner, found)
