"""Straight-line Python code that allocates the tensors of a call and launches its kernels.

It is written for one kind of call: a loop over tensors and kernels would take one to two
microseconds more at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Tensor

LaunchAll = Callable[[list[int], int], tuple[list[Tensor], Tensor | None]]
"""Takes the addresses of the inputs and a stream; returns the results and the workspace."""


class StraightLine:
    """Collects the steps of a call, in order; `function` is what they make.

    Sizes and launchers go by names as tensors do, so calls that differ in sizes alone have the same
    code, which is compiled once.
    """

    def __init__(self, inputs: Sequence[str]) -> None:
        self._scope: dict[str, Any] = {}
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

    def launch(
        self, launcher: Callable[..., None], pointers: Sequence[str], bases: Sequence[str]
    ) -> None:
        """A launch with these tensors behind its pointers, and behind its tensor maps."""
        name = f"launch_{self._n_launches}"
        self._n_launches += 1
        self._scope[name] = launcher
        self._code.append(f"{name}(stream, {_tuple(pointers)}, {_tuple(bases)})")

    def function(self) -> LaunchAll:
        returned = f"return [{', '.join(self._results)}], workspace"
        source = "\n    ".join(("def launch_all(addresses, stream):", *self._code, returned))
        exec(_compiled(source), self._scope)
        found: LaunchAll = self._scope["launch_all"]
        return found


def _address(name: str) -> str:
    return f"{name}_at"


def _tuple(names: Sequence[str]) -> str:
    """The source of a tuple of addresses."""
    return f"({''.join(f'{_address(name)}, ' for name in names)})"


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<launch_all>", "exec")
