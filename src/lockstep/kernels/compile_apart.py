"""A build for a GPU that another process compiles, and leaves on disk for this one.

That process needs no GPU, and starts no CUDA: all it has to know is what it compiles for.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.kernels.build_key import fix_key


class BuildApart(NamedTuple):
    """All that compiling a kernel takes, which can be pickled."""

    module: str
    name: str
    """Of the kernel in its module."""
    arguments: tuple[Any, ...]
    """Without the memory of their tensors."""
    options: dict[str, Any]
    target: Any
    """What Triton calls the kind of a GPU."""
    launcher: Any
    """A class of Triton that compiles C code with which it launches the kernel."""

    @staticmethod
    def of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> BuildApart:
        """The build that a launch with these arguments on the current device would have."""
        from triton.runtime.driver import driver

        target, launcher = driver.active.get_current_target(), driver.active.launcher_cls
        without_memory = tuple(_without_memory(x) for x in arguments)
        return BuildApart(
            kernel.fn.__module__, kernel.__name__, without_memory, options, target, launcher
        )

    @property
    def kernel(self) -> Any:
        return getattr(import_module(self.module), self.name)

    def compile(self) -> None:
        """Leaves the build on disk. Triton is of no more use for launches in this process."""
        from triton.runtime.driver import driver

        driver.set_active(_Target(self.target))
        fix_key(self.kernel)
        compiled = self.kernel.warmup(*self.arguments, grid=(1, 1, 1), **self.options)
        self.launcher(compiled.src, compiled.metadata)


class _Target:
    """What compiling asks Triton's driver for, where there is no GPU."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _without_memory(argument: Any) -> Any:
    """A tensor of the same type that has no memory, which counts as aligned; or the argument."""
    if isinstance(argument, Tensor):
        return argument.detach().to("meta")
    if hasattr(argument, "block_shape"):
        return replace(argument, base=_without_memory(argument.base))
    return argument
