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
first, and every other use lies after it in the same block or deeper (`Phase` and `Inlined` open
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

from .expressions import (
    Array,
    Atomic,
    Binary,
    Bitcast,
    BoolOp,
    Cast,
    Compare,
    Dim,
    Expr,
    FragmentFill,
    FragmentLoad,
    FragmentMma,
    Literal,
    Load,
    Location,
    Math,
    NamedConst,
    Select,
    Shuffle,
    Space,
    Special,
    Unary,
    Uniformity,
    Var,
    VectorItem,
    VectorLoad,
    VectorMake,
    Vote,
)
from .kernels import (
    Kernel,
    Parameter,
    Source,
    Warning_,
    blocks,
    expressions,
    operands,
    walk,
    walk_expr,
)
from .statements import (
    Assign,
    AsyncCommit,
    AsyncCopy,
    AsyncWait,
    Barrier,
    Block,
    Break,
    Continue,
    Declare,
    Evaluate,
    Fence,
    For,
    FragmentStore,
    If,
    Inlined,
    Phase,
    Return,
    Stmt,
    Store,
    VectorStore,
    WarpBarrier,
    While,
)

__all__ = [
    "Array",
    "Assign",
    "AsyncCommit",
    "AsyncCopy",
    "AsyncWait",
    "Atomic",
    "Barrier",
    "Binary",
    "Bitcast",
    "Block",
    "BoolOp",
    "Break",
    "Cast",
    "Compare",
    "Continue",
    "Declare",
    "Dim",
    "Evaluate",
    "Expr",
    "Fence",
    "For",
    "FragmentFill",
    "FragmentLoad",
    "FragmentMma",
    "FragmentStore",
    "If",
    "Inlined",
    "Kernel",
    "Literal",
    "Load",
    "Location",
    "Math",
    "NamedConst",
    "Parameter",
    "Phase",
    "Return",
    "Select",
    "Shuffle",
    "Source",
    "Space",
    "Special",
    "Stmt",
    "Store",
    "Unary",
    "Uniformity",
    "Var",
    "VectorItem",
    "VectorLoad",
    "VectorMake",
    "VectorStore",
    "Vote",
    "Warning_",
    "WarpBarrier",
    "While",
    "blocks",
    "expressions",
    "operands",
    "walk",
    "walk_expr",
]
