"""Statements of a typed kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from .expressions import Array, Expr, Location


@dataclass(eq=False)
class Stmt:
    loc: Location = field(kw_only=True)
    phase: str = field(default="", kw_only=True)


Block = list[Stmt]


@dataclass(eq=False)
class Declare(Stmt):
    """A shared or local array comes into being; `offset` is the array's own."""

    array: Array
    offset: Expr | None = None


@dataclass(eq=False)
class Assign(Stmt):
    target: str
    value: Expr
    declares: bool = False


@dataclass(eq=False)
class Evaluate(Stmt):
    """An expression for its effect: an atomic whose result is not used."""

    value: Expr


@dataclass(eq=False)
class Store(Stmt):
    """`array[index] = value`. After `+=` and the like, `value` loads the very same index nodes."""

    array: Array
    index: tuple[Expr, ...]
    value: Expr


@dataclass(eq=False)
class VectorStore(Stmt):
    array: Array
    index: tuple[Expr, ...]
    value: Expr


@dataclass(eq=False)
class FragmentStore(Stmt):
    array: Array
    index: tuple[Expr, ...]
    fragment: Expr
    ld: Expr
    layout: str


@dataclass(eq=False)
class AsyncCopy(Stmt):
    """`count` elements from global to shared memory; 4, 8 or 16 bytes."""

    target: Array
    target_index: tuple[Expr, ...]
    source: Array
    source_index: tuple[Expr, ...]
    count: int


@dataclass(eq=False)
class AsyncCommit(Stmt):
    pass


@dataclass(eq=False)
class AsyncWait(Stmt):
    """Wait until at most `pending` of this thread's committed groups are in flight."""

    pending: int


@dataclass(eq=False)
class Barrier(Stmt):
    """syncthreads."""


@dataclass(eq=False)
class Fence(Stmt):
    """threadfence."""


@dataclass(eq=False)
class WarpBarrier(Stmt):
    """syncwarp; its fence orders memory among the lanes in `mask`."""

    mask: Expr


@dataclass(eq=False)
class If(Stmt):
    test: Expr
    body: Block
    orelse: Block


@dataclass(eq=False)
class For(Stmt):
    var: str
    start: Expr
    stop: Expr
    step: Expr
    descending: bool
    body: Block
    declares: bool = False


@dataclass(eq=False)
class While(Stmt):
    test: Expr
    body: Block


@dataclass(eq=False)
class Break(Stmt):
    pass


@dataclass(eq=False)
class Continue(Stmt):
    pass


@dataclass(eq=False)
class Return(Stmt):
    pass


@dataclass(eq=False)
class Phase(Stmt):
    name: str
    body: Block


@dataclass(eq=False)
class Inlined(Stmt):
    """The body of a device function, at its call."""

    function: str
    body: Block
    result: str | None
