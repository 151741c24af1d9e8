"""Launches of compiled Triton kernels, straight to the CUDA driver.

Triton's launcher takes every argument of a kernel anew at each launch: the numbers and constants
that are the same each time, and tensor maps that it encodes in Python. That takes longer than the
launch. Here the parameters lie in memory as the driver wants them, and a launch writes addresses
into them.

What the parameters of a kernel are follows from its signature, and the driver is asked whether it
agrees. Where it does not, or cannot tell, `launcher_of` takes Triton's way.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from copy import copy
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch

from lockstep.cache import Cache
from lockstep.kernels.scratch import Allocating

Grid = tuple[int, int, int]


class Launcher(Protocol):
    def __call__(
        self, stream: int, addresses: tuple[int, ...], bases: tuple[int, ...] = ...
    ) -> None:
        """Takes the addresses behind pointers in the order of the kernel's arguments, but for those
        that were None when it was compiled; then that of scratch memory, if the kernel needs any;
        and those behind its tensor maps."""


# CUtensorMap: 128 bytes at a multiple of 64.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
# CUtensorMapDataType by the type that Triton's metadata has; CUtensorMapL2promotion of 128 bytes.
_MAP_TYPES = {8: 10, 9: 8, 10: 9}
_PROMOTE_128 = 2
# CUlaunchAttributeID: start while the kernel before is still running.
_PROGRAMMATIC_SERIALIZATION = 6
# CUfunction_attribute: the share of an SM's memory that is shared memory, in percent.
_PREFERRED_SHARED_MEMORY = 9
# CUresult of a launch without a context.
_INVALID_CONTEXT = 201
_NUMBERS: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class TensorMap:
    """A tensor map without the address of its tensor."""

    def __init__(
        self,
        metadata: dict[str, Any],
        shape: list[int],
        strides: list[int],
        padding: str = "zero",
    ) -> None:
        rank, size = len(shape), metadata["elem_size"]
        # The driver counts dims from the last, and strides in bytes. A vector has none; it gets
        # what Triton gives it.
        in_bytes = [size * stride for stride in reversed(strides[:-1])] or [size * shape[0]]
        self._head = _MAP_TYPES.get(metadata["elem_type"], metadata["elem_type"]), rank
        self._rest = (
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * len(in_bytes))(*in_bytes),
            (ctypes.c_uint32 * rank)(*reversed(metadata["block_size"])),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(0, metadata["swizzle"], _PROMOTE_128, int(padding == "nan")),
        )

    def at(self, base: int) -> tuple[int, Any]:
        """Where the map of a tensor at `base` lies, and what keeps it there."""
        return _MAPS.get((self, base)) or self._encode(base)

    def _encode(self, base: int) -> tuple[int, Any]:
        memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        address = ctypes.addressof(memory) + -ctypes.addressof(memory) % MAP_ALIGNMENT
        result = library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(address), *self._head, ctypes.c_void_p(base), *self._rest
        )
        if result:
            raise _error(result)
        _MAPS[self, base] = address, memory
        return address, memory


# Tensors come and go, but the allocator gives the same addresses again and again.
_MAPS: Cache[tuple[TensorMap, int], tuple[int, Any]] = Cache(limit=8192)


class Parameter(NamedTuple):
    """One parameter of a kernel: an address, a number, or a tensor map."""

    size: int
    content: int | bytes | TensorMap
    """The place of an address among those of a launch, or the number, or the map."""


def parameters_of(compiled: Any, arguments: tuple[Any, ...]) -> list[Parameter] | None:
    """What a kernel that was compiled for `arguments` has as parameters; None for what only Triton
    knows. Tensors are addresses; two more are Triton's scratch memory."""
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    parameters: list[Parameter] = []
    n_addresses = 0
    for kind, argument in zip(compiled.src.signature.values(), arguments, strict=True):
        if kind == "constexpr":
            continue
        if hasattr(argument, "data_ptr"):
            parameters.append(Parameter(8, n_addresses))
            n_addresses += 1
        elif kind in _NUMBERS:
            parameters.append(_number(kind, argument))
        elif kind.startswith("tensordesc") and (metadata := next(maps, None)) is not None:
            shape, strides = list(argument.shape), list(argument.strides)
            tensor_map = TensorMap(metadata, shape, strides, argument.padding)
            parameters.append(Parameter(MAP_BYTES, tensor_map))
            parameters += [_number("i32", size) for size in shape]
            parameters += [_number("i64", stride) for stride in strides]
        else:
            return None
    scratch = Parameter(8, n_addresses) if scratch_bytes(compiled) else _number("u64", 0)
    return [*parameters, scratch, _number("u64", 0)]


