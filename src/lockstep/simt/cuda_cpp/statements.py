"""Statements: the structure of the Python source, kept."""

from __future__ import annotations

from lockstep.simt import ir
from lockstep.simt.types import FragmentType, Scalar, VectorType

from .expressions import BINDING
from .fragments import IMPURE, Fragments
from .spelling import c_name, c_type
from .writer import Writer

COMPOUND = ("+", "-", "*", "/", "&", "|", "^", "<<", ">>")


class Statements(Fragments):
    """Emits blocks of statements. Where variables are declared was decided before."""

    def __init__(
        self,
        writer: Writer,
        strided: frozenset[str],
        taken: set[str],
        declaring: frozenset[int],
        shared: dict[str, str],
    ):
        super().__init__(writer, strided, taken)
        self.declaring = declaring
        self.shared = shared  # declarations of shared arrays, by name
        self.clocks: tuple[str, ...] = ()  # phases to measure

    def block(self, body: ir.Block) -> None:
        for stmt in body:
            self.writer.above(stmt.loc)
            getattr(self, f"stmt_{type(stmt).__name__.lower()}")(stmt)

    def braced(self, header: str, stmt: ir.Stmt, body: ir.Block, comment: str | None) -> None:
        self.writer.put(f"{header} {{", stmt.loc, comment)
        with self.writer.indented():
            self.block(body)

    def put(self, text: str, stmt: ir.Stmt) -> None:
        self.writer.put(text, stmt.loc, self.writer.beside(stmt.loc))

    # Variables and memory

    def stmt_declare(self, stmt: ir.Declare) -> None:
        array = stmt.array
        if isinstance(array.dtype, (Scalar, FragmentType)):
            self.note_type(array.dtype)
        if array.space is ir.Space.SHARED:
            self.put(self.shared[array.name], stmt)
        else:
            self.put(f"{c_type(array.dtype)} {c_name(array.name)}{self.dimensions(array)};", stmt)

    def dimensions(self, array: ir.Array) -> str:
        return "".join(f"[{self.expr(extent)}]" for extent in array.extents)

    def stmt_assign(self, stmt: ir.Assign) -> None:
        target, value = c_name(stmt.target), stmt.value
        declares = id(stmt) in self.declaring
        self.note_type(value.type)
        if isinstance(value.type, FragmentType):
            if declares:
                self.writer.put(f"{c_type(value.type)} {target};", stmt.loc)
            self.make_fragment(target, value, stmt.loc, self.writer.beside(stmt.loc))
        elif declares:
            self.put(f"{c_type(value.type)} {target} = {self.expr(value)};", stmt)
        else:
            old = value.left if isinstance(value, ir.Binary) else None
            same = isinstance(old, ir.Var) and old.name == stmt.target
            self.put(self.update(target, value, same), stmt)

    def stmt_store(self, stmt: ir.Store) -> None:
        target, value = self.element(stmt.array, stmt.index), stmt.value
        if isinstance(stmt.array.dtype, FragmentType):
            self.make_fragment(target, value, stmt.loc, self.writer.beside(stmt.loc))
            return
        old = value.left if isinstance(value, ir.Binary) else None
        same = isinstance(old, ir.Load) and old.array is stmt.array and old.index is stmt.index
        self.put(self.update(target, value, same), stmt)

    def update(self, target: str, value: ir.Expr, same: bool) -> str:
        """`target op= x` where `value` is `target op x`, else a plain assignment."""
        if same and isinstance(value, ir.Binary):
            nonneg = value.left.nonneg and value.right.nonneg
            op = "/" if value.op == "//" and nonneg else value.op
            if op in COMPOUND or (op == "%" and nonneg):
                return f"{target} {op}= {self.expr(value.right, signed=not nonneg)};"
        return f"{target} = {self.expr(value)};"

    def stmt_evaluate(self, stmt: ir.Evaluate) -> None:
        self.put(f"{self.expr(stmt.value)};", stmt)

    def stmt_vectorstore(self, stmt: ir.VectorStore) -> None:
        assert isinstance(stmt.value.type, VectorType)
        target = self.vector_at(stmt.array, stmt.index, stmt.value.type)
        self.put(f"{target} = {self.expr(stmt.value)};", stmt)

    def stmt_fragmentstore(self, stmt: ir.FragmentStore) -> None:
        fragment = self.fragment(stmt.fragment)
        place = f"&{self.element(stmt.array, stmt.index)}"
        ld = self.expr(stmt.ld, signed=True)
        order = f"wmma::mem_{stmt.layout}_major"
        self.put(f"wmma::store_matrix_sync({place}, {fragment}, {ld}, {order});", stmt)

    def stmt_asynccopy(self, stmt: ir.AsyncCopy) -> None:
        self.needs.add("pipeline")
        target = self.element(stmt.target, stmt.target_index)
        source = self.element(stmt.source, stmt.source_index)
        assert isinstance(stmt.target.dtype, Scalar)
        size = f"{stmt.count} * sizeof({c_type(stmt.target.dtype)})"
        self.put(f"__pipeline_memcpy_async(&{target}, &{source}, {size});", stmt)

    def stmt_asynccommit(self, stmt: ir.AsyncCommit) -> None:
        self.needs.add("pipeline")
        self.put("__pipeline_commit();", stmt)

    def stmt_asyncwait(self, stmt: ir.AsyncWait) -> None:
        self.needs.add("pipeline")
        self.put(f"__pipeline_wait_prior({stmt.pending});", stmt)

    def stmt_barrier(self, stmt: ir.Barrier) -> None:
        if self.clocks:
            # A warp may go on after a plain barrier until it needs what others wrote, and read the
            # clock there. It has to wait for a result of the barrier before it can branch on it.
            self.put("if (__syncthreads_or(0)) __trap();", stmt)
        else:
            self.put("__syncthreads();", stmt)

    def stmt_fence(self, stmt: ir.Fence) -> None:
        self.put("__threadfence();", stmt)

    def stmt_warpbarrier(self, stmt: ir.WarpBarrier) -> None:
        whole = stmt.mask.const == 0xFFFFFFFF
        self.put(f"__syncwarp({'' if whole else self.expr(stmt.mask)});", stmt)

    # Control

    def stmt_if(self, stmt: ir.If, header: str = "if") -> None:
        self.braced(
            f"{header} ({self.expr(stmt.test)})",
            stmt,
            stmt.body,
            self.writer.beside(stmt.loc, _header_end(stmt, stmt.body)),
        )
        orelse = stmt.orelse
        if len(orelse) == 1 and isinstance(orelse[0], ir.If):
            self.stmt_if(orelse[0], "} else if")
            return
        if orelse:
            self.braced("} else", stmt, orelse, None)
        self.writer.put("}", stmt.loc)

    def stmt_for(self, stmt: ir.For) -> None:
        var = c_name(stmt.var)
        assigned = _assigned(stmt.body)
        # range() evaluates its bounds once; C++ looks at them in every round
        stop = self.steady(stmt.stop, f"{stmt.var}_end", assigned)
        step = self.steady(stmt.step, f"{stmt.var}_step", assigned)
        mixed = not (stmt.start.nonneg and stmt.stop.nonneg)
        declared = "int " if id(stmt) in self.declaring else ""
        start = f"{declared}{var} = {self.expr(stmt.start)}"
        end = stop or self.within(stmt.stop, BINDING["<"] + 1, mixed)
        test = f"{var} {'>' if stmt.descending else '<'} {end}"
        if stmt.step.const in (1, -1):
            advance = f"{'++' if stmt.step.const == 1 else '--'}{var}"
        elif stmt.step.const is not None and stmt.descending:
            advance = f"{var} -= {-stmt.step.const}"
        else:
            advance = f"{var} += {step or self.expr(stmt.step)}"
        if _indexes_registers(stmt):
            self.writer.put("#pragma unroll", stmt.loc)
        comment = self.writer.beside(stmt.loc, _header_end(stmt, stmt.body))
        self.braced(f"for ({start}; {test}; {advance})", stmt, stmt.body, comment)
        self.writer.put("}", stmt.loc)

    def steady(self, bound: ir.Expr, name: str, assigned: set[str]) -> str | None:
        """A name for the value of a bound that the loop might change, else None."""
        changes = any(
            isinstance(e, IMPURE) or (isinstance(e, ir.Var) and e.name in assigned)
            for e in ir.walk_expr(bound)
        )
        if not changes:
            return None
        name = self.fresh(name)
        self.writer.put(f"const int {name} = {self.expr(bound)};", bound.loc)
        return name

    def stmt_while(self, stmt: ir.While) -> None:
        comment = self.writer.beside(stmt.loc, _header_end(stmt, stmt.body))
        self.braced(f"while ({self.expr(stmt.test)})", stmt, stmt.body, comment)
        self.writer.put("}", stmt.loc)

    def stmt_break(self, stmt: ir.Break) -> None:
        self.put("break;", stmt)

    def stmt_continue(self, stmt: ir.Continue) -> None:
        self.put("continue;", stmt)

    def stmt_return(self, stmt: ir.Return) -> None:
        self.put("return;", stmt)

    def stmt_phase(self, stmt: ir.Phase) -> None:
        self.writer.gap()
        self.writer.put(
            f"// phase: {stmt.name}",
            stmt.loc,
            self.writer.beside(stmt.loc, _header_end(stmt, stmt.body)),
        )
        if stmt.name in self.clocks:
            self.writer.put(f"begin_phase({self.clocks.index(stmt.name)});", stmt.loc)
        self.block(stmt.body)

    def stmt_inlined(self, stmt: ir.Inlined) -> None:
        call = stmt.loc.text[stmt.loc.column - 1 : stmt.loc.end_column - 1]
        self.writer.put(f"// {call or stmt.function + '(...)'}", stmt.loc)
        self.block(stmt.body)


def _header_end(stmt: ir.Stmt, body: ir.Block) -> int:
    """The last line of a compound statement's header."""
    return max(stmt.loc.line, body[0].loc.line - 1) if body else stmt.loc.line


def _assigned(body: ir.Block) -> set[str]:
    inside = list(ir.walk(body))
    loops = {s.var for s in inside if isinstance(s, ir.For)}
    return loops | {s.target for s in inside if isinstance(s, ir.Assign)}


def _indexes_registers(loop: ir.For) -> bool:
    """Whether a loop of known length picks elements of a per-thread array: unrolled, the array
    stays in registers."""
    if any(e.const is None for e in (loop.start, loop.stop, loop.step)):
        return False
    for stmt in ir.walk(loop.body):
        places = [(stmt.array, stmt.index)] if isinstance(stmt, ir.Store) else []
        places += [(e.array, e.index) for e in ir.expressions(stmt) if isinstance(e, ir.Load)]
        for array, index in places:
            names = {e.name for i in index for e in ir.walk_expr(i) if isinstance(e, ir.Var)}
            if array.space is ir.Space.LOCAL and loop.var in names:
                return True
    return False
