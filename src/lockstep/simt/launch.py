"""A kernel with its launch configuration: where arguments decide the back end."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .function import KernelFunction
    from .machine import Trace

Index3 = tuple[int, int, int]
MAX_SIZE = (1 << 31) - 1  # an index is an int32


class Launch:
    """`kernel[grid, block]` or `kernel[grid, block, dynamic_shared_bytes]`.

    Calling it with arrays in host memory runs the machine and returns a `Trace`; with CUDA tensors
    it launches the compiled kernel on the current stream and returns None.
    """

    def __init__(self, kernel: KernelFunction, configuration: Any):
        parts = configuration if isinstance(configuration, tuple) else ()
        if len(parts) not in (2, 3):
            raise TypeError(
                f"{kernel.__name__}[grid, block] or [grid, block, dynamic_shared_bytes], "
                f"got {configuration!r}"
            )
        self.kernel = kernel
        self.grid = extent(parts[0], "grid")
        self.block = extent(parts[1], "block")
        self.dynamic_bytes = operator.index(parts[2]) if len(parts) == 3 else 0
        if self.dynamic_bytes < 0:
            raise ValueError(f"dynamic_shared_bytes is {self.dynamic_bytes}, takes 0 or more")

    def __call__(self, *args: Any, **kwargs: Any) -> Trace | None:
        arguments = self.kernel.bind(*args, **kwargs)
        if any(getattr(value, "is_cuda", False) for value in arguments.values()):
            from .gpu import launch

            return launch(self.kernel, self.grid, self.block, self.dynamic_bytes, arguments)
        return self.trace(**arguments)

    def trace(
        self,
        *args: Any,
        progress: Callable[[int, int], None] | None = None,
        record: int | None = None,
        **kwargs: Any,
    ) -> Trace:
        """Run on the machine. `progress(done, all)` is called with numbers of blocks; the trace has
        a `Recording` of the block with number `record`, where one is given.

        Raises what `Kernel.typed` raises, and ValueError for a launch no GPU could run.
        """
        from .machine import run

        arguments = self.kernel.bind(*args, **kwargs)
        typed = self.kernel.typed(**arguments)
        launch = self.grid, self.block, self.dynamic_bytes
        return run(typed, *launch, arguments, progress, record=record)


def extent(value: Any, name: str) -> Index3:
    """A triple of up to three sizes.

    >>> extent((4, 2), "grid")
    (4, 2, 1)
    """
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"{name} takes one to three sizes, got {value!r}")
    try:
        sizes = tuple(operator.index(p) for p in parts)
    except TypeError:
        raise TypeError(f"{name} takes integers, got {value!r}") from None
    if any(size < 1 for size in sizes):
        raise ValueError(f"{name} is {value!r}, every size must be at least 1")
    if any(size > MAX_SIZE for size in sizes):
        raise ValueError(f"{name} is {value!r}, every size must be at most {MAX_SIZE}")
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]
