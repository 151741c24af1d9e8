"""Facts about every run: how uniform a value is, and which integers cannot be negative."""

from __future__ import annotations

from . import ir
from .errors import UnsupportedConstruct
from .ir import Uniformity as U
from .types import ACCUMULATOR, FragmentType, bool_, int32, uint32


def annotate(kernel: ir.Kernel) -> None:
    """Fill in `uniformity` and `nonneg` everywhere, then check what depends on them."""
    _Uniformity(kernel).run()
    _Signs(kernel).run()
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.For) and stmt.step.const is None and not stmt.step.nonneg:
            raise UnsupportedConstruct(
                "the sign of this step is not known at compile time", stmt.step.loc
            )
        if isinstance(stmt, ir.Declare) and stmt.offset is not None:
            _require_grid_uniform(stmt.offset, "the offset of dynamic shared memory")
        places = [(stmt.array, stmt.index)] if isinstance(stmt, ir.Store) else []
        places += [(e.array, e.index) for e in ir.expressions(stmt) if isinstance(e, ir.Load)]
        for array, index in places:
            if array.dtype == ACCUMULATOR:
                for part in index:
                    _require_grid_uniform(part, "the index of a fragment array")


def _require_grid_uniform(expr: ir.Expr, what: str) -> None:
    if expr.uniformity is not U.GRID:
        raise UnsupportedConstruct(f"{what} must be the same for every thread", expr.loc)


class _Uniformity:
    """Fixpoint over variables: a value is as uniform as what it is computed from and as the
    control flow between the place its variable is declared and the assignment."""

    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        self.level = dict.fromkeys(kernel.variables, U.GRID)
        self.declared_under: dict[str, U] = {}
        self.escape: dict[int, U] = {}  # loop -> control under which lanes leave its body early
        self.changed = True

    def run(self) -> None:
        while self.changed:
            self.changed = False
            self.barriers: list[ir.Stmt] = []
            self.block(self.kernel.body, U.GRID, None)
        self.kernel.warnings += tuple(
            ir.Warning_("syncthreads where threads of one block may disagree", stmt.loc)
            for stmt in self.barriers
        )

    def block(self, body: ir.Block, control: U, loop: ir.Stmt | None) -> None:
        for stmt in body:
            if loop is not None:
                control = max(control, self.escape.get(id(loop), U.GRID))
            for expr in ir.expressions(stmt):
                expr.uniformity = self.of(expr)
            if isinstance(stmt, ir.Assign):
                if stmt.declares:
                    self.declared_under[stmt.target] = control
                self.raise_level(stmt.target, stmt.value.uniformity, control)
            elif isinstance(stmt, ir.If):
                inner = max(control, stmt.test.uniformity)
                self.block(stmt.body, inner, loop)
                self.block(stmt.orelse, inner, loop)
            elif isinstance(stmt, ir.For):
                bounds = (stmt.start, stmt.stop, stmt.step)
                inner = max(control, *(e.uniformity for e in bounds))
                if stmt.declares:
                    self.declared_under[stmt.var] = inner
                start = max(stmt.start.uniformity, stmt.step.uniformity)
                self.raise_level(stmt.var, start, inner)
                self.block(stmt.body, inner, stmt)
            elif isinstance(stmt, ir.While):
                self.block(stmt.body, max(control, stmt.test.uniformity), stmt)
            elif isinstance(stmt, (ir.Phase, ir.Inlined)):
                self.block(stmt.body, control, loop)
            elif isinstance(stmt, (ir.Break, ir.Continue)) and control > self.escape.get(
                id(loop), U.GRID
            ):
                self.escape[id(loop)] = control
                self.changed = True
            elif isinstance(stmt, ir.Barrier) and control > U.BLOCK:
                self.barriers.append(stmt)

    def raise_level(self, name: str, level: U, control: U) -> None:
        if control > self.declared_under.get(name, U.GRID):
            level = max(level, control)
        if level > self.level[name]:
            self.level[name] = level
            self.changed = True

    def of(self, expr: ir.Expr) -> U:
        """Uniformity of one node whose operands are done."""
        below = max((e.uniformity for e in ir.operands(expr)), default=U.GRID)
        if expr.const is not None:
            return U.GRID
        if isinstance(expr, ir.Var):
            return self.level[expr.name]
        if isinstance(expr, ir.Special):
            if expr.name.startswith(("blockDim", "gridDim")):
                return U.GRID
            if expr.name.startswith("blockIdx"):
                return U.BLOCK
            return U.WARP if expr.name == "warpid" else U.THREAD
        if isinstance(expr, (ir.Load, ir.VectorLoad)):
            if expr.array.space is ir.Space.LOCAL:
                return U.WARP if isinstance(expr.type, FragmentType) else U.THREAD
            own = U.BLOCK if expr.array.space is ir.Space.SHARED or expr.array.written else U.GRID
            return max(below, own)
        if isinstance(expr, ir.Shuffle):
            fixed = expr.mode == "idx" and expr.lane.uniformity <= U.WARP
            return U.WARP if fixed else U.THREAD
        if isinstance(expr, ir.Vote):
            return U.WARP
        if isinstance(expr, ir.Atomic):
            return U.THREAD
        return max(below, U.WARP) if isinstance(expr.type, FragmentType) else below


class _Signs:
    """Fixpoint from above: every int32 variable is taken for nonnegative until one assignment
    cannot be shown to be."""

    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        parameters = {p.name for p in kernel.parameters}
        self.nonneg = {
            name
            for name, dtype in kernel.variables.items()
            if dtype == int32 and name not in parameters
        }

    def run(self) -> None:
        while True:
            before = len(self.nonneg)
            for stmt in ir.walk(self.kernel.body):
                for expr in ir.expressions(stmt):
                    expr.nonneg = self.of(expr)
                if isinstance(stmt, ir.Assign) and not stmt.value.nonneg:
                    self.nonneg.discard(stmt.target)
                elif isinstance(stmt, ir.For) and not self.counts_up_from_zero(stmt):
                    self.nonneg.discard(stmt.var)
            if len(self.nonneg) == before:
                return

    def counts_up_from_zero(self, loop: ir.For) -> bool:
        if loop.descending:
            return loop.stop.nonneg or loop.stop.const == -1
        return loop.start.nonneg

    def of(self, expr: ir.Expr) -> bool:
        if expr.type == uint32:
            return True
        if expr.type != int32:
            return False
        if expr.const is not None:
            return expr.const >= 0
        if isinstance(expr, ir.Var):
            return expr.name in self.nonneg
        if isinstance(expr, (ir.Special, ir.Dim)):
            return True
        if isinstance(expr, ir.Binary):
            left, right = expr.left.nonneg, expr.right.nonneg
            if expr.op in ("+", "*", "//", "|", "^"):
                return left and right
            if expr.op == "&":
                return left or right
            return {"%": right, "<<": left, ">>": left}.get(expr.op, False)
        if isinstance(expr, ir.Math):
            signs = [arg.nonneg for arg in expr.args]
            if expr.name == "max":
                return any(signs)
            return all(signs) if expr.name == "min" else expr.name != "brev"
        if isinstance(expr, ir.Select):
            return expr.if_true.nonneg and expr.if_false.nonneg
        if isinstance(expr, ir.Cast):
            return expr.operand.type == bool_
        return isinstance(expr, ir.Shuffle) and expr.value.nonneg
