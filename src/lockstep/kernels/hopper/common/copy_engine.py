"""Tensor maps (TMA descriptors), which tensors they take, and maps that clip packed rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor, gl
from lockstep.kernels.hopper.common.tensor_maps import RAGGED

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
    """A contiguous copy of x, at an aligned address."""
    # Not `contiguous`: it returns x itself where only its address or a dim of size 1 is odd.
    return x.clone(memory_format=torch.contiguous_format)


def ragged(H: int, D: int, by_head: int, by_row: int) -> tuple[list[int], list[int]]:
    """Shape and strides of a map whose rows are clipped to a sequence: see `coordinates`."""
    return [_FAR, _FAR, H, RAGGED.value, D], [_WRAP - by_row, by_row, by_head, by_row, 1]


def strides_of(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """The strides of x by sequence, head and token."""
    return (0, x.stride(1), x.stride(0)) if packed else (x.stride(0), x.stride(1), x.stride(2))


def batch_rows(x: Tensor) -> int:
    """Rows from one sequence to the next, 0 where these are not whole rows of a tensor map."""
    by_batch, _, by_row = strides_of(x, False)
    whole = by_row > 0 and by_row % ALIGNMENT == 0 == by_batch % by_row
    return by_batch // by_row if whole else 0


def tensor_map(x: Tensor, block: list[int], packed: bool, clipped: bool) -> TensorDescriptor:
    """x as [·, B, H, S, D]; if clipped, with rows that `coordinates` clips to those of a
    sequence."""
    # A dim of size 1 may have any stride, and a tensor map takes few.
    by_batch, by_head, by_row = (
        stride if stride % ALIGNMENT == 0 and stride > 0 else ALIGNMENT
        for stride in strides_of(x, packed)
    )
    H, S, D = (x.shape[1], x.shape[0], x.shape[2]) if packed else x.shape[1:]
    if clipped:
        shape, strides = ragged(H, D, by_head, by_row)
    else:
        shape, strides = [1, x.shape[0], H, S, D], [by_batch, by_batch, by_head, by_row, 1]
    return TensorDescriptor(x, shape, strides, block, _layout(min(2 * block[-1], 128), 16, 5))


def flat_map(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A tensor map of fp32 x as it is, in blocks without swizzling."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, _layout(0, 32, len(block)))


@lru_cache(maxsize=8)
def _layout(swizzle: int, bits: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle, bits, rank)