def scratch_bytes(compiled: Any) -> int:
    """The global memory that each program of a kernel needs, for descriptors."""
    return int(getattr(compiled.metadata, "global_scratch_size", 0))


def _number(kind: str, value: float) -> Parameter:
    content = bytes(_NUMBERS[kind](value))
    return Parameter(len(content), content)


def launcher_of(compiled: Any, grid: Grid, arguments: tuple[Any, ...]) -> Launcher:
    """What launches a kernel that was compiled for `arguments` again, with the same numbers."""
    parameters = parameters_of(compiled, arguments)
    metadata = compiled.metadata
    if (
        parameters is not None
        and metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.profile_scratch_size
        and [parameter.size for parameter in parameters] == sizes_of(compiled)
    ):
        if metadata.launch_pdl and metadata.shared:
            _prefer_shared_memory(compiled.function)
        return ByDriver(compiled.function, grid, metadata, parameters)
    # A launch must not keep the tensors of the first one.
    return partial(_by_triton, compiled, grid, _moved(arguments, repeat(0), repeat(0)))


def _prefer_shared_memory(function: int) -> None:
    """Gives a kernel all of an SM's memory as shared memory. A kernel that may start early finds
    room beside the one before only where both divide that memory alike."""
    result = library().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY, 100)
    if result:
        raise _error(result)


class ByDriver:
    """A `Launcher` that writes into memory which the driver reads."""

    __slots__ = ("_frames", "_function", "_launch", "_maps", "_new_frame")

    def __init__(
        self, function: int, grid: Grid, metadata: Any, parameters: list[Parameter]
    ) -> None:
        self._launch = library().cuLaunchKernelEx
        self._function = ctypes.c_void_p(function)
        self._maps = [
            (i, content) for i, (_, content) in enumerate(parameters) if type(content) is TensorMap
        ]
        self._new_frame = partial(_Frame, grid, metadata, parameters)
        # As many as threads have launched at once: the driver reads a frame while others run.
        self._frames: list[_Frame] = []

    def __call__(
        self, stream: int, addresses: tuple[int, ...], bases: tuple[int, ...] = ()
    ) -> None:
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self._new_frame()
        if not _THREAD.has_context:
            _enter_context()
        frame.addresses[:] = addresses
        frame.config.stream = stream
        if bases:
            # Held until the driver has read them.
            maps = _ENCODED.get((self, bases)) or self._encode(bases)
            for i, address, _ in maps:
                frame.parameters[i] = address
        result = self._launch(frame.reference, self._function, frame.parameters, None)
        if result == _INVALID_CONTEXT:
            # The thread has left it since.
            _enter_context()
            result = self._launch(frame.reference, self._function, frame.parameters, None)
        if result:
            raise _error(result)
        self._frames.append(frame)

    def _encode(self, bases: tuple[int, ...]) -> list[tuple[int, int, Any]]:
        maps = [
            (i, *tensor_map.at(base))
            for (i, tensor_map), base in zip(self._maps, bases, strict=True)
        ]
        _ENCODED[self, bases] = maps
        return maps


# The same for all maps of a launch: one look instead of several.
_ENCODED: Cache[tuple[ByDriver, tuple[int, ...]], list[tuple[int, int, Any]]] = Cache(limit=2048)


