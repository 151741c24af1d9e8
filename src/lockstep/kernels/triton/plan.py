"""How a problem is cut into programs: tile sizes, spans, runs of spans.

What decides the bits of a row are `Tiles.BLOCK_KV`, `Tiles.SPAN` and how the warps share a row's
scores: functions of the head dims, the dtype and the kind of GPU. All the rest, which follows the
batch and the number of multiprocessors, decides only who computes what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lockstep.problem import AttentionProblem

MAX_HEAD_DIM = 512
# Keys between two folds. One span of one KV head is the least that a program of split-KV can do.
SPAN = 512
# Programs that are worth having for each multiprocessor before spans are put into longer runs.
PROGRAMS_PER_MULTIPROCESSOR = 4
# The largest workspace that is worth keeping all multiprocessors busy.
MAX_PARTS_BYTES = 1 << 29


@dataclass(frozen=True)
class Device:
    """What a plan has to know of the device."""

    multiprocessors: int
    shared_bytes: int
    tma: bool
    tensor_memory: bool = False  # from sm_100 on, large products accumulate there


INTERPRETER = Device(multiprocessors=1, shared_bytes=1 << 20, tma=True)


@dataclass(frozen=True)
class Tiles:
    """One way to cut the work of one KV head.

    As long as each warp has whole rows of scores, as with 16 rows per warp, a row's sums are the
    same in tiles of any BLOCK_Q.
    """

    BLOCK_Q: int
    BLOCK_KV: int
    num_warps: int
    num_stages: int
    SPAN: int = SPAN


@dataclass(frozen=True)
class Plan:
    """How one problem is cut into programs."""

    tiles: Tiles
    n_slots: int  # tiles of query rows per KV head: of one sequence, or of all packed ones
    n_programs: int  # over all KV heads and sequences
    n_spans: int
    run_spans: int  # spans of one program
    n_runs: int  # programs side by side over the spans of one tile of rows; 1: nothing is split
    tma: bool


def block_of(head_dim: int) -> int:
    """The power of two that a head dim is padded to inside tiles."""
    return max(16, 1 << (head_dim - 1).bit_length())


# By the larger of the padded head dims: for many rows, and for a few that are split.
_HALF = {
    64: (Tiles(64, 128, 4, 3), Tiles(16, 128, 1, 3)),
    128: (Tiles(64, 64, 4, 3), Tiles(16, 64, 1, 3)),
    256: (Tiles(64, 32, 8, 3), Tiles(64, 32, 8, 3)),
    512: (Tiles(32, 16, 8, 2), Tiles(32, 16, 8, 2)),
}
# Without TMA, addresses take registers: smaller tiles, or more warps.
_HALF_BY_POINTERS = {
    64: (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3)),
    128: (Tiles(64, 64, 8, 3), Tiles(64, 64, 8, 3)),
    256: (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
    512: (Tiles(32, 16, 8, 2), Tiles(32, 16, 8, 2)),
}
_SINGLE = {
    64: (Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    128: (Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 2)),
    256: (Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 2)),
    512: (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}


def tiles_of(problem: AttentionProblem, device: Device) -> tuple[Tiles, Tiles]:
    """The tiles for many query rows, and those for a few that are split over many programs."""
    half = _HALF if device.tma else _HALF_BY_POINTERS
    table = _SINGLE if problem.dtype == torch.float32 else half
    many, few = table[max(64, block_of(problem.D), block_of(problem.Dv))]
    # What comes out of tensor memory is laid out, and so summed, in another way.
    return many, many if device.tensor_memory else few


def stages_of(problem: AttentionProblem, tiles: Tiles, shared_bytes: int) -> int:
    """How many tiles of keys and values can be under way at once."""
    width = problem.dtype.itemsize * (block_of(problem.D) + block_of(problem.Dv))
    stage = tiles.BLOCK_KV * width
    if problem.bias_shape is not None:
        stage += 4 * tiles.BLOCK_Q * tiles.BLOCK_KV
    free = shared_bytes - tiles.BLOCK_Q * width
    return max(1, min(tiles.num_stages, free // stage))


def plan_of(problem: AttentionProblem, device: Device) -> Plan:
    """Whole sequences where that keeps every multiprocessor busy, runs of spans elsewhere."""
    tiles, few = tiles_of(problem, device)
    n_slots, n_programs = _count(problem, tiles)
    n_spans = max(1, -(-problem.Skv // tiles.SPAN))
    part_bytes = 4 * problem.Dv * n_spans * math.prod(problem.lse_shape)
    n_runs = 1
    if n_programs < 2 * device.multiprocessors and part_bytes <= MAX_PARTS_BYTES:
        wanted = PROGRAMS_PER_MULTIPROCESSOR * device.multiprocessors
        n_runs = min(n_spans, -(-wanted // n_programs))
    run_spans = -(-n_spans // n_runs)
    n_runs = -(-n_spans // run_spans)
    if n_runs > 1 and problem.Sq * (problem.Hq // problem.Hkv) <= few.BLOCK_Q:
        tiles = few
        n_slots, n_programs = _count(problem, tiles)
    return Plan(tiles, n_slots, n_programs, n_spans, run_spans, n_runs, device.tma)


def _count(problem: AttentionProblem, tiles: Tiles) -> tuple[int, int]:
    """`n_slots` and `n_programs` of a plan."""
    rows = problem.Sq * (problem.Hq // problem.Hkv)
    if problem.layout == "varlen":
        # As `tiles.find_sequence` hands them out.
        n_slots = rows // tiles.BLOCK_Q + problem.B
        return n_slots, n_slots * problem.Hkv
    n_slots = -(-rows // tiles.BLOCK_Q)
    return n_slots, n_slots * problem.Hkv * problem.B
