"""What tensors the copy engine takes, and tensor maps that clip packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.hopper.schedule import RAGGED

ALIGNMENT = 8  # elements: it takes addresses and strides in multiples of 16 bytes
# Tensor maps count in int32, and strides of 2^34 elements vanish modulo 2^64 bytes in RAGGED steps.
_FAR, _WRAP = 0x7FFF0000, 1 << 34


def fit(x: Tensor) -> Tensor:
    """x [..., D] if the copy engine takes its strides and address, else a copy."""
    takes = x.data_ptr() % 16 == 0 and all(
        size == 1 or (stride > 0 and stride % ALIGNMENT == 0)
        for size, stride in zip(x.shape[:-1], x.stride(), strict=False)
    )
    return x if takes else copy(x)


def copy(x: Tensor) -> Tensor:
    # Not `contiguous`: it returns x itself where only its address or a dim of size 1 is odd.
    return x.clone(memory_format=torch.contiguous_format)


def ragged(H: int, D: int, by_head: int, by_row: int) -> tuple[list[int], list[int]]:
    """Shape and strides of a map whose rows are clipped to a sequence: see `schedule`."""
    return [_FAR, _FAR, H, RAGGED.value, D], [_WRAP - by_row, by_row, by_head, by_row, 1]
