"""Launches of compiled Triton kernels, straight to the CUDA driver.

Triton's launcher takes every argument of a kernel anew at each launch: the numbers and constants
that are the same each time, and tensor maps that it encodes in Python. That takes longer than the
launch. Here the parameters lie in memory as the driver wants them, and a launch writes addresses
into a copy of them (`launch_in_c`).

What the parameters of a kernel are follows from its signature, and the driver is asked whether it
agrees. Where it does not, or cannot tell, `launcher_of` takes Triton's way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from copy import copy
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import torch

from lockstep.kernels.launch_in_c import find_launch
from lockstep.kernels.scratch import Allocating

Grid = tuple[int, int, int]


Launcher = Callable[..., None]
"""Takes a stream; then for each tensor map the address of its tensor; then the addresses behind
pointers in the order of the kernel's arguments, but for those that were None when it was compiled;
then that of scratch memory, if the kernel needs any."""

# CUtensorMap: 128 bytes at a multiple of 64.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
# A map begins with the address of its tensor. No document says so, therefore each map is compared
# with that of a tensor in another place, these bits of the address being different.
_ADDRESS_BYTES, _OTHER_PLACE = 8, 0xFF_FFFF_FF00
# CUtensorMapDataType by the type that Triton's metadata has; CUtensorMapL2promotion of 128 bytes.
_MAP_TYPES = {8: 10, 9: 8, 10: 9}
_PROMOTE_128 = 2
# CUlaunchAttributeID: start while the kernel before is still running.
_PROGRAMMATIC_SERIALIZATION = 6
# CUfunction_attribute: the share of an SM's memory that is shared memory, in percent.
_PREFERRED_SHARED_MEMORY = 9
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


_EARLY = _Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=(1,))


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

    def encode(self, base: int) -> bytes:
        """The map of a tensor at `base`; that of one elsewhere differs in its first 8 bytes, which
        are the address. Empty where the driver refuses it, or has another way to encode it."""
        maps = {place: self._encode(place) for place in (base, base ^ _OTHER_PLACE)}
        agrees = all(
            found == place.to_bytes(_ADDRESS_BYTES, "little") + maps[base][_ADDRESS_BYTES:]
            for place, found in maps.items()
        )
        return maps[base] if agrees else b""

    def _encode(self, base: int) -> bytes:
        memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        at = -ctypes.addressof(memory) % MAP_ALIGNMENT
        result = library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(memory) + at),
            *self._head,
            ctypes.c_void_p(base),
            *self._rest,
        )
        return b"" if result else memory.raw[at : at + MAP_BYTES]


class Parameter(NamedTuple):
    """One parameter of a kernel: an address, a number, or a tensor map."""

    size: int
    content: int | bytes | TensorMap
    """The place of an address among those of a launch, or the number, or the map."""


def parameters_of(compiled: Any, arguments: tuple[Any, ...]) -> list[Parameter] | None:
    """The parameters of a kernel that was compiled for `arguments`; None for those that only Triton
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
    """A function that launches a kernel that was compiled for `arguments` again, with the same
    numbers."""
    parameters = parameters_of(compiled, arguments)
    metadata = compiled.metadata
    if (
        parameters is not None
        and metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.profile_scratch_size
        and [parameter.size for parameter in parameters] == sizes_of(compiled)
        and b"" not in (maps := _encoded(parameters, arguments))
        and (launch := find_launch()) is not None
    ):
        if metadata.launch_pdl and metadata.shared:
            _prefer_shared_memory(compiled.function)
        return partial(launch, plan_of(compiled, grid, parameters, maps))
    return ByTriton(compiled, grid, arguments)


def _encoded(parameters: list[Parameter], arguments: tuple[Any, ...]) -> list[bytes]:
    """The maps among the parameters, encoded for the tensors among the arguments."""
    maps = (content for _, content in parameters if isinstance(content, TensorMap))
    bases = (x.base.data_ptr() for x in arguments if hasattr(x, "block_shape"))
    return list(map(TensorMap.encode, maps, bases))


def _prefer_shared_memory(function: int) -> None:
    """Gives a kernel all of an SM's memory as shared memory. A kernel that may start early finds
    room beside the one before only where both divide that memory alike."""
    result = library().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY, 100)
    if result:
        raise _error(result)


