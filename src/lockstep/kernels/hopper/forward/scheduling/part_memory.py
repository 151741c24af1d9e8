"""The memory of the parts of tiles whose keys have several: `key_parts.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.hopper.forward.plan import plan_of, value_columns
from lockstep.kernels.hopper.forward.scheduling.part_rule import MOST, UNITS
from lockstep.kernels.launch import Buffer, Launch, unspecialized
from lockstep.problem import AttentionProblem

PART_NAMES = ("tile_parts", "tile_part_lse", "tile_arrivals")
# Counters that a program clears.
TOGETHER = 1024


def part_memory(problem: AttentionProblem, n_processors: int) -> dict[str, Buffer]:
    """What the forward needs beside its results."""
    rows, n_slots = plan_of(problem).block_q, _n_slots(n_processors)
    return {
        "tile_parts": Buffer((n_slots, rows, value_columns(problem.Dv)), torch.float32),
        "tile_part_lse": Buffer((n_slots, rows), torch.float32),
        "tile_arrivals": Buffer((n_arrivals(problem, n_processors),), torch.int32),
    }


def _n_slots(n_processors: int) -> int:
    return max(UNITS, n_processors * MOST)


def n_arrivals(problem: AttentionProblem, n_processors: int) -> int:
    """How many counters there are, all 0 before the forward."""
    return _n_slots(n_processors) * plan_of(problem).consumers


@unspecialized(triton.jit)
def clear_arrivals(tile_arrivals_ptr, n, TOGETHER: tl.constexpr):
    """Set n counters to 0."""
    i = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    tl.store(tile_arrivals_ptr + i, 0, mask=i < n)


def clear_launch(problem: AttentionProblem, n_processors: int) -> Launch:
    """The launch that clears the counters of a call without packed sequences."""
    n = n_arrivals(problem, n_processors)
    numbers: dict[str, Any] = {"n": n, "TOGETHER": TOGETHER}
    return Launch(clear_arrivals, (triton.cdiv(n, TOGETHER),), numbers, num_warps=4)
