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
# Programs that are worth having for each multiprocessor before spans are put into longer runs.
RUNS_PER_MULTIPROCESSOR = 8


# The largest workspace that is worth keeping all multiprocessors busy.
MAX_PARTS_BYTES = 1 << 29


@dataclass(frozen=True)
class Plan:
    """How one problem is cut into programs."""

    tiles: Tiles
    n_slots: int  # tiles of query rows per KV head: of one sequence, or of all packed ones
    n_programs: int  # over all KV heads and sequences
    n_spans: int
    run_spans: int  # spans of one program
    n_runs: int  # programs side by side over the spans of one tile of rows; 1: nothing is split


def tiles_of(problem: AttentionProblem, *, few_rows: bool) -> Tiles:
    table = _SINGLE if problem.dtype == torch.float32 else _HALF
    widest = max(64, block_of(problem.D), block_of(problem.Dv))
    return table[widest][few_rows]


def plan_of(problem: AttentionProblem, multiprocessors: int) -> Plan:
    """Large tiles where there is work for everybody, small ones and runs of spans elsewhere."""
    tiles = tiles_of(problem, few_rows=False)
    n_slots = _slots(problem, tiles)
    heads = problem.Hkv * (1 if problem.layout == "varlen" else problem.B)
    rows = problem.Sq * (problem.Hq // problem.Hkv)
    if n_slots * heads < multiprocessors or rows <= tiles.BLOCK_Q // 2:
        tiles = tiles_of(problem, few_rows=True)
        n_slots = _slots(problem, tiles)
    n_programs = n_slots * heads
    n_spans = max(1, -(-problem.Skv // tiles.SPAN))
    part_bytes = 4 * problem.Dv * n_spans
    for size in problem.lse_shape:
        part_bytes *= size
    n_runs = 1
    if n_programs < multiprocessors and part_bytes <= MAX_PARTS_BYTES:
        n_runs = min(n_spans, -(-RUNS_PER_MULTIPROCESSOR * multiprocessors // n_programs))
    run_spans = -(-n_spans // n_runs)
    return Plan(tiles, n_slots, n_programs, n_spans, run_spans, -(-n_spans // run_spans))


def _slots(problem: AttentionProblem, tiles: Tiles) -> int:
    rows = problem.Sq * (problem.Hq // problem.Hkv)
    if problem.layout == "varlen":
        # As `tiles.find_sequence` hands them out.
        return rows // tiles.BLOCK_Q + problem.B
    return -(-rows // tiles.BLOCK_Q)
