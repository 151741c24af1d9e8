"""How the kernels of a call are launched: tensors by name, everything else once.

    Launch      one kernel with its grid and all arguments but the pointers
    Launches    the kernels of one kind of call, in order, and the memory they need

A parameter `x_ptr` of a kernel is the address of the tensor called x, and `x_desc` a tensor map of
it. The names are looked up when a call is prepared, and an unknown or missing one raises: nothing
about the order of a kernel's parameters is written down but in the kernel itself.

The first two calls of a kind go through Triton: the first may compile, and the second works out
how to launch the same kernels without Triton, which takes too long for calls that come once. Later
calls write addresses where the CUDA driver reads them (`driver`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.cache import Cache
from lockstep.kernels.allocate import allocator
from lockstep.kernels.build_key import fix_key, kind_of
from lockstep.kernels.compile_apart import BuildApart
from lockstep.kernels.compiled import Build, is_only_planned, note
from lockstep.kernels.driver import Grid, enter_context, launcher_of, scratch_bytes
from lockstep.kernels.graphs import keep_if_captured
from lockstep.kernels.kernel import Given
from lockstep.kernels.scratch import Allocating, allocate
from lockstep.kernels.spread import spread
from lockstep.kernels.straight_line import LaunchAll, OutOf, Step, StraightLine, lay_out
from lockstep.memory_order import is_tokens_first, strides_like
from lockstep.problem import Tensors

# By all that a compiled kernel depends on.
_COMPILED: Cache[tuple[Any, ...], Any] = Cache(limit=1024)


def compiled_kernels() -> list[Any]:
    """The kernels that Triton has compiled for this process so far."""
    return list(_COMPILED.values())


def unspecialized(jit: Callable[..., Any], any_address: Collection[str] = ()) -> Any:
    """A decorator for kernels of which one binary serves every length, batch size and stride.

    Triton would compile another one where a number is 1 or a multiple of 16, and where a pointer is
    not a multiple of 16 bytes. With this no number makes one, nor does a pointer in `any_address`.
    It cannot do so for numbers inside a tuple, which Triton 3.6 always looks at: groups of
    arguments are taken apart (`spread`).
    """

    def decorate(function: Any) -> Any:
        function = spread(function)
        parameters = inspect.signature(function).parameters
        unknown = set(any_address) - parameters.keys()
        if unknown:
            raise TypeError(f"{function.__name__} has no parameters {sorted(unknown)}")
        numbers = (
            name
            for name, parameter in parameters.items()
            if "constexpr" not in str(parameter.annotation) and not name.endswith(("_ptr", "_desc"))
        )
        return jit(do_not_specialize=[*numbers, *any_address])(function)

    return decorate


class Buffer(NamedTuple):
    """A tensor that a call allocates, contiguous unless it has strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @staticmethod
    def like(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """A tensor [B, H, S, ...] that lies in memory as x does."""
        return Buffer(shape, dtype, strides_like(x, shape) if is_tokens_first(x) else None)

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Launch:
    """One kernel with its grid, all arguments but the pointers, and what it is compiled with.

    `arguments` are numbers and constants by the name of their parameter. `maps` has for each
    `x_desc` a function that makes the descriptor of a tensor. A pointer or a map is that of the
    tensor of its own name, unless `names` has another one; the pointers in `absent` are None.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        *,
        maps: Mapping[str, Callable[[Tensor], Any]] | None = None,
        names: Mapping[str, str] | None = None,
        absent: Collection[str] = (),
        **options: Any,
    ) -> None:
        # Bits depend on whether a product and a sum are one instruction, which Triton otherwise has
        # from the environment, and from 3.10 on without: said here, it is the same everywhere.
        self.kernel, self.options = kernel, {"enable_fp_fusion": True, **options}
        self.grid: Grid = (*grid, 1, 1)[:3]
        self._arguments, self._maps = dict(arguments), dict(maps or {})
        self._names, self._absent = dict(names or {}), frozenset(absent)
        # Kernels of the interpreter have none.
        self._is_compiled = hasattr(kernel, "params")
        if self._is_compiled:
            fix_key(kernel)
        parameters = kernel.params if self._is_compiled else ()
        self._constants = {p.name for p in parameters if p.is_constexpr}
        self._specializable = {p.name for p in parameters} - self._constants
        self._unspecialized = {p.name for p in parameters if p.do_not_specialize}
        self._check()

    def _check(self) -> None:
        """Raises TypeError if a parameter has no argument, or an argument no parameter."""
        parameters = set(self.kernel.arg_names)
        pointers = {p.removesuffix("_ptr") for p in parameters if p.endswith("_ptr")}
        described = {p.removesuffix("_desc") for p in parameters if p.endswith("_desc")}
        numbers = {p for p in parameters if not p.endswith(("_ptr", "_desc"))}
        for what, given, taken in (
            ("arguments", self._arguments.keys(), numbers),
            ("maps", self._maps.keys(), described),
        ):
            if given != taken:
                raise TypeError(
                    f"{self.name} takes the {what} {sorted(taken)}: "
                    f"missing {sorted(taken - given)}, unknown {sorted(given - taken)}"
                )
        specialized = (numbers & self._specializable) - self._unspecialized
        integers = sorted(x for x in specialized if isinstance(self._arguments[x], int))
        if integers:
            raise TypeError(f"{self.name} would be compiled for each value of {integers}")
        unknown = (self._names.keys() - pointers - described) | (self._absent - pointers)
        if unknown:
            raise TypeError(f"{self.name} has no pointers or maps {sorted(unknown)}")

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def tensors(self) -> list[str | None]:
        """The names of the tensors behind pointers, in the order of the kernel's parameters."""
        return [
            None if x in self._absent else self._names.get(x, x) for x in self._suffixed("_ptr")
        ]

    def described(self) -> list[str]:
        """The names of the tensors behind tensor maps, in the order of the kernel's parameters."""
        return [self._names.get(x, x) for x in self._suffixed("_desc")]

    def _suffixed(self, suffix: str) -> list[str]:
        names = self.kernel.arg_names
        return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]

    def bind(self, tensors: Mapping[str, Tensor | None]) -> tuple[Any, ...]:
        """All arguments of the kernel, in order, with None for tensors that are not there."""
        pointers, described = iter(self.tensors()), iter(self.described())
        bound = []
        for name in self.kernel.arg_names:
            if name.endswith("_ptr"):
                pointer = next(pointers)
                bound.append(None if pointer is None else tensors.get(pointer))
            elif name.endswith("_desc"):
                bound.append(self._maps[name.removesuffix("_desc")](tensors[next(described)]))
            else:
                bound.append(self._arguments[name])
        return tuple(bound)

    def run(self, arguments: tuple[Any, ...], device: int) -> Any:
        """Launches the kernel through Triton, and returns it compiled; None if it is interpreted,
        or not launched because calls are only planned.

        All but the first of its kind skip Triton's look at every argument: it would find the same.
        """
        if not self._is_compiled:
            self.kernel[self.grid](*arguments)
            return None
        key = (device, *self.build(arguments))
        if is_only_planned(key, self._build(arguments)):
            return None
        if device >= 0:
            enter_context()
        compiled = _COMPILED.get(key)
        with Allocating(allocate):
            if compiled is not None:
                compiled[self.grid](*arguments)
                return compiled
            compiled = _COMPILED[key] = self.kernel[self.grid](*arguments, **self.options)
            note(self.name)
        return compiled

    def _build(self, arguments: tuple[Any, ...]) -> Build:
        def load() -> None:
            compiled = self.kernel.warmup(*arguments, grid=self.grid, **self.options)
            # Is found out when it is asked for.
            _ = compiled.run

        def apart() -> Callable[[], None]:
            return BuildApart.of(self.kernel, arguments, self.options).compile

        # Those in Gluon are the large ones.
        return Build(self.name, load, apart, self.kernel.is_gluon())

    def build(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """All that a compiled kernel depends on but the device."""
        kinds = (
            x if name in self._constants else kind_of(x, name in self._unspecialized)
            for name, x in zip(self.kernel.arg_names, arguments, strict=True)
        )
        return (self.kernel, *self.options.items(), *kinds)


def taken_by(kernel: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that this kernel takes, of those that several share."""
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}


class Launches:
    """A prepared call: its kernels in order, and the memory that they need.

    Kernels know tensors by name: `inputs` come with each call, in this order; `results` are
    allocated for each call; regions of the `workspace` are memory that one kernel leaves to the
    next; `kept` are the same tensors at each call. Where this kind of call has no such tensor, a
    result or a region is None; a pointer to it is None then, as it is for an input that is None.

    `fit`, if there is one, makes of the inputs those that the kernels take, which may be copies.
    `finish` makes of the inputs, the results that are not None and the workspace what a call
    returns; without it, that is the tuple of the results.

    Raises TypeError if two tensors have one name, or if a kernel names a tensor that there is not.
    """

    def __init__(
        self,
        device: torch.device,
        inputs: Sequence[str],
        results: Mapping[str, Buffer | None],
        workspace: Mapping[str, Buffer | None],
        launches: Sequence[Launch],
        *,
        kept: Mapping[str, Tensor] | None = None,
        fit: Callable[[Any], Any] | None = None,
        finish: Callable[[Any, list[Tensor], Tensor | None], Any] | None = None,
    ) -> None:
        self._device = device
        self._index = -1 if device.index is None else device.index
        self._inputs, self.launches = tuple(inputs), tuple(launches)
        self._results = {name: buffer for name, buffer in results.items() if buffer is not None}
        self._regions = {name: buffer for name, buffer in workspace.items() if buffer is not None}
        self._kept = dict(kept or {})
        self._check([*inputs, *results, *workspace, *self._kept])
        self._fit, self._finish = fit, finish
        self._new_results = {
            name: allocator(shape, dtype, device, strides)
            for name, (shape, dtype, strides) in self._results.items()
        }
        sizes = (buffer.n_bytes for buffer in self._regions.values())
        self._offsets, self.workspace_bytes = lay_out(sizes)
        self._was_called = False
        # What the second call writes for those to come.
        self._launch_all: LaunchAll | None = None
        self.out_of: OutOf = self._out_of

    def _check(self, names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise TypeError(f"two tensors of one call have one name: {sorted(names)}")
        for launch in self.launches:
            used = {x for x in launch.tensors() if x is not None} | set(launch.described())
            unknown = sorted(used - set(names))
            if unknown:
                raise TypeError(f"{launch.name} takes {unknown}, which the call does not have")

    def __call__(self, tensors: Any, addresses: list[int]) -> Any:
        """Runs a call with the device of its tensors current; that of tensors on a CPU is -1."""
        if self._index >= 0 and self._index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._index):
                return self._run(tensors, addresses)
        return self._run(tensors, addresses)

    def _out_of(self, tensors: Given, addresses: list[int]) -> Tensor:
        """The first result of a call."""
        out: Tensor = self(Tensors._make(tensors), addresses)[0]
        return out

    def _run(self, tensors: Any, addresses: list[int]) -> Any:
        # Copies and workspace are held until the kernels are in the stream: what gets their memory
        # next comes after them.
        if self._kept and self._index >= 0:
            keep_if_captured(self._kept.values())
        if self._fit is not None:
            tensors = self._fit(tensors)
            addresses = tensors.addresses()
        if self._launch_all is None:
            results, workspace = self._through_triton(tensors)
        else:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            results, workspace = self._launch_all(addresses, stream)
        if self._finish is None:
            return tuple(results)
        return self._finish(tensors, results, workspace)

    def named(
        self, tensors: Sequence[Tensor | None], results: list[Tensor], workspace: Tensor | None
    ) -> dict[str, Tensor | None]:
        """The tensors of a call by their names, those of the workspace included."""
        named = dict(zip(self._inputs, tensors, strict=True)) | self._kept
        named |= zip(self._results, results, strict=True)
        return named if workspace is None else named | self.regions(workspace)

    def regions(self, workspace: Tensor) -> dict[str, Tensor]:
        """The regions of a workspace as tensors, by their names."""
        found = {}
        for (name, buffer), at in zip(self._regions.items(), self._offsets, strict=True):
            part = workspace[at : at + buffer.n_bytes]
            found[name] = part.view(buffer.dtype).view(buffer.shape)
        return found

    def _through_triton(
        self, tensors: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Returns the results and the workspace."""
        results = [new() for new in self._new_results.values()]
        new_workspace = self._workspace_of(self.workspace_bytes)
        workspace = None if new_workspace is None else new_workspace()
        named = self.named(tensors, results, workspace)
        bound = [launch.bind(named) for launch in self.launches]
        compiled = [
            launch.run(arguments, self._index)
            for launch, arguments in zip(self.launches, bound, strict=True)
        ]
        # The interpreter compiles nothing.
        if self._was_called and None not in compiled:
            steps = self._without_triton(named, compiled, bound)
            names = list(self._results)
            self._launch_all = self._write(steps, names).returning_all()
            if names and self._fit is None:
                # The other results, which are not returned, lie in the workspace.
                code = self._write(steps, names[:1])
                self.out_of = code.returning_first(self._index, otherwise=self._out_of)
        self._was_called = True
        return results, workspace

    def _workspace_of(self, n_bytes: int) -> Callable[[], Tensor] | None:
        return allocator((n_bytes,), torch.uint8, self._device) if n_bytes else None

    def _without_triton(
        self, named: dict[str, Tensor | None], compiled: list[Any], bound: list[tuple[Any, ...]]
    ) -> list[Step]:
        """How kernels that were launched through Triton are launched from now on."""
        steps = []
        for launch, kernel, arguments in zip(self.launches, compiled, bound, strict=True):
            pointers = [x for x in launch.tensors() if x is not None and named.get(x) is not None]
            launcher = launcher_of(kernel, launch.grid, arguments)
            n_bytes = math.prod(launch.grid) * scratch_bytes(kernel)
            steps.append(Step(launcher, pointers, launch.described(), n_bytes))
        return steps

    def _write(self, steps: list[Step], returned: list[str]) -> StraightLine:
        """The code that allocates the results to be returned, and a workspace with the others in
        it, and launches all kernels."""
        code = StraightLine(self._inputs, self._kept)
        for name in returned:
            code.allocate(name, self._new_results[name])
        regions = {name: buffer.n_bytes for name, buffer in self._regions.items()}
        regions |= {
            name: buffer.n_bytes for name, buffer in self._results.items() if name not in returned
        }
        regions |= {f"scratch_{i}": step.scratch for i, step in enumerate(steps) if step.scratch}
        offsets, n_bytes = lay_out(regions.values())
        new_workspace = self._workspace_of(n_bytes)
        if new_workspace is not None:
            code.allocate_workspace(new_workspace, zip(regions, offsets, strict=True))
        for i, step in enumerate(steps):
            scratch = [f"scratch_{i}"] if step.scratch else []
            code.launch(step.launcher, [*step.pointers, *scratch], step.bases)
        return code
