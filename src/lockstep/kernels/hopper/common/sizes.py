"""Sizes that the hardware sets."""

from __future__ import annotations

from functools import lru_cache

import torch

from lockstep.hardware import SHARED_BYTES as SHARED_BYTES

SM_BYTES = 228 * 1024  # shared memory of an SM; each program takes a KB more than it has
ROWS = 64  # of a warpgroup's matrix product: the height of a wgmma
WARPGROUP = 128  # threads of one
BOX = 8  # rows after which the swizzled pattern of shared memory begins again


def columns(dim: int) -> int:
    """How many columns of a tile are multiplied for head dim `dim`: `pieces.py`."""
    return -(-dim // 16) * 16 if dim <= 192 else 256


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """The number of SMs of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
