"""Where results lie in memory: in the order of the inputs they belong to.

A tensor [B, H, S, D] lies *heads first* in memory, as its dims are named, or *tokens first*, as a
view of [B, S, H, D]. out, lse and statistics lie as q does, each gradient of q, k and v as its own
tensor: a caller whose q has tokens first gets an out that `.transpose(1, 2).reshape(B, S, -1)`
takes as it is. Results of packed sequences are contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def is_tokens_first(x: Tensor) -> bool:
    """Whether x lies in memory as [B, S, H, D]; a packed tensor [T, H, D] does not count."""
    return x.dim() == 4 and x.stride(2) > x.stride(1)


def strides_like(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor [B, H, S, ...] of this shape that lies as x does, without gaps.

    Example:
        >>> q = torch.empty(2, 5, 3, 8).transpose(1, 2)
        >>> strides_like(q, (2, 3, 5, 8))
        (120, 8, 24, 1)
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if is_tokens_first(x):
        strides[1], strides[2] = strides[2], strides[2] * shape[1]
    return tuple(strides)


def empty_like(x: Tensor, shape: tuple[int, ...], **how: Any) -> Tensor:
    """A new tensor of this shape that lies as x does."""
    return x.new_empty_strided(shape, strides_like(x, shape), **how)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros that lie as x does, without its gaps."""
    return empty_like(x, tuple(x.shape)).zero_()


def in_order_of(x: Tensor, result: Tensor) -> Tensor:
    """`result` [B, H, S, ...], or a copy of it, that lies as x does."""
    strides = strides_like(x, tuple(result.shape))
    if all(
        size == 1 or mine == wanted
        for size, mine, wanted in zip(result.shape, result.stride(), strides, strict=True)
    ):
        return result
    copied: Tensor = torch.empty_strided(
        result.shape, strides, dtype=result.dtype, device=result.device
    ).copy_(result)
    return copied
