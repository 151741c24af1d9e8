"""Compiled kernels on a GPU: torch CUDA tensors in, on the current stream, without copies.

The first launch with given types, constants and strides emits, compiles and loads the kernel; the
ones after it look a `_Plan` up, fill in pointers and scalars, and go.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from . import ir
from .cuda_cpp import Layout, emit
from .errors import SimtError
from .kernel import Kernel
from .nvrtc import Compiled, compile_source
from .types import ArrayType, Scalar, VectorType, bool_, fits, float32, int32, uint32

if TYPE_CHECKING:
    import torch

Index3 = tuple[int, int, int]

MAX_THREADS = 1024
FRAGMENT_ALIGNMENT = 32  # bytes, of a pointer handed to wmma
C_SCALARS = {
    int32: ctypes.c_int32,
    uint32: ctypes.c_uint32,
    bool_: ctypes.c_bool,
    float32: ctypes.c_float,
}


def launch(
    kernel: Kernel,
    grid: Index3,
    block: Index3,
    dynamic_bytes: int,
    arguments: dict[str, Any],
    contract: bool = True,
) -> None:
    """Run `kernel` on CUDA tensors, on torch's current stream of their device.

    `kernel[grid, block, dynamic_bytes](x, y, ...)` calls this. `contract` as in
    `nvrtc.compile_source`. Returns at once, like every launch.

    Raises what `Kernel.typed` raises; ValueError for tensors on different devices, too large for
    int32 indices, or misaligned for the kernel's vector accesses, and for a launch that the device
    cannot run; `CompileError` from the compiler.
    """
    import torch

    tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    device = _device(kernel, tensors)
    key = (
        device.index,
        grid,
        block,
        dynamic_bytes,
        contract,
        _overlap(tensors),
        *(_signature(value, name in kernel.constants) for name, value in arguments.items()),
    )
    plans: dict[Any, _Plan] = kernel.__dict__.setdefault("_gpu_plans", {})
    plan = plans.get(key)
    if plan is None:
        with torch.cuda.device(device):
            plan = plans[key] = _Plan.make(key, kernel, arguments, tensors, device)
    plan.start(arguments, torch.cuda.current_stream(device).cuda_stream)


def _device(kernel: Kernel, tensors: dict[str, torch.Tensor]) -> torch.device:
    """The one device all tensors are on."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{kernel.__name__}: '{name}' is on {tensor.device}, '{first_name}' on "
                f"{first.device}; all tensors must be on one GPU"
            )
    return first.device


def _signature(value: Any, constant: bool) -> Any:
    """What of an argument decides how the kernel is compiled and its parameters are filled in."""
    if hasattr(value, "data_ptr"):
        return (value.dtype, value.shape, value.stride())
    return (type(value), value) if constant else type(value)


