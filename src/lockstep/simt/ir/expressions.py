"""Expressions of a typed kernel, the arrays they refer to, and where they stand in the source."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from lockstep.simt.types import FragmentType, Scalar, Type


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
    """An array of the kernel; see the docstring of `ir` for what each space promises."""

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
    """min max abs exp exp2 ct_exp2 log log2 sqrt rsqrt tanh floor ceil fma popc clz ffs brev."""

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
