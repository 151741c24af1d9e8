"""Run a typed kernel over a whole grid, a batch of blocks at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.hardware import SHARED_BYTES
from lockstep.simt import ir
from lockstep.simt.errors import SimtError
from lockstep.simt.types import (
    MAX_THREADS,
    SHARED_ALIGNMENT,
    ArrayType,
    Scalar,
    fits,
    int32,
    uint32,
)

from .fragments import Fragments
from .hazards import Hazards
from .hazards.block_order import BlockOrder
from .hazards.global_shadow import GlobalShadow
from .hazards.shadow import SharedShadow
from .memory import GlobalArray, LocalArray, SharedArray, check_extent, host_array
from .program import Program, compile_kernel
from .records.recorder import Recorder
from .records.recording import Recording
from .records.trace import Trace, collect
from .values import NUMPY, Value, cast
from .workers import Batches, Memory, Part, available, communicates, divide, side_by_side

ALLOCATION_ALIGNMENT = 512  # bytes, of what a GPU allocator hands out
LANES_PER_BATCH = 1 << 17

Index3 = tuple[int, int, int]
Progress = Callable[[int, int], None]


class Machine(Fragments):
    """The machine for one batch of blocks."""

    def __init__(self, *args: Any, dynamic_base: int, dynamic_bytes: int):
        super().__init__(*args)
        self.arrays: dict[str, Any] = {}
        self.shared_arrays: dict[Any, SharedArray] = {}
        self.dynamic_base, self.dynamic_bytes = dynamic_base, dynamic_bytes
        self.dynamic: dict[str, ir.Array] = {}

    def new_shared(self, array: ir.Array, shape: tuple[int, ...], base: int) -> SharedArray:
        assert isinstance(array.dtype, Scalar)
        shadow = SharedShadow(array.name, shape, self.block_numbers, self.clock, self.hazards)
        return SharedArray(array.name, array.dtype, shape, base, shadow)

    def declare_dynamic(self, name: str, offset: Value) -> None:
        """Dynamic shared memory from byte `offset` on, up to the next dynamic array."""
        if name in self.arrays:
            return
        array = self.dynamic[name]
        assert isinstance(array.dtype, Scalar)
        where = f"{array.loc.file}:{array.loc.line}: '{name}'"
        if not 0 <= offset < self.dynamic_bytes or offset % array.dtype.size:
            raise SimtError(
                f"{where} starts at byte {offset} of {self.dynamic_bytes} bytes of dynamic shared "
                f"memory; offsets are multiples of {array.dtype.size} inside of it"
            )
        at = self.dynamic_base + offset
        for other in self.shared_arrays.values():
            if other.base == at and not other.static:
                if other.dtype != array.dtype:
                    raise SimtError(f"{where} overlays '{other.name}' with another type")
                self.arrays[name] = other
                return
        others = [o.base for o in self.shared_arrays.values() if not o.static]
        end = min([b for b in others if b > at], default=self.dynamic_base + self.dynamic_bytes)
        made = self.new_shared(array, ((end - at) // array.dtype.size,), at)
        made.static = False
        for other in self.shared_arrays.values():
            if not other.static and other.base < at < other.base + other.size * other.item:
                other.shape = ((at - other.base) // other.item,)
        self.arrays[name] = self.shared_arrays[name] = made


class RecordingMachine(Recorder, Machine):
    """The machine for the batch that has the recorded block."""


@dataclass(frozen=True)
class _Launch:
    """One launch, all that its batches have in common."""

    kernel: ir.Kernel
    program: Program
    grid: Index3
    block: Index3
    static_bytes: int
    dynamic_bytes: int
    bases: dict[str, int]  # of static shared arrays
    arguments: dict[str, Any]

    def part(self, batches: Batches, done: Callable[[int], None], recording: Any = None) -> Part:
        """Run batches one after the other. `done` is called with the blocks of each."""
        sites, lines = self.program.counters()
        order = BlockOrder() if any(s.kind == "fence" for s in sites) else None
        hazards = Hazards(self.block, self.grid, sites, order=order)
        arrays = _global_arrays(self.kernel, self.arguments, hazards)
        part = Part(sites, lines, hazards, arrays, [])
        with np.errstate(all="ignore"):
            for numbers in batches:
                recorded = recording is not None and recording.block in numbers
                machine = self.machine(numbers, part, RecordingMachine if recorded else Machine)
                if isinstance(machine, RecordingMachine):
                    machine.start_recording(recording)
                self.program.code(machine, sites, lines, machine.arrays)
                machine.charge_all()
                machine.depth.join()
                if isinstance(machine, RecordingMachine):
                    machine.stop_recording(sites)
                part.depths.append((numbers, machine.depth))
                done(numbers.size)
        return part

    def machine(self, numbers: np.ndarray, part: Part, kind: type[Machine]) -> Machine:
        """The machine for one batch, with its arrays and arguments."""
        machine = kind(
            self.block,
            self.grid,
            numbers,
            part.hazards,
            _dtypes(self.kernel),
            dynamic_base=-(-self.static_bytes // SHARED_ALIGNMENT) * SHARED_ALIGNMENT,
            dynamic_bytes=self.dynamic_bytes,
        )
        machine.arrays.update(part.arrays)
        _prepare(machine, self.kernel, self.bases, self.arguments)
        return machine


def run(
    kernel: ir.Kernel,
    grid: Index3,
    block: Index3,
    dynamic_bytes: int,
    arguments: dict[str, Any],
    progress: Progress | None = None,
    lanes_per_batch: int = LANES_PER_BATCH,
    record: int | None = None,
    workers: int | None = None,
) -> Trace:
    """Execute `kernel` on the machine and return its trace.

    `arguments` maps parameter names to NumPy arrays, torch tensors in host memory or numbers;
    arrays are modified in place. `progress(done, all)` is called with numbers of
    blocks. The trace has a recording of the block with number `record`, where one is given.
    `workers` processes run it (None: one for each core, up to a few); what they count is the same.

    Raises ValueError for a launch no GPU could run or a block to record that is not there,
    TypeError for arguments that do not fit.
    """
    began = time.perf_counter()
    threads, blocks = int(np.prod(block)), int(np.prod(grid))
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"block {block} has {threads} threads; a block has 1 to {MAX_THREADS}")
    if blocks < 1:
        raise ValueError(f"grid {grid} has no blocks")
    if record is not None and not 0 <= record < blocks:
        raise ValueError(f"record is {record}, takes 0 to {blocks - 1}: there are {blocks} blocks")
    recording = None if record is None else Recording(record, threads)
    bases, static_bytes = _lay_out(kernel)
    if static_bytes + dynamic_bytes > SHARED_BYTES:
        raise ValueError(
            f"{static_bytes} bytes of static and {dynamic_bytes} of dynamic shared memory; "
            f"a block may have {SHARED_BYTES}"
        )
    program = compile_kernel(kernel)
    launch = _Launch(kernel, program, grid, block, static_bytes, dynamic_bytes, bases, arguments)
    batches = divide(blocks, max(1, lanes_per_batch // threads))
    counted = None
    workers = min(available() if workers is None else workers, len(batches))
    if workers > 1 and recording is None and not communicates(kernel):
        found = side_by_side(launch.part, batches, workers, _Done(progress, blocks))
        if found is not None:
            counted, memories = found
            _write(kernel, arguments, memories)
    if counted is None:
        counted = launch.part(batches, _Done(progress, blocks), recording)
    seconds = time.perf_counter() - began
    return collect(kernel, counted, grid, block, static_bytes, dynamic_bytes, seconds, recording)


class _Done:
    """Adds up the blocks that are done, whichever process ran them, and tells `progress`."""

    def __init__(self, progress: Progress | None, blocks: int):
        self.progress, self.blocks = progress, blocks
        self.total = 0

    def __call__(self, blocks: int) -> None:
        self.total += blocks
        if self.progress is not None:
            self.progress(self.total, self.blocks)


def _write(kernel: ir.Kernel, arguments: dict[str, Any], memories: list[Memory]) -> None:
    """Give the array arguments what other processes wrote to them."""
    for memory in memories:
        for name, footprint in memory.items():
            array = kernel.arrays[name]
            if array.written:
                assert isinstance(array.dtype, Scalar)
                host, _ = host_array(arguments[name], name, array.dtype)
                GlobalArray(array, host, 0).flat[footprint.written] = footprint.contents


def _lay_out(kernel: ir.Kernel) -> tuple[dict[str, int], int]:
    """Byte offset of every static shared array, and their total."""
    bases, top = {}, 0
    for array in kernel.arrays.values():
        if array.space is ir.Space.SHARED and not array.dynamic:
            assert isinstance(array.dtype, Scalar)
            bases[array.name] = top
            top += array.size * array.dtype.size
            top = -(-top // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
    return bases, top


def _dtypes(kernel: ir.Kernel) -> dict[str, np.dtype]:
    dtypes = {n: NUMPY[t] for n, t in kernel.variables.items() if isinstance(t, Scalar)}
    return dtypes | {f"{n}?": np.dtype(bool) for n in kernel.variables}


def _scalar(parameter: ir.Parameter, value: Any) -> Value:
    assert isinstance(parameter.type, Scalar)
    value = value.item() if hasattr(value, "item") else value
    if parameter.type in (int32, uint32) and not fits(value, parameter.type):
        raise ValueError(f"'{parameter.name}' is {parameter.type}, {value} does not fit")
    source = int32 if isinstance(value, int) else parameter.type
    return cast(value, source, parameter.type)


def _global_arrays(
    kernel: ir.Kernel, arguments: dict[str, Any], hazards: Hazards
) -> dict[str, GlobalArray]:
    """The array arguments at the addresses a GPU allocator might give them, with shadows for
    memory the kernel writes."""
    found: dict[str, GlobalArray] = {}
    top = ALLOCATION_ALIGNMENT
    spans: list[tuple[int, int, str]] = []
    for p in kernel.parameters:
        if not isinstance(p.type, ArrayType):
            continue
        host, offset = host_array(arguments[p.name], p.name, p.type.dtype)
        array = kernel.arrays[p.name]
        if array.written and not host.flags.writeable:
            raise ValueError(f"'{p.name}' is read-only and the kernel writes to it")
        made = GlobalArray(array, host, top + offset % ALLOCATION_ALIGNMENT)
        check_extent(made)
        top += -(-(made.size * made.item + offset) // ALLOCATION_ALIGNMENT) * ALLOCATION_ALIGNMENT
        start = host.__array_interface__["data"][0]
        spans.append((start, start + made.size * made.item, p.name))
        found[p.name] = made
    for group in _overlapping(spans):
        _share_shadow(kernel, [found[n] for n in group], spans, hazards)
    return found


def _overlapping(spans: list[tuple[int, int, str]]) -> list[list[str]]:
    """Arguments grouped by memory they have in common."""
    groups: list[tuple[int, list[str]]] = []  # end, names
    for start, end, name in sorted(spans):
        if groups and start < groups[-1][0]:
            last_end, names = groups[-1]
            groups[-1] = (max(last_end, end), [*names, name])
        else:
            groups.append((end, [name]))
    return [names for _, names in groups]


def _share_shadow(
    kernel: ir.Kernel,
    arrays: list[GlobalArray],
    spans: list[tuple[int, int, str]],
    hazards: Hazards,
) -> None:
    if not any(kernel.arrays[a.name].written for a in arrays):
        return
    where = {name: (start, end) for start, end, name in spans}
    if len({a.item for a in arrays}) > 1:
        names = ", ".join(a.name for a in arrays)
        raise ValueError(f"{names} share memory but not the size of their elements")
    low = min(where[a.name][0] for a in arrays)
    high = max(where[a.name][1] for a in arrays)
    read = _read_arrays(kernel)
    tracks = any(a.name in read for a in arrays)
    shadow = GlobalShadow((high - low) // arrays[0].item, tracks, hazards)
    for array in arrays:
        array.shadow = shadow
        array.shadow_start = (where[array.name][0] - low) // array.item


def _read_arrays(kernel: ir.Kernel) -> set[str]:
    reads = set()
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.AsyncCopy):
            reads.add(stmt.source.name)
        for expr in ir.expressions(stmt):
            if isinstance(expr, (ir.Load, ir.VectorLoad, ir.FragmentLoad)):
                reads.add(expr.array.name)
    return reads


def _prepare(
    machine: Machine, kernel: ir.Kernel, bases: dict[str, int], arguments: dict[str, Any]
) -> None:
    """Give the machine its scalar arguments and the kernel's shared and local arrays."""
    for parameter in kernel.parameters:
        if isinstance(parameter.type, Scalar):
            machine.v[parameter.name] = _scalar(parameter, arguments[parameter.name])
    for array in kernel.arrays.values():
        if array.dynamic:
            machine.dynamic[array.name] = array
        elif array.space is ir.Space.SHARED:
            assert array.shape is not None
            made = machine.new_shared(array, array.shape, bases[array.name])
            machine.arrays[array.name] = machine.shared_arrays[array.name] = made
        elif array.space is ir.Space.LOCAL and isinstance(array.dtype, Scalar):
            blocks = machine.block_numbers.size
            machine.arrays[array.name] = LocalArray(array, machine.threads, blocks)
