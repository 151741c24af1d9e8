"""The typed kernel: what the front end produces and every back end consumes.

A back end may rely on this, because the front end has checked it:

Types. Every expression carries its `type`. Operands of `Binary`, `Compare`, `Select` and of
`min`/`max` have equal types, except that an accumulator fragment also meets float32 scalars,
element by element. Every conversion is a `Cast`; the `implicit` ones widen a 16-bit float or
convert a constant, both exactly. 16-bit types only appear on loads, stores, casts, selects,
shuffles, vectors and fragments: arithmetic is in int32, uint32, bool_ or float32. Conditions are
`bool_`. Every name in `Kernel.variables` has one type throughout.

Constants. `const` holds the value of an expression known at compile time (a Python int, bool or
float rounded to float32); the node itself keeps the source's structure. `NamedConst` refers to an
entry of `Kernel.constants`: specialisation parameters and module-level numbers, by their names. A
conditional statement on a constant has been replaced by the arm taken.

Arithmetic. int32 and uint32 wrap modulo 2**32. `//` and `%` are Python's: they round towards
minus infinity; where both operands are `nonneg` C's `/` and `%` agree. `>>` on int32 is
arithmetic. `/` is for float32 only. Nothing may be contracted or reordered.

Control. `For` evaluates start, stop and step once; the step is positive or negative for certain
(`descending`), the body never assigns the loop variable, and no statement after the loop reads it.
`and`/`or` (`BoolOp`) evaluate their right operand only where it decides, and so does a `Select`
that is not `constant_time`. `Return` carries no value. Device functions are inlined: `Inlined`
holds the statements under fresh names; the value, if any, is in variable `result`.

Scopes. `Assign.declares` marks the assignment that may declare its variable, C style: it is the
first, and every other use lies behind it in the same block or deeper (`Phase` and `Inlined` open
no scope). `For.declares` says the same of a loop variable. Variables in `Kernel.hoisted` have no
such place and belong at the top. A `Var` with `maybe_unassigned` may be
read on a path that never assigned it.

Memory. An `Array` is global (a parameter, indexed through launch-time element strides), shared
(constant `shape`, row major, at least 16-byte aligned), dynamic shared (`shape` is None: one
dimension, starting `offset` bytes into the launch's dynamic shared memory) or local (per thread,
constant shape; its `dtype` may be an accumulator fragment). Index tuples have one int32 or uint32
expression per dimension. A load or store in the source is one node.

Facts. `uniformity` says how far a value is the same for sure: over the grid, a block, a warp, or
not at all. `nonneg` holds for int32 values that cannot be negative short of overflow. No branch,
loop bound or address depends on a parameter in `Kernel.secrets`. `Stmt.phase` is the innermost
named phase ("" for none). `Kernel.source.comments` keeps the comments by line.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from .types import ArrayType, FragmentType, Scalar, Type


@dataclass(frozen=True)
class Location:
    """A span of source; columns count from 1, as editors do."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str  # the whole first line

    def caret(self) -> str:
        """Two lines: where and the source, then a caret under the span.

        >>> print(Location("k.py", 3, 5, 3, 8, "    a+b").caret())
          File "k.py", line 3
            a+b
            ^^^
        """
        width = self.end_column - self.column if self.end_line == self.line else 1
        shift = len(self.text) - len(self.text.lstrip())
        pad = " " * (4 + max(self.column - 1 - shift, 0))
        where = f'  File "{self.file}", line {self.line}\n    {self.text.strip()}'
        return f"{where}\n{pad}{'^' * max(width, 1)}"


class Uniformity(enum.IntEnum):
    """How far a value is known to be the same; the larger, the more it may vary."""

    GRID = 0
    BLOCK = 1
    WARP = 2
    THREAD = 3


class Space(enum.Enum):
    GLOBAL = "global"
    SHARED = "shared"
    LOCAL = "local"


