"""The global memory that Triton asks for at a launch, to keep descriptors in.

Triton has one allocator for all kernels of a thread, and the caller's own kernels may rely on the
one that they have set. So each launch here sets its own and then restores the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# There is a public way to set it, and none to put it back.
from triton.runtime._allocation import _allocator

Allocate = Callable[[int, int, "int | None"], "Tensor | int"]
"""(size, alignment, stream) -> memory, or its address."""


def allocate(size: int, alignment: int = 16, stream: int | None = None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Allocating:
    """While this is entered, launches take their memory from `source`."""

    __slots__ = ("_before", "_source")

    def __init__(self, source: Allocate) -> None:
        self._source = source

    def __enter__(self) -> None:
        self._before = _allocator.set(self._source)

    def __exit__(self, *error: Any) -> None:
        _allocator.reset(self._before)
