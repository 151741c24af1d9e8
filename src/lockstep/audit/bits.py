"""Results compared bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first element, in row-major order, in which two tensors differ."""

    tensor: str
    index: tuple[int, ...]
    expected: float
    got: float
    expected_bits: str
    got_bits: str
    differing: int
    elements: int

    def __str__(self) -> str:
        return (
            f"{self.tensor}{list(self.index)}: expected {self.expected:.9g} "
            f"({self.expected_bits}), got {self.got:.9g} ({self.got_bits}); {self.differing} of "
            f"{self.elements} elements differ"
        )


def first_difference(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor]
) -> Difference | None:
    """The first difference in the first tensor that has one, or None.

    Every NaN counts as the same; +0 and -0 do not.

    Raises:
        ValueError: The two do not hold the same tensors in the same shapes and dtypes.

    Example:
        >>> first_difference({"out": torch.zeros(2)}, {"out": torch.tensor([0.0, -0.0])}).index
        (1,)
    """
    if expected.keys() != got.keys():
        raise ValueError(f"got takes the tensors {list(expected)}, got {list(got)}")
    for name in expected:
        found = _compare(name, expected[name], got[name])
        if found is not None:
            return found
    return None


def _compare(name: str, expected: Tensor, got: Tensor) -> Difference | None:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise ValueError(
            f"{name} takes {list(expected.shape)} {expected.dtype}, got {list(got.shape)} "
            f"{got.dtype}"
        )
    a, b = as_integers(expected), as_integers(got)
    different = (a != b) & ~(expected.isnan() & got.isnan())
    if not bool(different.any()):
        return None
    index = tuple(different.nonzero()[0].tolist())
    return Difference(
        tensor=name,
        index=index,
        expected=float(expected[index]),
        got=float(got[index]),
        expected_bits=_hex(a[index], expected.element_size()),
        got_bits=_hex(b[index], expected.element_size()),
        differing=int(different.sum()),
        elements=expected.numel(),
    )


def as_integers(x: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _hex(pattern: Tensor, size: int) -> str:
    return f"0x{int(pattern) & (1 << 8 * size) - 1:0{2 * size}x}"
