"""The kernels of split_kv on ordinary cores, in closed form: parts, their joining, both in one."""

from __future__ import annotations

from dataclasses import replace

from lockstep.ladder.rung import BYTES, LaunchPlan, PhasePlan, Problem, shared_layout
from lockstep.simt.types import SECTOR

from .kv_splits import D_TILE, P_PAD, PITCH, THREADS
from .tiled import walk


def joiners(block: int, D: int) -> int:
    """Threads of the reduction: one for every four columns of a row, if a block may have so many.
    Few blocks have to keep many loads under way."""
    return min(1024, block * D // 4)


def partial_plan(problem: Problem, block: int, per_block: int, splits: int) -> LaunchPlan:
    """Products on ordinary cores, the head dim tiled: queries are loaded for every key tile."""
    S, D, heads = problem.S, problem.D, problem.heads
    walked = walk(problem, block, block)
    visited = sum(walked.tiles)
    used = sum(-(-tiles // per_block) for tiles in walked.tiles)  # parts of one head
    d_tiles = D // D_TILE
    entry = block * D + 2 * block
    q_rows = [min(block, S - t * block) for t in range(walked.q_tiles)]
    q_loads = sum(rows * tiles for rows, tiles in zip(q_rows, walked.tiles, strict=True))
    loads = (q_loads + 2 * sum(walked.kv_rows)) * D * BYTES * heads
    steps = min(per_block, max(walked.tiles))
    stores = used * entry * 4 * heads
    return LaunchPlan(
        kernel="partial_attention",
        grid=(walked.q_tiles, splits, heads),
        block=THREADS,
        shared_bytes=shared_layout(*[block * PITCH * 4] * 2, block * (block + P_PAD) * 4),
        phases=(
            PhasePlan("scores", block * block, THREADS, D, steps),
            PhasePlan("softmax", block * block, THREADS, 1, steps),
            PhasePlan("output", block * D, THREADS, block, steps),
            PhasePlan("write", block * D // 2, THREADS),
        ),
        iterations=steps,
        barriers=4 * d_tiles * visited * heads,
        load_bytes=loads,
        store_bytes=stores,
        load_sectors=loads // SECTOR,
        # of m and l, a warp writes four rows at a time
        store_sectors=used * (block * D * 4 // SECTOR + 2 * block // 4) * heads,
        workspace=walked.q_tiles * splits * heads * entry,
    )


def in_one_launch(
    partial: LaunchPlan, reduction: LaunchPlan, parts: int, q_tiles: int
) -> LaunchPlan:
    """Both in one: every part is counted by an atomic between two barriers, and the count of every
    query tile set back."""
    (join,) = reduction.phases
    atomics = parts + q_tiles
    assert partial.load_sectors is not None
    assert partial.store_sectors is not None
    assert reduction.load_sectors is not None
    assert reduction.store_sectors is not None
    return replace(
        partial,
        kernel="split_in_one_launch",
        shared_bytes=partial.shared_bytes + shared_layout(4),
        phases=(*partial.phases, replace(join, threads=THREADS)),
        barriers=partial.barriers + 2 * parts,
        load_bytes=partial.load_bytes + reduction.load_bytes,
        store_bytes=partial.store_bytes + reduction.store_bytes + 4 * atomics,
        load_sectors=partial.load_sectors + reduction.load_sectors,
        store_sectors=partial.store_sectors + reduction.store_sectors + atomics,
    )


def join_plan(problem: Problem, block: int, per_block: int) -> LaunchPlan:
    """Every part is read once, the two numbers of a row by all threads that work on it."""
    S, D, heads = problem.S, problem.D, problem.heads
    walked = walk(problem, block, block)
    parts = [-(-tiles // per_block) for tiles in walked.tiles]
    rows = [min(block, S - t * block) for t in range(walked.q_tiles)]
    at_a_time = 128 // D  # rows that a warp works on
    asked, sectors = 0, 0
    for part, row in zip(parts, rows, strict=True):
        asked += part * row * (D // 4) * (16 + 3 * 4)
        sectors += part * (row * D * 4 // SECTOR + 3 * -(-row // at_a_time))
    stores = problem.rows * D * BYTES
    return LaunchPlan(
        kernel="join_parts",
        grid=(walked.q_tiles, heads),
        block=joiners(block, D),
        shared_bytes=0,
        phases=(PhasePlan("join", block * D // 4, joiners(block, D), max(parts)),),
        iterations=0,  # it walks over parts, not over tiles of keys
        barriers=0,
        load_bytes=asked * heads,
        store_bytes=stores,
        load_sectors=sectors * heads,
        store_sectors=stores // SECTOR,
    )
