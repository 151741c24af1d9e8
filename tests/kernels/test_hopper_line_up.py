"""Packed sequences, lined up longest first: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from triton_device import DEVICE, needs_triton

from lockstep.kernels.hopper.line_up import OTHERS, SEQUENCES, line_up_kernel

pytestmark = needs_triton
BLOCK_Q = 128


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("B", [1, 7, 64, 200])
def test_line(B, dtype):
    draws = random.Random(B)
    q_lens, kv_lens = ([draws.choice((0, 1, 128, 500, 999)) for _ in range(B)] for _ in range(2))
    offsets = [
        torch.tensor([0, *lens]).cumsum(0).to(dtype).to(DEVICE) for lens in (q_lens, kv_lens)
    ]
    line = torch.full((2 + 2 * B,), -1, dtype=torch.int32, device=DEVICE)
    line_up_kernel[(-(-B // SEQUENCES),)](*offsets, line, B, BLOCK_Q, SEQUENCES, OTHERS)
    order = sorted(range(B), key=lambda b: -kv_lens[b])  # stable: the earlier of equals first
    tiles = [-(-q_lens[b] // BLOCK_Q) for b in order]
    before = [sum(tiles[:place]) for place in range(B)]
    assert line.tolist() == [0, *before, *order, -1]
