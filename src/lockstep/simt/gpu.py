"""Compiled kernels on a GPU: torch CUDA tensors in, on the current stream, without copies.

The first launch with given types, constants and strides emits, compiles and loads the kernel; the
ones after it look a `_Plan` up, fill in pointers and scalars, and go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from . import ir
from .cuda_cpp import CLOCKS, Layout, emit
from .errors import SimtError
from .function import KernelFunction
from .nvrtc import Compiled, compile_source
from .types import MAX_THREADS, ArrayType, Scalar, VectorType, bool_, fits, float32, int32, uint32

if TYPE_CHECKING:
    import torch

Index3 = tuple[int, int, int]

NUMBERS = (int, float, bool)
FRAGMENT_ALIGNMENT = 32  # bytes, of a pointer handed to wmma
C_SCALARS = {
    int32: ctypes.c_int32,
    uint32: ctypes.c_uint32,
    bool_: ctypes.c_bool,
    float32: ctypes.c_float,
}


def launch(
    kernel: KernelFunction,
    grid: Index3,
    block: Index3,
    dynamic_bytes: int,
    arguments: dict[str, Any],
    contract: bool = True,
    clocks: torch.Tensor | None = None,
) -> None:
    """Run `kernel` on CUDA tensors, on torch's current stream of their device.

    `kernel[grid, block, dynamic_bytes](x, y, ...)` calls this. `contract` as in
    `nvrtc.compile_source`; `clocks`, an int64 tensor, gets the cycles of an instrumented build, as
    `cuda_cpp.emit` says. Returns without waiting for the device.

    Raises what `Kernel.typed` raises; ValueError for tensors on different devices, too large for
    int32 indices, or misaligned for the kernel's vector accesses, and for a launch that the device
    cannot run; `CompileError` from the compiler.
    """
    import torch

    known = kernel.__dict__.get("_gpu_launches")
    if known is None:
        known = kernel.__dict__["_gpu_launches"] = _Launches(kernel)
    make = partial(_plan, kernel, grid, block, dynamic_bytes, contract, arguments, clocks=clocks)
    key = known.key(grid, block, dynamic_bytes, contract, arguments.values())
    if clocks is not None:
        key, arguments = (key, CLOCKS), {**arguments, CLOCKS: clocks}
    plan = known.plan(key, make)
    addresses = plan.addresses(arguments)
    if plan.restrict and _overlap(addresses, plan.sizes):
        plan = known.plan((key, "aliased"), partial(make, aliased=True))
    stream = _stream(torch.cuda.current_stream(plan.device).cuda_stream)
    if torch.cuda.current_device() == plan.device:
        plan.start(arguments, addresses, stream)
    else:
        with torch.cuda.device(plan.device):
            plan.start(arguments, addresses, stream)


class _Launches:
    """The compiled launches of one kernel, by types, constants and strides."""

    def __init__(self, kernel: KernelFunction):
        constants = set(kernel.constants)
        self.is_constant = [name in constants for name in kernel.parameters]
        self.plans: dict[Any, _Plan] = {}

    def plan(self, key: Any, make: Callable[[], _Plan]) -> _Plan:
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = make()
        return found

    def key(self, grid: Index3, block: Index3, dynamic: int, contract: bool, values: Any) -> Any:
        """The key of a compiled kernel: all that decides how it is compiled and how its parameters
        are filled in."""
        parts: list[Any] = [grid, block, dynamic, contract]
        for value, constant in zip(values, self.is_constant, strict=True):
            if constant:
                parts.append((type(value), value))
            elif type(value) in NUMBERS:
                parts.append(type(value))
            elif hasattr(value, "data_ptr"):
                parts.append((value.dtype, value.shape, value.stride(), value.get_device()))
            else:
                parts.append(type(value))
        return tuple(parts)


def _overlap(addresses: list[int], sizes: tuple[int, ...]) -> bool:
    """Whether two of the spans of memory have bytes in common."""
    spans = sorted(zip(addresses, sizes, strict=True))
    return any(start + size > after for (start, size), (after, _) in pairwise(spans))


@dataclass(frozen=True)
class _Plan:
    """A loaded kernel and how to fill in its parameters."""

    compiled: Compiled
    device: int
    function: Any  # cuda.core.Kernel
    config: Any  # cuda.core.LaunchConfig
    fixed: tuple[Any, ...]  # strides and extents; None where a launch decides
    pointers: tuple[tuple[int, str, int], ...]  # position, argument, alignment in bytes
    sizes: tuple[int, ...]  # bytes behind each pointer
    scalars: tuple[tuple[int, str, Callable[[Any], Any]], ...]
    restrict: bool  # compiled for arrays that do not overlap

    def addresses(self, arguments: dict[str, Any]) -> list[int]:
        """Addresses of the arrays. Raises ValueError for one that vector accesses cannot take."""
        found = []
        for _, name, alignment in self.pointers:
            address = arguments[name].data_ptr()
            if address % alignment:
                raise ValueError(
                    f"'{name}' starts at address {address:#x}; the kernel's wide accesses need a "
                    f"multiple of {alignment} bytes"
                )
            found.append(address)
        return found

    def start(self, arguments: dict[str, Any], addresses: list[int], stream: Any) -> None:
        parameters = list(self.fixed)
        for (position, _, _), address in zip(self.pointers, addresses, strict=True):
            parameters[position] = address
        for position, name, convert in self.scalars:
            parameters[position] = convert(arguments[name])
        _driver_launch()(stream, self.config, self.function, *parameters)


def _plan(
    kernel: KernelFunction,
    grid: Index3,
    block: Index3,
    dynamic_bytes: int,
    contract: bool,
    arguments: dict[str, Any],
    aliased: bool = False,
    clocks: torch.Tensor | None = None,
) -> _Plan:
    """Check the arguments, compile and load."""
    import torch
    from cuda.core import LaunchConfig

    typed = kernel.typed(**arguments)
    names = [p.name for p in typed.parameters if isinstance(p.type, ArrayType)]
    tensors = {name: arguments[name] for name in names}
    device = _check_arrays(kernel, tensors)
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS:
        raise ValueError(f"block {block} has {threads} threads; a block has 1 to {MAX_THREADS}")
    strided = {n for n, t in tensors.items() if t.shape[-1] > 1 and t.stride(-1) != 1}
    source = emit(typed, Layout(frozenset(strided), aliased), threads, clocks is not None)
    if clocks is not None:
        tensors[CLOCKS] = clocks
    compiled = compile_source(source, _arch(device), contract)
    shared = dynamic_bytes + source.hidden_shared
    with torch.cuda.device(device):
        function = load(compiled, device, shared)
    wide = alignments(typed)
    fixed: list[Any] = []
    pointers, scalars = [], []
    for position, argument in enumerate(source.arguments):
        value = None
        if argument.kind == "pointer":
            pointers.append((position, argument.name, wide.get(argument.name, 1)))
        elif argument.kind == "scalar":
            assert argument.dtype is not None
            convert = converter(argument.name, argument.dtype)
            scalars.append((position, argument.name, convert))
        else:
            tensor = tensors[argument.name]
            sizes = tensor.stride() if argument.kind == "stride" else tensor.shape
            value = ctypes.c_int32(sizes[argument.axis])
        fixed.append(value)
    return _Plan(
        compiled,
        device,
        function,
        LaunchConfig(grid=grid, block=block, shmem_size=shared),
        tuple(fixed),
        tuple(pointers),
        tuple(_extent(tensors[name]) * tensors[name].element_size() for _, name, _ in pointers),
        tuple(scalars),
        restrict=not aliased and any(typed.arrays[n].written for n in names),
    )


def _check_arrays(kernel: KernelFunction, tensors: dict[str, Any]) -> int:
    """Number of the one GPU all tensors are on. Raises ValueError if there is no such GPU."""
    devices: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not getattr(tensor, "is_cuda", False):
            where = getattr(tensor, "device", type(tensor).__name__)
            raise ValueError(
                f"{kernel.__name__}: '{name}' is on {where}, other arguments on a GPU; "
                "all arrays must be on one GPU"
            )
        if _extent(tensor) >= 2**31:
            raise ValueError(
                f"{kernel.__name__}: '{name}' spans {_extent(tensor)} elements; int32 indices end "
                "at 2**31"
            )
        devices[name] = tensor.get_device()
    if len(set(devices.values())) > 1:
        raise ValueError(f"{kernel.__name__}: arrays are on several GPUs, by number: {devices}")
    return next(iter(devices.values()))


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def converter(name: str, dtype: Scalar) -> Callable[[Any], Any]:
    """A function that makes a number what the kernel takes for parameter `name`.

    It raises ValueError for a number that is no `dtype`.
    """
    if dtype.is_storage_only:
        return partial(_half_bits, dtype=dtype)
    c_type = C_SCALARS[dtype]
    integer = dtype.is_integer

    def convert(value: Any) -> Any:
        if type(value) not in NUMBERS and hasattr(value, "item"):
            value = value.item()
        if integer and not (isinstance(value, int) and fits(value, dtype)):
            raise ValueError(f"'{name}' takes {dtype}, got {value!r}")
        return c_type(value)

    return convert


def _half_bits(value: Any, dtype: Scalar) -> Any:
    """A 16-bit float by its bits."""
    import torch

    bits = torch.tensor(value, dtype=getattr(torch, dtype.name)).view(torch.int16)
    return ctypes.c_int16(int(bits))


def alignments(kernel: ir.Kernel) -> dict[str, int]:
    """Bytes to which vectors, copies and fragments need a global array aligned, by its name."""
    found: dict[str, int] = {}

    def note(array: ir.Array, size: int) -> None:
        if array.space is ir.Space.GLOBAL:
            found[array.name] = max(found.get(array.name, 1), size)

    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.AsyncCopy):
            note(stmt.source, stmt.count * stmt.source.dtype.size)  # type: ignore[union-attr]
        elif isinstance(stmt, ir.VectorStore) and isinstance(stmt.value.type, VectorType):
            note(stmt.array, stmt.value.type.size)
        elif isinstance(stmt, ir.FragmentStore):
            note(stmt.array, FRAGMENT_ALIGNMENT)
        for expr in ir.expressions(stmt):
            if isinstance(expr, ir.VectorLoad) and isinstance(expr.type, VectorType):
                note(expr.array, expr.type.size)
            elif isinstance(expr, ir.FragmentLoad):
                note(expr.array, FRAGMENT_ALIGNMENT)
    return found


# The driver's side


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


@lru_cache(maxsize=32)
def _arch(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@lru_cache(maxsize=1)
def _driver_launch() -> Any:
    from cuda.core import launch

    return launch


def load(compiled: Compiled, index: int, dynamic_bytes: int = 0) -> Any:
    """A `cuda.core.Kernel` on GPU number `index`, allowed so much dynamic shared memory.

    Raises ValueError where the GPU has less.
    """
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    Device(index).set_current()
    name = compiled.source.name
    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    device = _checked(driver.cuDeviceGet(index))
    most = _checked(driver.cuDeviceGetAttribute(limit, device))
    static = compiled.resources.static_shared
    if dynamic_bytes + static > most:
        raise ValueError(
            f"{name}: {dynamic_bytes} bytes of dynamic and {static} of static shared memory; "
            f"a block of this GPU may have {most}"
        )
    function = ObjectCode.from_cubin(compiled.cubin, name=name).get_kernel(name)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(function.handle))
    _checked(driver.cuKernelSetAttribute(attribute, dynamic_bytes, handle, device))
    return function


def _checked(answer: tuple[Any, ...]) -> Any:
    """The result of a driver call. Raises SimtError where it failed."""
    code, *values = answer
    if int(code):
        raise SimtError(f"CUDA driver: {code.name}")
    return values[0] if values else None
