"""Warp matrix fragments: nvcuda::wmma fills its results by reference, so values become calls."""

from __future__ import annotations

from lockstep.simt import ir
from lockstep.simt.types import ACCUMULATOR, FragmentType, bfloat16

from .expressions import ATOM, Code, Expressions
from .spelling import fragment_name
from .writer import Writer

IMPURE = (ir.Load, ir.VectorLoad, ir.Shuffle, ir.Vote, ir.Atomic)


class Fragments(Expressions):
    """Emits what makes a fragment."""

    def __init__(self, writer: Writer, strided: frozenset[str], taken: set[str]):
        super().__init__(strided)
        self.writer = writer
        self.taken = taken  # names in use
        self.fragment_types: set[FragmentType] = set()
        self.named: dict[int, str] = {}  # expressions that got a name of their own, by id
        self.element_of: str | None = None  # index of the element an accumulator stands for

    def fresh(self, name: str) -> str:
        """A name nothing else has."""
        n, free = 2, name
        while free in self.taken:
            free, n = f"{name}_{n}", n + 1
        self.taken.add(free)
        return free

    def note_type(self, dtype: object) -> None:
        super().note_type(dtype)  # type: ignore[arg-type]
        if isinstance(dtype, FragmentType):
            self.fragment_types.add(dtype)

    def make_fragment(
        self, target: str, value: ir.Expr, loc: ir.Location, comment: str | None
    ) -> None:
        """Statements that leave `value` in the fragment called `target`."""
        put = self.writer.put
        if isinstance(value, ir.FragmentFill):
            put(f"wmma::fill_fragment({target}, {self.expr(value.value)});", loc, comment)
        elif isinstance(value, ir.FragmentLoad):
            place = f"&{self.element(value.array, value.index)}, {self.expr(value.ld, True)}"
            load = "wmma::load_matrix_sync"
            if value.type == ACCUMULATOR:
                place += f", wmma::mem_{value.layout}_major"
            elif value.array.dtype == bfloat16 and value.array.space is ir.Space.SHARED:
                load = "load_shared"
                self.needs.add(f"load_shared_{value.type.role}_{value.layout}")  # type: ignore[union-attr]
            put(f"{load}({target}, {place});", loc, comment)
        elif isinstance(value, ir.FragmentMma):
            a, b, c = (self.fragment(e) for e in (value.a, value.b, value.c))
            put(f"wmma::mma_sync({target}, {a}, {b}, {c});", loc, comment)
        elif isinstance(value, (ir.Var, ir.Load)):
            put(f"{target} = {self.expr(value)};", loc, comment)
        else:
            self.map_elements(target, value, loc, comment)

    def fragment(self, value: ir.Expr) -> str:
        """The name of a fragment, which gets one of its own where the source gives it none."""
        if isinstance(value, (ir.Var, ir.Load)):
            return self.expr(value)
        dtype = value.type
        assert isinstance(dtype, FragmentType)
        self.note_type(dtype)
        name = self.fresh(dtype.role if dtype.role in "ab" else "partial")
        self.writer.put(f"{fragment_name(dtype)} {name};", value.loc)
        self.make_fragment(name, value, value.loc, None)
        return name

    def map_elements(
        self, target: str, value: ir.Expr, loc: ir.Location, comment: str | None
    ) -> None:
        """Arithmetic on accumulators, element by element."""
        for operand in ir.operands(value):
            self._settle(operand)
        e = self.element_of = self.fresh("e")
        text = self.expr(value)
        self.element_of = None
        self.taken.discard(e)
        self.writer.put(f"for (int {e} = 0; {e} < {target}.num_elements; ++{e}) {{", loc, comment)
        with self.writer.indented():
            self.writer.put(f"{target}.x[{e}] = {text};", loc)
        self.writer.put("}", loc)

    def _settle(self, value: ir.Expr) -> None:
        """Give a name to everything below that must not be evaluated once per element."""
        if value.type == ACCUMULATOR and isinstance(value, (ir.Unary, ir.Binary, ir.Math)):
            for operand in ir.operands(value):
                self._settle(operand)
        elif value.type == ACCUMULATOR:
            self.named[id(value)] = self.fragment(value)
        elif any(isinstance(e, IMPURE) for e in ir.walk_expr(value)):
            name = self.named[id(value)] = self.fresh("factor")
            self.writer.put(f"const float {name} = {super().code(value, True).text};", value.loc)

    def code(self, expr: ir.Expr, signed: bool) -> Code:
        name = self.named.get(id(expr))
        code = super().code(expr, signed) if name is None else Code(name)
        whole = self.element_of is None or expr.type != ACCUMULATOR
        if whole or isinstance(expr, (ir.Unary, ir.Binary, ir.Math)):
            return code
        return Code(f"{code.text}.x[{self.element_of}]", ATOM)