class _Plan(ctypes.Structure):
    """The fields that are the same at each launch of a kernel; more follows: see `launch_in_c`."""

    _fields_ = (
        ("launch", ctypes.c_void_p),
        ("get_context", ctypes.c_void_p),
        ("retain_context", ctypes.c_void_p),
        ("set_context", ctypes.c_void_p),
        ("get_error_string", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("function", ctypes.c_void_p),
        ("config", _Config),
        ("n_parameters", ctypes.c_uint64),
        ("n_addresses", ctypes.c_uint64),
        ("n_bytes", ctypes.c_uint64),
    )


def plan_of(compiled: Any, grid: Grid, parameters: list[Parameter], maps: list[bytes]) -> bytes:
    """All of a launch but its stream and addresses.

    In memory, tensor maps come first, with an address at the beginning of each; then come the other
    addresses, then numbers.
    """
    n_addresses = sum(isinstance(content, int) for _, content in parameters)
    at_maps = range(0, len(maps) * MAP_BYTES, MAP_BYTES)
    at_addresses = [at_maps.stop + 8 * i for i in range(n_addresses)]
    memory = bytearray().join(maps).ljust(at_maps.stop + 8 * n_addresses, b"\0")
    next_map, places = iter(at_maps), []
    for _, content in parameters:
        if isinstance(content, TensorMap):
            places.append(next(next_map))
        elif isinstance(content, int):
            places.append(at_addresses[content])
        else:
            places.append(len(memory))
            memory += content.ljust(8, b"\0")
    written = [*at_maps, *at_addresses]
    metadata = compiled.metadata
    config = _Config(
        grid=grid,
        block=(32 * metadata.num_warps, 1, 1),
        shared_bytes=metadata.shared,
        attributes=ctypes.addressof(_EARLY),
        n_attributes=int(metadata.launch_pdl),
    )
    cuda = library()
    functions = (
        *(cuda.cuLaunchKernelEx, cuda.cuCtxGetCurrent, cuda.cuDevicePrimaryCtxRetain),
        *(cuda.cuCtxSetCurrent, cuda.cuGetErrorString),
    )
    plan = _Plan(
        *(ctypes.cast(function, ctypes.c_void_p) for function in functions),
        *(torch.cuda.current_device(), compiled.function, config),
        *(len(places), len(written), len(memory)),
    )
    words = (ctypes.c_uint64 * (len(places) + len(written)))(*places, *written)
    return bytes(plan) + bytes(words) + bytes(memory)


class _Address(int):
    """An address with the attributes of a tensor that Triton reads."""

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


class ByTriton:
    """A `Launcher` that any compiled kernel has."""

    def __init__(self, compiled: Any, grid: Grid, arguments: tuple[Any, ...]) -> None:
        self._compiled, self._grid = compiled, grid
        # A launch must not keep the tensors of the first one.
        self._arguments = _moved(arguments, repeat(0), repeat(0))
        self._n_maps = sum(hasattr(x, "block_shape") for x in arguments)

    def __call__(self, stream: int, *addresses: int) -> None:
        compiled, n_maps = self._compiled, self._n_maps
        filled = _moved(self._arguments, addresses[n_maps:], addresses[:n_maps])
        # Behind all pointers; 0 for a kernel that does not ask.
        scratch = addresses[-1] if scratch_bytes(compiled) else 0
        with Allocating(lambda *size: scratch):
            compiled.run(
                *(*self._grid, stream, compiled.function, compiled.packed_metadata),
                *(None, None, None, *filled),
            )


def sizes_of(compiled: Any) -> list[int]:
    """Bytes of each parameter of a loaded kernel; none where the driver cannot tell."""
    if not hasattr(library(), "cuFuncGetParamInfo"):
        return []
    enter_context()
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


def enter_context() -> None:
    """Into torch's context, for a thread that has none: there, nothing can be launched, and no
    tensor map encoded, which Triton does before it looks."""
    cuda, context = library(), ctypes.c_void_p()
    if cuda is None:
        return
    result = cuda.cuCtxGetCurrent(ctypes.byref(context))
    if not result and not context:
        result = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
        result = result or cuda.cuCtxSetCurrent(context)
    if result:
        raise _error(result)


def _error(result: int) -> RuntimeError:
    text = ctypes.c_char_p()
    library().cuGetErrorString(result, ctypes.byref(text))
    return RuntimeError(f"CUDA error {result}: {(text.value or b'unknown').decode()}")
