"""From a typed kernel to a CUDA C++ file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.simt import ir
from lockstep.simt.types import SHARED_ALIGNMENT, ArrayType, Scalar

from .declarations import place
from .expressions import extent_name
from .helpers import HELPERS, INCLUDES
from .spelling import (
    SCALARS,
    c_name,
    c_type,
    constant_name,
    constant_type,
    fragment_alias,
    number,
)
from .statements import Statements
from .writer import Writer

STATIC_SHARED_LIMIT = 48 * 1024  # bytes; what is above has to be dynamic
CLOCKS = "phase_cycles"  # a parameter of instrumented kernels: int64 [phases + 1]


@dataclass(frozen=True)
class Layout:
    """The properties of the arrays of a launch that the emitted code relies on."""

    strided: frozenset[str] = frozenset()  # arrays whose last dimension is not contiguous
    aliased: bool = False  # a written array overlaps another one


@dataclass(frozen=True)
class Argument:
    """One parameter of the emitted kernel. `kind` is "pointer", "stride", "extent" or "scalar"."""

    kind: str
    name: str
    axis: int = 0
    dtype: Scalar | None = None  # of a scalar


@dataclass(frozen=True)
class CudaSource:
    """A CUDA C++ file with one kernel.

    `lines[i]` says which Python source line i + 1 of `text` stands for. `hidden_shared` bytes of
    shared arrays had no room in static memory; a launch adds them to its dynamic bytes.
    """

    name: str
    text: str
    lines: tuple[ir.Location | None, ...] = field(repr=False)
    arguments: tuple[Argument, ...]
    static_shared: int
    hidden_shared: int


def phases(kernel: ir.Kernel) -> tuple[str, ...]:
    """Names of the phases of a kernel, in the order they are first met in."""
    found = (stmt.name for stmt in ir.walk(kernel.body) if isinstance(stmt, ir.Phase))
    return tuple(dict.fromkeys(found))


def emit(
    kernel: ir.Kernel,
    layout: Layout = Layout(),  # noqa: B008
    threads: int | None = None,
    clocks: bool = False,
) -> CudaSource:
    """CUDA C++ for a typed kernel, to be compiled for blocks of up to `threads` threads.

    With `clocks` the kernel is instrumented: it takes one more array, `phase_cycles`, and every
    warp that runs to the end adds its clock cycles in each of `phases`, and all of its cycles last.
    A phase lasts until the next one begins. The wait for a load is part of the phase that first
    uses the number. Blocks are taken to be one-dimensional.

    >>> source = emit(transpose.typed(TILE=32))              # doctest: +SKIP
    >>> print(source.text)                                   # doctest: +SKIP
    """
    return _Emitter(kernel, layout, threads, clocks).emit()


class _Emitter:
    def __init__(self, kernel: ir.Kernel, layout: Layout, threads: int | None, clocks: bool):
        self.kernel, self.layout, self.threads = kernel, layout, threads
        sources = [kernel.source, *kernel.device_sources.values()]
        declaring, self.top = place(kernel)
        taken = {c_name(n) for n in (*kernel.variables, *kernel.arrays, *kernel.constants)}
        shared = [a for a in kernel.arrays.values() if a.space is ir.Space.SHARED]
        self.static = [a for a in shared if not a.dynamic]
        self.dynamic = [a for a in shared if a.dynamic]
        self.offsets, self.static_bytes = lay_out(self.static)
        self.hides = self.static_bytes > STATIC_SHARED_LIMIT
        self.body = Statements(Writer(sources), layout.strided, taken, declaring, {})
        self.clocks = clocks
        self.body.clocks = phases(kernel) if clocks else ()
        self.body.shared = {a.name: self.shared_declaration(a) for a in shared}

    def emit(self) -> CudaSource:
        body = self.body
        writer = body.writer
        for array in self.kernel.arrays.values():
            body.note_type(array.dtype)
        for dtype in self.kernel.variables.values():
            body.note_type(dtype)
        with writer.indented():
            self.local_constants()
            if self.hides or self.dynamic:
                writer.put("extern __shared__ __align__(128) unsigned char shared_memory[];")
            for name in self.top:
                writer.put(f"{c_type(self.kernel.variables[name])} {c_name(name)};")
            self.start_clocks()
            body.block(self.kernel.body)
            self.write_clocks()
        head = Writer([self.kernel.source])
        arguments = self.signature(head)
        prologue = self.prologue()
        lines = [*prologue, *head.lines, *writer.lines, "}"]
        locations = [*([None] * len(prologue)), *head.locations, *writer.locations, None]
        return CudaSource(
            self.kernel.name,
            "\n".join(lines) + "\n",
            tuple(locations),
            arguments,
            0 if self.hides else self.static_bytes,
            self.static_bytes if self.hides else 0,
        )

    # Clocks of an instrumented kernel

    def start_clocks(self) -> None:
        """A phase lasts until the next one begins, so that waiting for threads that are still at
        work in it is part of it. The last count is of what comes before any phase."""
        if not self.clocks:
            return
        n = len(self.body.clocks)
        put = self.body.writer.put
        put("const long long kernel_began = clock64();")
        put(f"long long phase_began = kernel_began, cycles_of_phase[{n + 1}] = {{}};")
        put(f"int phase = {n};")
        put("const auto begin_phase = [&](int next) {")
        with self.body.writer.indented():
            put("const long long now = clock64();")
            put("cycles_of_phase[phase] += now - phase_began;")
            put("phase_began = now;")
            put("phase = next;")
        put("};")

    def write_clocks(self) -> None:
        if not self.clocks:
            return
        n = len(self.body.clocks)
        put = self.body.writer.put
        put(f"begin_phase({n});")
        put("if (threadIdx.x % 32 == 0) {")
        with self.body.writer.indented():
            put(f"for (int i = 0; i < {n}; i++)")
            put(f"  atomicAdd(&{CLOCKS}[i], (unsigned long long)cycles_of_phase[i]);")
            put(f"atomicAdd(&{CLOCKS}[{n}], (unsigned long long)(phase_began - kernel_began));")
        put("}")

    # Shared memory

    def shared_declaration(self, array: ir.Array) -> str:
        name = c_name(array.name)
        dtype = SCALARS[array.dtype]  # type: ignore[index]
        if array.dynamic:
            assert array.offset is not None
            offset = "" if array.offset.const == 0 else f" + {self.body.within(array.offset, 12)}"
            hidden = f" + {self.static_bytes}" if self.hides else ""
            where = f"reinterpret_cast<{dtype} *>(shared_memory{hidden}{offset})"
            return f"{dtype} *{name} = {where};"
        dims = self.body.dimensions(array)
        if not self.hides:
            align = f"alignas({SHARED_ALIGNMENT}) " if self.moves_in_bulk(array) else ""
            return f"__shared__ {align}{dtype} {name}{dims};"
        start = self.offsets[array.name]
        at = f"shared_memory + {start}" if start else "shared_memory"
        return f"auto &{name} = *reinterpret_cast<{dtype} (*){dims}>({at});"

    def moves_in_bulk(self, array: ir.Array) -> bool:
        """Whether something wider than an element touches the array."""
        wide = (ir.VectorLoad, ir.FragmentLoad, ir.VectorStore, ir.FragmentStore)
        for stmt in ir.walk(self.kernel.body):
            if isinstance(stmt, ir.AsyncCopy) and stmt.target is array:
                return True
            for node in (stmt, *ir.expressions(stmt)):
                if isinstance(node, wide) and node.array is array:
                    return True
        return False

    # Around the body

    def prologue(self) -> list[str]:
        """Comments, includes, helpers, type aliases and constants."""
        kernel, needs = self.kernel, self.body.needs
        lines = [f"// {line}".rstrip() for line in (kernel.doc or "").strip().splitlines()]
        lines.append(f"// Generated by Lockstep from {Path(kernel.source.file).name}.")
        lines.append("")
        includes = [text for need, text in INCLUDES.items() if need in needs]
        if includes:
            lines += [*includes, ""]
        if "wmma" in needs:
            lines += ["using namespace nvcuda;", ""]
            order = sorted(self.body.fragment_types, key=lambda t: (t.role, t.dtype.name, t.layout))
            lines += [*map(fragment_alias, order), ""]
        finite = {n: v for n, v in kernel.constants.items() if math.isfinite(v)}
        for name, value in finite.items():
            dtype = constant_type(value)
            text = f"{c_type(dtype)} {constant_name(name)} = {number(value, dtype)}"
            lines.append(f"constexpr {text};")
        if finite:
            lines.append("")
        for need, text in HELPERS.items():
            if need in needs:
                lines += [*text.splitlines(), ""]
        return lines

    def local_constants(self) -> None:
        """Infinities and NaNs, which NVRTC takes for no constant expressions at file scope."""
        for name, value in self.kernel.constants.items():
            if not math.isfinite(value):
                self.body.needs.add("infinity")
                text = number(value, constant_type(value))
                self.body.writer.put(f"const float {constant_name(name)} = {text};")

    def signature(self, head: Writer) -> tuple[Argument, ...]:
        """The kernel's head; pointers, then what is needed of their strides and extents."""
        bounds = f" __launch_bounds__({self.threads})" if self.threads else ""
        head.put(f'extern "C" __global__ void{bounds} {self.kernel.name}(')
        arguments: list[Argument] = []
        comments = self.parameter_comments()
        rows: list[tuple[str, str | None]] = []
        for parameter in self.kernel.parameters:
            found = self.parameter(parameter)
            arguments += [argument for argument, _ in found]
            text = ", ".join(text for _, text in found)
            rows.append((text, comments.get(parameter.name)))
        if self.clocks:
            arguments.append(Argument("pointer", CLOCKS))
            rows.append((f"unsigned long long *{CLOCKS}", None))
        with head.indented(), head.indented():
            for i, (text, comment) in enumerate(rows):
                head.put(text + (") {" if i == len(rows) - 1 else ","), None, comment)
        if not rows:
            head.lines[-1] += ") {"
        return tuple(arguments)

    def parameter(self, parameter: ir.Parameter) -> list[tuple[Argument, str]]:
        name, dtype = parameter.name, parameter.type
        if not isinstance(dtype, ArrayType):
            return [(Argument("scalar", name, dtype=dtype), f"{SCALARS[dtype]} {c_name(name)}")]
        array = self.kernel.arrays[name]
        const = "" if array.written else "const "
        restrict = "" if self.layout.aliased else "__restrict__ "
        pointer = f"{const}{SCALARS[dtype.dtype]} *{restrict}{c_name(name)}"
        found = [(Argument("pointer", name), pointer)]
        for axis in range(dtype.ndim):
            if (name, axis) in self.body.strides:
                text = f"int {self.body.stride_name(array, axis)}"
                found.append((Argument("stride", name, axis), text))
            if (name, axis) in self.body.extents:
                found.append((Argument("extent", name, axis), f"int {extent_name(array, axis)}"))
        return found

    def parameter_comments(self) -> dict[str, str]:
        """Comments after the parameters, one per line of the Python head."""
        source = self.kernel.source
        found = {}
        names = {p.name for p in self.kernel.parameters}
        for line, (_, text) in source.comments.items():
            code = source.lines[line - source.first_line].split("#")[0].strip()
            name = code.split(":")[0].strip().rstrip(",")
            if name in names and line - source.first_line < self.first_statement():
                found[name] = text
        return found

    def first_statement(self) -> int:
        body = self.kernel.body
        return body[0].loc.line - self.kernel.source.first_line if body else 0


def lay_out(arrays: list[ir.Array]) -> tuple[dict[str, int], int]:
    """Byte offset of each shared array of constant shape, and what they take together."""
    offsets, top = {}, 0
    for array in arrays:
        offsets[array.name] = top
        top += array.size * array.dtype.size  # type: ignore[union-attr]
        top = -(-top // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
    return offsets, top