@dataclass(eq=False)
class Array:
    """An array of the kernel; see the module docstring for what each space promises."""

    name: str
    dtype: Scalar | FragmentType
    ndim: int
    space: Space
    loc: Location
    shape: tuple[int, ...] | None = None
    extents: tuple[Expr, ...] = ()  # `shape` as the source spells it
    offset: Expr | None = None  # dynamic shared only: bytes, grid-uniform
    written: bool = False  # some statement may write it

    @property
    def dynamic(self) -> bool:
        return self.space is Space.SHARED and self.shape is None

    @property
    def size(self) -> int:
        """Elements; only for arrays of constant shape."""
        assert self.shape is not None
        size = 1
        for n in self.shape:
            size *= n
        return size


@dataclass(eq=False)
class Expr:
    type: Type = field(kw_only=True)
    loc: Location = field(kw_only=True)
    const: int | float | bool | None = field(default=None, kw_only=True)
    uniformity: Uniformity = field(default=Uniformity.THREAD, kw_only=True)
    nonneg: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Literal(Expr):
    """A number; its value is `const`."""


@dataclass(eq=False)
class NamedConst(Expr):
    name: str


@dataclass(eq=False)
class Var(Expr):
    """A register variable or a scalar parameter."""

    name: str
    maybe_unassigned: bool = False


@dataclass(eq=False)
class Special(Expr):
    """threadIdx.x, blockIdx.y, blockDim.z, gridDim.x, laneid, warpid, ..."""

    name: str


@dataclass(eq=False)
class Dim(Expr):
    """Extent of a global array along an axis."""

    array: Array
    axis: int


@dataclass(eq=False)
class Unary(Expr):
    op: str  # - ~ not
    operand: Expr


@dataclass(eq=False)
class Binary(Expr):
    op: str  # + - * / // % << >> & | ^
    left: Expr
    right: Expr


@dataclass(eq=False)
class Compare(Expr):
    op: str  # < <= > >= == !=
    left: Expr
    right: Expr


@dataclass(eq=False)
class BoolOp(Expr):
    op: str  # and or
    left: Expr
    right: Expr


@dataclass(eq=False)
class Select(Expr):
    test: Expr
    if_true: Expr
    if_false: Expr
    constant_time: bool  # ct.select: both sides are evaluated, no branch


@dataclass(eq=False)
class Cast(Expr):
    operand: Expr
    implicit: bool = False


@dataclass(eq=False)
class Bitcast(Expr):
    operand: Expr


@dataclass(eq=False)
class Math(Expr):
    """min max abs exp exp2 log log2 sqrt rsqrt tanh floor ceil fma popc clz ffs brev."""

    name: str
    args: tuple[Expr, ...]


@dataclass(eq=False)
class Load(Expr):
    array: Array
    index: tuple[Expr, ...]


@dataclass(eq=False)
class Shuffle(Expr):
    mode: str  # down up xor idx
    mask: Expr
    value: Expr
    lane: Expr


@dataclass(eq=False)
class Vote(Expr):
    mode: str  # all any ballot
    mask: Expr
    predicate: Expr


@dataclass(eq=False)
class Atomic(Expr):
    """Read-modify-write; the value is the element before it."""

    op: str  # add sub min max and or xor exch cas
    array: Array
    index: tuple[Expr, ...]
    value: Expr
    compare: Expr | None = None  # cas only


@dataclass(eq=False)
class VectorLoad(Expr):
    array: Array
    index: tuple[Expr, ...]


@dataclass(eq=False)
class VectorMake(Expr):
    items: tuple[Expr, ...]


@dataclass(eq=False)
class VectorItem(Expr):
    vector: Expr
    item: int


@dataclass(eq=False)
class FragmentFill(Expr):
    value: Expr


@dataclass(eq=False)
class FragmentLoad(Expr):
    """16x16 elements from `index` on; `ld` elements from one row (layout "row") or column to the
    next. `type` says which operand and layout."""

    array: Array
    index: tuple[Expr, ...]
    ld: Expr
    layout: str


@dataclass(eq=False)
class FragmentMma(Expr):
    """a @ b + c."""

    a: Expr
    b: Expr
    c: Expr


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
