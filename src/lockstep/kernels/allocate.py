"""Memory for results."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# What torch.compile's own code calls. Half the time of `torch.empty`, which looks at all the ways
# it may be called.
_EMPTY_CUDA = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def allocator(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
) -> Callable[[], Tensor]:
    """A function that returns a new tensor each time, contiguous unless it has `strides`.

    On a GPU, `device` has to be the current one when it is called.

    Example:
        >>> new = allocator((2, 3), torch.float32, torch.device("cpu"))
        >>> new().shape
        torch.Size([2, 3])
    """
    if device.type != "cuda" or _EMPTY_CUDA is None:
        if strides is None:
            return partial(torch.empty, shape, dtype=dtype, device=device)
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    strides = strides or tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return partial(_EMPTY_CUDA, shape, strides, dtype)
