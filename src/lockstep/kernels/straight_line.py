"""Straight-line Python code that allocates the tensors of a call and launches its kernels.

It is written for one kind of call: a loop over tensors and kernels would take one to two
microseconds more at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.driver import Launcher
from lockstep.kernels.graphs import keep_if_captured
from lockstep.kernels.kernel import Given

LaunchAll = Callable[[list[int], int], tuple[list[Tensor], Tensor | None]]
"""Takes the addresses of the inputs and a stream; returns the results and the workspace."""
OutOf = Callable[[Given, list[int]], Tensor]
"""Takes the inputs and their addresses; returns the first result."""

# Regions of a workspace begin at multiples of it, in bytes.
ALIGNMENT = 128


class Step(NamedTuple):
    """One kernel of a call, without Triton."""

    launcher: Launcher
    pointers: list[str]
    """Names of the tensors behind pointers."""
    bases: list[str]
    """Names of the tensors behind tensor maps."""
    scratch: int
    """Bytes of global memory that Triton needs at a launch, for descriptors."""


class StraightLine:
    """Collects the steps of a call, in order, and makes a function of them.

    `inputs` come with each call, and `kept` are the same tensors each time. Sizes and launchers go
    by names as tensors do, so calls that differ in sizes alone have the same code, which is
    compiled once.
    """

    def __init__(self, inputs: Sequence[str], kept: Mapping[str, Tensor]) -> None:
        self._kept = tuple(kept.values())
        self._scope: dict[str, Any] = {_address(name): x.data_ptr() for name, x in kept.items()}
        self._code = [f"{', '.join(map(_address, inputs))}, = addresses", "workspace = None"]
        self._results: list[str] = []
        self._n_launches = 0

    def allocate(self, name: str, new: Callable[[], Tensor]) -> None:
        """A result of this name."""
        self._scope[f"new_{name}"] = new
        self._code.append(f"{name}_tensor = new_{name}()")
        self._code.append(f"{_address(name)} = {name}_tensor.data_ptr()")
        self._results.append(f"{name}_tensor")

    def allocate_workspace(
        self, new: Callable[[], Tensor], offsets: Iterable[tuple[str, int]]
    ) -> None:
        """A workspace, and where in it the region of each name begins."""
        self._scope["new_workspace"] = new
        self._code += ["workspace = new_workspace()", "start = workspace.data_ptr()"]
        for name, offset in offsets:
            self._scope[f"{name}_offset"] = offset
            self._code.append(f"{_address(name)} = start + {name}_offset")

    def launch(self, launcher: Launcher, pointers: Sequence[str], bases: Sequence[str]) -> None:
        """A launch with these tensors behind its pointers, and behind its tensor maps."""
        name = f"launch_{self._n_launches}"
        self._n_launches += 1
        self._scope[name] = launcher
        addresses = ", ".join(map(_address, (*bases, *pointers)))
        self._code.append(f"{name}(stream, {addresses})")

    def returning_all(self) -> LaunchAll:
        """A function that returns all results and the workspace."""
        returned = f"return [{', '.join(self._results)}], workspace"
        return self._function("launch_all(addresses, stream)", [*self._code, returned])

    def returning_first(self, device: int, otherwise: OutOf) -> OutOf:
        """A function that returns the first result, and does `otherwise` unless the device with
        this index is the current one; -1 stands for no GPU."""
        self._scope |= {"device": device, "otherwise": otherwise, "torch": torch._C}
        code = ["stream = torch._cuda_getCurrentRawStream(device)", *self._code]
        if device >= 0 and self._kept:
            self._scope |= {"keep_if_captured": keep_if_captured, "kept": self._kept}
            code.insert(0, "keep_if_captured(kept)")
        if device >= 0:
            code.insert(0, "if torch._cuda_getDevice() != device:")
            code.insert(1, "    return otherwise(tensors, addresses)")
        return self._function("out_of(tensors, addresses)", [*code, f"return {self._results[0]}"])

    def _function(self, head: str, code: list[str]) -> Any:
        exec(_compiled("\n    ".join((f"def {head}:", *code))), self._scope)
        return self._scope[head[: head.index("(")]]


def _address(name: str) -> str:
    return f"{name}_at"


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<launch_all>", "exec")


def lay_out(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Where regions of these sizes begin, one after the other, and where they end."""
    offsets, end = [], 0
    for size in sizes:
        start = end + -end % ALIGNMENT
        offsets.append(start)
        end = start + size
    return tuple(offsets), end
