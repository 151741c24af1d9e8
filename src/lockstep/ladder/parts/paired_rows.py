"""The common part of the block_tile rungs: copies, the sum of a row, the plan.

A block of 128 threads works on a tile of 64 queries by 64 keys. Warp w owns rows 16w to 16w + 15,
lanes 2r and 2r + 1 of it own row r: what they exchange stays inside the warp.
"""

from __future__ import annotations

from typing import Any

from lockstep import simt
from lockstep.ladder.rung import (
    BYTES,
    LaunchPlan,
    PhasePlan,
    Problem,
    Tensors,
    usual_arguments,
)
from lockstep.simt import Constant, ct, cuda
from lockstep.simt.types import SECTOR

from .rows import FULL, VECTOR

BLOCK = 64  # queries, and keys, of a tile
THREADS = 128
PAD = 8  # elements after each row of a tile: rows then start in different banks
PITCH = BLOCK + PAD
SHARE = 2  # threads of a row
OWN = BLOCK // SHARE  # keys of a row that one thread takes


@simt.device
def start_copy(tile, stage, source, first, row0, seq, D: Constant):
    """Start copying rows row0 to row0 + 63 of a head; past its end, the last row once more."""
    for i in range(D * BLOCK // VECTOR // THREADS):
        chunk = i * THREADS + cuda.threadIdx.x
        row = chunk // (D // VECTOR)
        col = chunk % (D // VECTOR) * VECTOR
        source_row = first + min(row0 + row, seq - 1)
        cuda.memcpy_async(tile, (stage, row, col), source, (source_row, col), VECTOR)


@simt.device
def start_copies(k_tile, v_tile, stage, k, v, first, row0, seq, D: Constant):
    """Start copying the keys and values of a tile, as one step of the pipeline."""
    start_copy(k_tile, stage, k, first, row0, seq, D)
    start_copy(v_tile, stage, v, first, row0, seq, D)
    cuda.pipeline_commit()


@simt.device
def copy(tile, stage, source, first, row0, seq, D: Constant):
    """The same rows by ordinary loads and stores; they are in after the next barrier."""
    for i in range(D * BLOCK // VECTOR // THREADS):
        chunk = i * THREADS + cuda.threadIdx.x
        row = chunk // (D // VECTOR)
        col = chunk % (D // VECTOR) * VECTOR
        source_row = first + min(row0 + row, seq - 1)
        cuda.vstore(tile, (stage, row, col), cuda.vload(source, (source_row, col), VECTOR))


@simt.device
def blank_copied(tile, stage, present, D: Constant, DTYPE: Constant):
    """Set rows from `present` on to zero, in what this thread itself copied.

    A weight of zero times a NaN is a NaN: what lies beyond the length must not stay in V.
    """
    zero = DTYPE(0.0)
    nothing = cuda.vec(zero, zero, zero, zero, zero, zero, zero, zero)
    for i in range(D * BLOCK // VECTOR // THREADS):
        chunk = i * THREADS + cuda.threadIdx.x
        row = chunk // (D // VECTOR)
        col = chunk % (D // VECTOR) * VECTOR
        copied = cuda.vload(tile, (stage, row, col), VECTOR)
        cuda.vstore(tile, (stage, row, col), ct.select(row < present, copied, nothing))


@simt.device
def inverse_sum(l):
    """1 / (sum over the two threads of a row), or 0 for a row that saw no key.

    Division has a slow path that depends on its operands; rsqrt squared has none.
    """
    total = l + cuda.shfl_xor_sync(FULL, l, 1)
    root = cuda.rsqrt(total)
    return ct.select(total == 0.0, 0.0, root * root)


def arguments(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """Arguments of both kernels, by name."""
    return {**usual_arguments(problem, tensors), "length": problem.keys}


def query_tiles(problem: Problem) -> int:
    """Query tiles of a head, and as many key tiles."""
    return -(-problem.S // BLOCK)


def grid(problem: Problem) -> tuple[int, int]:
    """Heads by query tiles. Heads vary fastest: with a causal mask the longest tiles of all heads
    start first, the shortest fill the gaps at the end."""
    return problem.heads, query_tiles(problem)


def tiles_visited(problem: Problem) -> int:
    """Pairs of query tile and key tile, of one head: public, whatever the length."""
    tiles = query_tiles(problem)
    return tiles * (tiles + 1) // 2 if problem.causal else tiles * tiles


def rows_moved(problem: Problem, last_tiles: int, full_tiles: int) -> int:
    """Rows that the copies of these tiles move. A warp copies a few rows at a time; past the end
    it asks for the last one again, which costs no more than one row."""
    tail = problem.S - BLOCK * (query_tiles(problem) - 1)  # rows of the last tile, 1 to 64
    at_a_time = 32 * VECTOR // problem.D
    last = tail + BLOCK // at_a_time - -(-tail // at_a_time)
    return BLOCK * full_tiles + last * last_tiles


def plan(problem: Problem, kernel: str, shared_bytes: int, **facts: Any) -> LaunchPlan:
    """A plan with what both kernels share: a block per query tile, every key tile copied once."""
    tiles, heads = query_tiles(problem), problem.heads
    visited = tiles_visited(problem)
    last = 2 * (1 if problem.causal else tiles) + 1  # K and V by blocks that reach it, and Q
    all_tiles = 2 * visited + tiles
    row_bytes = problem.D * BYTES
    return LaunchPlan(
        kernel=kernel,
        grid=grid(problem),
        block=THREADS,
        shared_bytes=shared_bytes,
        iterations=tiles,
        barriers=visited * heads,
        load_bytes=all_tiles * BLOCK * row_bytes * heads,
        store_bytes=problem.rows * row_bytes,
        load_sectors=rows_moved(problem, last, all_tiles - last) * row_bytes // SECTOR * heads,
        store_sectors=problem.rows * row_bytes // SECTOR,
        **facts,
    )


def copy_phases(problem: Problem) -> tuple[PhasePlan, PhasePlan]:
    """The two phases that start copies, 16 bytes each."""
    chunks = BLOCK * problem.D // VECTOR
    return (
        PhasePlan("load q", 3 * chunks, THREADS),
        PhasePlan("load kv", 2 * chunks, THREADS, 1, query_tiles(problem)),
    )


def softmax_phase(visits: int) -> PhasePlan:
    """Two threads per row, half of its keys each, by a block that takes `visits` key tiles."""
    return PhasePlan("softmax", 2 * BLOCK, THREADS, OWN, visits)
