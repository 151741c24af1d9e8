"""The cost of a statement: warp instructions by kind, one per operation in the source.

Constants cost nothing, nor does the address arithmetic of a subscript beyond what its indices
spell out; a compiler would fold most of it into the access.
"""

from __future__ import annotations

from collections import Counter

from lockstep.simt import ir
from lockstep.simt.types import Scalar, float32

SPECIAL = ("exp", "exp2", "ct_exp2", "log", "log2", "sqrt", "rsqrt", "tanh")


def operations(stmt: ir.Stmt) -> Counter:
    """Warp instructions of one execution of `stmt`, without the blocks inside it."""
    kinds: Counter = Counter()
    seen: set[int] = set()
    for expr in ir.expressions(stmt):
        if id(expr) not in seen and expr.const is None:  # `a[i] += x` shares the nodes of i
            seen.add(id(expr))
            kind = _kind(expr)
            if kind:
                kinds[kind] += 1
    own = _own_kind(stmt)
    if own:
        kinds[own] += 1
    if not kinds and isinstance(stmt, ir.Assign):
        kinds["move"] += 1
    return kinds


def _kind(expr: ir.Expr) -> str | None:
    if isinstance(expr, (ir.Load, ir.VectorLoad, ir.FragmentLoad)):
        return None if not isinstance(expr.array.dtype, Scalar) else expr.array.space.value
    if isinstance(expr, ir.Atomic):
        return "atomic"
    if isinstance(expr, (ir.Compare, ir.BoolOp, ir.Select)):
        return "compare"
    if isinstance(expr, ir.Cast):
        return "convert"
    if isinstance(expr, ir.Math) and expr.name in SPECIAL:
        return "special" if isinstance(expr.type, Scalar) else "fragment"
    if isinstance(expr, (ir.Unary, ir.Binary, ir.Math)):
        if not isinstance(expr.type, Scalar):
            return "fragment"
        if expr.type == float32:
            return "special" if isinstance(expr, ir.Binary) and expr.op == "/" else "float"
        return "integer"
    return {
        ir.Shuffle: "shuffle",
        ir.Vote: "vote",
        ir.FragmentFill: "fragment",
        ir.FragmentMma: "mma",
    }.get(type(expr))


def _own_kind(stmt: ir.Stmt) -> str | None:
    if isinstance(stmt, (ir.Store, ir.VectorStore, ir.FragmentStore)):
        return stmt.array.space.value if isinstance(stmt.array.dtype, Scalar) else None
    return {
        ir.AsyncCopy: "copy",
        ir.AsyncCommit: "copy",
        ir.AsyncWait: "copy",
        ir.Barrier: "barrier",
        ir.WarpBarrier: "barrier",
        ir.Fence: "fence",
        ir.If: "branch",
        ir.While: "branch",
    }.get(type(stmt))