def _overlap(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether the memory of two tensors may overlap; then no pointer is `__restrict__`."""
    if len(tensors) < 2:
        return False
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t) * t.element_size()) for t in tensors.values()
    )
    return any(start < end for (_, end), (start, _) in pairwise(spans))


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True)
class _Plan:
    """A loaded kernel and how to fill in its parameters."""

    compiled: Compiled
    function: Any  # cuda.core.Kernel
    config: Any  # cuda.core.LaunchConfig
    fixed: tuple[Any, ...]  # strides and extents; None where a launch decides
    pointers: tuple[tuple[int, str, int], ...]  # position, argument, alignment in bytes
    scalars: tuple[tuple[int, str, Scalar], ...]

    @staticmethod
    def make(
        key: Any,
        kernel: Kernel,
        arguments: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        device: torch.device,
    ) -> _Plan:
        from cuda.core import LaunchConfig

        _, grid, block, dynamic_bytes, contract, overlap, *_ = key
        typed = kernel.typed(**arguments)
        for parameter in typed.parameters:
            if isinstance(parameter.type, ArrayType):
                _check_array(kernel, parameter.name, arguments[parameter.name])
        strided = {n for n, t in tensors.items() if t.shape[-1:] > (1,) and t.stride(-1) != 1}
        written = any(typed.arrays[n].written for n in tensors if n in typed.arrays)
        threads = block[0] * block[1] * block[2]
        layout = Layout(frozenset(strided), aliased=overlap and written)
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"block {block} has {threads} threads; a block has 1 to {MAX_THREADS}")
        compiled = compile_source(emit(typed, layout, threads), _arch(device.index), contract)
        shared = dynamic_bytes + compiled.source.hidden_shared
        function = _load(compiled, device.index)
        _allow_shared(function, shared, compiled, device.index)
        wide = alignments(typed)
        fixed: list[Any] = []
        pointers, scalars = [], []
        for position, argument in enumerate(compiled.source.arguments):
            value = None
            if argument.kind == "pointer":
                pointers.append((position, argument.name, wide.get(argument.name, 1)))
            elif argument.kind == "scalar":
                assert argument.dtype is not None
                scalars.append((position, argument.name, argument.dtype))
            else:
                tensor = tensors[argument.name]
                sizes = tensor.stride() if argument.kind == "stride" else tensor.shape
                value = ctypes.c_int32(sizes[argument.axis])
            fixed.append(value)
        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        return _Plan(compiled, function, config, tuple(fixed), tuple(pointers), tuple(scalars))

    def start(self, arguments: dict[str, Any], stream: int) -> None:
        from cuda.core import launch

        parameters = list(self.fixed)
        for position, name, alignment in self.pointers:
            address = arguments[name].data_ptr()
            if address % alignment:
                raise ValueError(
                    f"'{name}' starts at address {address:#x}; the kernel's wide accesses need a "
                    f"multiple of {alignment} bytes"
                )
            parameters[position] = address
        for position, name, dtype in self.scalars:
            parameters[position] = c_scalar(name, arguments[name], dtype)
        launch(_stream(stream), self.config, self.function, *parameters)


def _check_array(kernel: Kernel, name: str, tensor: torch.Tensor) -> None:
    if not getattr(tensor, "is_cuda", False):
        where = getattr(tensor, "device", type(tensor).__name__)
        raise ValueError(
            f"{kernel.__name__}: '{name}' is on {where}, other arguments on a GPU; move it there"
        )
    if _extent(tensor) >= 2**31:
        raise ValueError(
            f"{kernel.__name__}: '{name}' spans {_extent(tensor)} elements; int32 indices end at "
            "2**31"
        )


def c_scalar(name: str, value: Any, dtype: Scalar) -> Any:
    """A number as the kernel takes it. Raises TypeError or ValueError where it does not fit."""
    if hasattr(value, "item"):
        value = value.item()
    if dtype.is_integer and (not isinstance(value, int) or not fits(value, dtype)):
        raise ValueError(f"'{name}' takes {dtype}, got {value!r}")
    if dtype.is_storage_only:
        import torch

        bits = torch.tensor(value, dtype=getattr(torch, dtype.name)).view(torch.int16)
        return ctypes.c_int16(int(bits))
    return C_SCALARS[dtype](value)


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


def _load(compiled: Compiled, index: int) -> Any:
    from cuda.core import Device, ObjectCode

    Device(index).set_current()
    name = compiled.source.name
    return ObjectCode.from_cubin(compiled.cubin, name=name).get_kernel(name)


def _allow_shared(function: Any, dynamic: int, compiled: Compiled, index: int) -> None:
    """Raise the kernel's limit on dynamic shared memory, or say why it cannot be raised."""
    from cuda.bindings import driver

    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    device = _checked(driver.cuDeviceGet(index))
    most = _checked(driver.cuDeviceGetAttribute(limit, device))
    static = compiled.resources.static_shared
    if dynamic + static > most:
        raise ValueError(
            f"{compiled.source.name}: {dynamic} bytes of dynamic and {static} of static shared "
            f"memory; a block of this GPU may have {most}"
        )
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(function.handle))
    _checked(driver.cuKernelSetAttribute(attribute, dynamic, handle, device))


def _checked(answer: tuple) -> Any:
    """The result of a driver call. Raises SimtError where it failed."""
    code, *values = answer
    if int(code):
        raise SimtError(f"CUDA driver: {code.name}")
    return values[0] if values else None
