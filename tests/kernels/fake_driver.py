"""A CUDA driver that reads the memory of launches by the signatures of their kernels; no kernel is
compiled or run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from lockstep.kernels import driver

BYTES = {"i32": 4, "i64": 8, "fp32": 4}


class Read(NamedTuple):
    """What the driver found at a launch, by parameter; of tensor maps the address of the tensor."""

    kernel: str
    grid: tuple[int, ...]
    stream: int
    found: dict[str, int | float]
    scratch: int


class Compiled:
    """A compiled kernel as Triton returns it, with the parameters that `arguments` give it."""

    packed_metadata = None

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], number: int, scratch: int) -> None:
        self.kernel, self.function = kernel, number
        self.n_launches = 1
        kinds = dict(zip(kernel.arg_names, map(kind_of, kernel.params, arguments), strict=True))
        self.src = SimpleNamespace(signature=kinds)
        maps = [x for x in arguments if hasattr(x, "block_shape")]
        self.ranks = [len(x.block_shape) for x in maps]
        metadata = {"elem_size": 2, "elem_type": 10, "swizzle": 0}
        self.metadata = SimpleNamespace(
            num_ctas=1,
            launch_cooperative_grid=False,
            profile_scratch_size=0,
            global_scratch_size=scratch,
            num_warps=4,
            shared=0,
            launch_pdl=False,
            tensordesc_meta=[{**metadata, "block_size": x.block_shape} for x in maps],
        )
        declared = ", ".join(".param " for _ in self.sizes)
        self.asm = {"ptx": f".entry kernel({declared})"}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def again(*arguments: Any) -> None:
            self.n_launches += 1

        return again

    @property
    def parameters(self) -> list[tuple[str, str, int]]:
        """Name, kind and size of each parameter, tensor maps with their shapes and strides."""
        ranks, found = iter(self.ranks), []
        for name, kind in self.src.signature.items():
            if kind == "tensordesc":
                rank = next(ranks)
                found += [(name, "map", driver.MAP_BYTES)]
                found += [("", "i32", 4)] * rank + [("", "i64", 8)] * rank
            elif kind != "constexpr":
                found.append((name, kind, BYTES.get(kind, 8)))
        return [*found, ("scratch", "*i8", 8), ("", "*i8", 8)]

    @property
    def sizes(self) -> list[int]:
        return [size for _, _, size in self.parameters]


def kind_of(parameter: Any, argument: Any) -> str:
    if parameter.is_constexpr or argument is None:
        return "constexpr"
    if hasattr(argument, "block_shape"):
        return "tensordesc"
    if isinstance(argument, torch.Tensor):
        return "*i8"
    return "fp32" if isinstance(argument, float) else "i32" if argument < 1 << 31 else "i64"


POINTER, POINTERS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)


class Driver:
    """Reads the memory of a launch as the CUDA driver would."""

    def __init__(self) -> None:
        self.kernels: list[Compiled] = []
        self.launches: list[Read] = []
        self.scratch = 0
        of_config, function = (
            ctypes.POINTER(driver._Config),
            partial(ctypes.CFUNCTYPE, ctypes.c_int),
        )
        self.cuLaunchKernelEx = function(of_config, POINTER, POINTERS, POINTER)(self.launch)
        self.cuCtxGetCurrent = function(POINTERS)(self.get_context)
        self.cuDevicePrimaryCtxRetain = self.cuCtxSetCurrent = self.cuGetErrorString = None

    def compile(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> Compiled:
        arguments = (*arguments, *(options[p.name] for p in kernel.params[len(arguments) :]))
        self.kernels.append(Compiled(kernel, arguments, len(self.kernels), self.scratch))
        return self.kernels[-1]

    def cuFuncGetParamInfo(self, function: Any, i: int, offset: Any, size: Any) -> int:
        size._obj.value = self.kernels[function.value or 0].sizes[i]
        return 0

    def cuTensorMapEncodeTiled(self, address: Any, *rest: Any) -> int:
        ctypes.memmove(address.value, rest[2].value.to_bytes(8, "little"), 8)
        return 0

    def launch(self, config: Any, function: int | None, parameters: Any, extra: None) -> int:
        kernel = self.kernels[function or 0]
        found = {}
        for i, (name, kind, size) in enumerate(kernel.parameters):
            content = ctypes.string_at(parameters[i], min(size, 8))
            if kind == "fp32":
                found[name] = ctypes.c_float.from_buffer_copy(content).value
            else:
                found[name] = int.from_bytes(content, "little", signed=kind in BYTES)
        found.pop("")
        scratch, grid = int(found.pop("scratch")), tuple(config.contents.grid)
        self.launches.append(
            Read(kernel.kernel.__name__, grid, config.contents.stream, found, scratch)
        )
        return 0

    def get_context(self, context: Any) -> int:
        context[0] = 77
        return 0
