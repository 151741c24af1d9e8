"""Index arithmetic: element numbers, strides and bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import Value


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a dense array.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def linear(index: tuple[Value, ...], strides: tuple[int, ...]) -> Value:
    """Element number of an index tuple."""
    address = index[0] if strides[0] == 1 else index[0] * strides[0]
    for part, stride in zip(index[1:], strides[1:], strict=True):
        address = address + (part if stride == 1 else part * stride)
    return address


class Ranges:
    """Largest values of index arrays, where a negative index counts as larger than all others. The
    last few arrays asked for are remembered, because one index usually serves many accesses."""

    def __init__(self, capacity: int = 16):
        self.capacity = capacity
        self.known: dict[int, tuple[np.ndarray, int]] = {}

    def __call__(self, array: np.ndarray) -> int:
        found = self.known.get(id(array))
        if found is None or found[0] is not array:
            if len(self.known) >= self.capacity:
                del self.known[next(iter(self.known))]
            unsigned = array.view(f"u{array.dtype.itemsize}")
            found = self.known[id(array)] = (array, int(unsigned.max()))
        return found[1]


def outside(index: tuple[Value, ...], shape: tuple[int, ...], ranges: Ranges) -> Any:
    """Which lanes leave the array along some axis, as a boolean array; False if none does."""
    bad: Any = False
    for part, n in zip(index, shape, strict=True):
        if isinstance(part, np.ndarray):
            if ranges(part) >= n:
                bad = bad | (part < 0) | (part >= n)
        elif part < 0 or part >= n:
            bad = bad | np.ones((1, 1), bool)
    return bad