class _Frame:
    """The memory that the driver reads at a launch."""

    __slots__ = ("_attribute", "_words", "addresses", "config", "parameters", "reference")

    def __init__(self, grid: Grid, metadata: Any, parameters: list[Parameter]) -> None:
        n_addresses = sum(type(content) is int for _, content in parameters)
        self.addresses = (ctypes.c_uint64 * n_addresses)()
        self._words = (ctypes.c_uint64 * len(parameters))()
        self.parameters = (ctypes.c_void_p * len(parameters))()
        for i, (size, content) in enumerate(parameters):
            word = ctypes.addressof(self._words) + 8 * i
            if type(content) is int:
                self.parameters[i] = ctypes.addressof(self.addresses) + 8 * content
            elif type(content) is bytes:
                ctypes.memmove(word, content, size)
                self.parameters[i] = word
        self._attribute = _Attribute(id=_PROGRAMMATIC_SERIALIZATION)
        self._attribute.value[0] = 1
        self.config = _Config(
            grid=grid,
            block=(32 * metadata.num_warps, 1, 1),
            shared_bytes=metadata.shared,
            attributes=ctypes.addressof(self._attribute),
            n_attributes=int(metadata.launch_pdl),
        )
        self.reference = ctypes.byref(self.config)


class _Address(int):
    """What Triton asks a tensor for."""

    def data_ptr(self) -> int:
        return self


def _moved(
    arguments: tuple[Any, ...], pointers: Iterable[int], bases: Iterable[int]
) -> tuple[Any, ...]:
    """Arguments with addresses in place of tensors."""
    next_pointer, next_base = iter(pointers), iter(bases)
    moved = []
    for argument in arguments:
        if hasattr(argument, "data_ptr"):
            argument = _Address(next(next_pointer))
        elif hasattr(argument, "block_shape"):
            argument = copy(argument)
            argument.base = _Address(next(next_base))
        moved.append(argument)
    return tuple(moved)


def _by_triton(
    compiled: Any,
    grid: Grid,
    arguments: tuple[Any, ...],
    stream: int,
    addresses: tuple[int, ...],
    bases: tuple[int, ...] = (),
) -> None:
    """A `Launcher` that any compiled kernel has."""
    filled = _moved(arguments, addresses, bases)
    # Behind all pointers; 0 for a kernel that does not ask.
    with Allocating(lambda *size: addresses[-1] if scratch_bytes(compiled) else 0):
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *filled
        )


def sizes_of(compiled: Any) -> list[int]:
    """Bytes of each parameter of a loaded kernel; none where the driver cannot tell."""
    if not hasattr(library(), "cuFuncGetParamInfo"):
        return []
    if not _THREAD.has_context:
        _enter_context()
    # Asking for one more than there are is an error, which debuggers and sanitizers report.
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    references = ctypes.byref(offset), ctypes.byref(size)
    for i in range(_count_parameters(compiled.asm.get("ptx", ""))):
        if library().cuFuncGetParamInfo(ctypes.c_void_p(compiled.function), i, *references):
            return []
        sizes.append(size.value)
    return sizes


def _count_parameters(ptx: str) -> int:
    """How many parameters the kernel has that was compiled to `ptx`."""
    begin = ptx.find(".entry")
    return 0 if begin < 0 else ptx.count(".param ", begin, ptx.index(")", begin))


class _Thread(threading.local):
    has_context = False


_THREAD = _Thread()


def _enter_context() -> None:
    """Into torch's context, for a thread that has not used CUDA yet. A launch that fails would tell
    as well, but sanitizers would report it."""
    context = ctypes.c_void_p()
    result = library().cuCtxGetCurrent(ctypes.byref(context))
    if not result and not context:
        device = torch.cuda.current_device()
        result = library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        result = result or library().cuCtxSetCurrent(context)
    if result:
        raise _error(result)
    _THREAD.has_context = True


def _error(result: int) -> RuntimeError:
    text = ctypes.c_char_p()
    library().cuGetErrorString(result, ctypes.byref(text))
    return RuntimeError(f"CUDA error {result}: {(text.value or b'unknown').decode()}")
