"""How a problem is cut into programs: tile sizes, spans, runs of spans.

What decides the bits of a row is `Tiles.BLOCK_KV` and `Tiles.SPAN`: functions of the head dims and
the dtype. All the rest, which follows the batch and the device, decides only who computes what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.problem import AttentionProblem


@dataclass(frozen=True)
class Tiles:
    """One way to cut the work of one KV head."""

    BLOCK_Q: int
    BLOCK_KV: int
    SPAN: int
    num_warps: int
    num_stages: int


def block_of(head_dim: int) -> int:
    """The power of two that a head dim is padded to inside tiles."""
    return max(16, 1 << (head_dim - 1).bit_length())


# By the larger of the padded head dims: many rows, few rows.
_HALF = {
    64: (Tiles(128, 128, 512, 8, 3), Tiles(64, 128, 512, 4, 3)),
    128: (Tiles(128, 64, 512, 8, 3), Tiles(64, 64, 512, 4, 4)),
    256: (Tiles(128, 64, 512, 8, 2), Tiles(64, 64, 512, 4, 2)),
    512: (Tiles(64, 32, 512, 8, 2), Tiles(64, 32, 512, 8, 2)),
}
_SINGLE = {
    64: (Tiles(64, 32, 512, 4, 2), Tiles(32, 32, 512, 4, 2)),
    128: (Tiles(32, 32, 512, 4, 2), Tiles(32, 32, 512, 4, 2)),
    256: (Tiles(32, 32, 512, 8, 2), Tiles(32, 32, 512, 8, 2)),
    512: (Tiles(16, 16, 512, 8, 1), Tiles(16, 16, 512, 8, 1)),
}
MAX_HEAD_DIM = 512


def tiles_of(problem: AttentionProblem, *, few_rows: bool) -> Tiles:
    table = _SINGLE if problem.dtype == torch.float32 else _HALF
    widest = max(64, block_of(problem.D), block_of(problem.Dv))
    return table[widest][few_rows]
