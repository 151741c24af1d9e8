"""persistent_mma: block_tile_mma by persistent blocks; constant-time.

What changed from block_tile_mma: the grid. There are as many blocks as a GPU holds at once, and
each takes one query tile after the other. The copies never stop in between: after the last key
tile of one query tile, the first keys, values and queries of the next are on their way, so that
only the first tile of a block waits for memory. A warp reads its own 16 rows of Q alone, and starts
copying the next ones as soon as it has multiplied the last.

Tiles are dealt out in rounds, the longest first, and every other round backwards: with a causal
mask, which makes tiles of many lengths, a block that had the longest of one round has the shortest
of the next. Which block takes which tile follows from public sizes alone.

This is as far as the language goes on the way to a Hopper kernel. What it does not have: copies of
whole tiles by one thread (TMA), which need no registers and no address arithmetic; products of four
warps at once from shared memory (wgmma), which run while other instructions do; and barriers that
some warps arrive at and others wait for, by which warps that copy and warps that multiply work
apart. `lockstep.attention` has all three.

    lockstep trace persistent_mma:programs=4 --seq 256 --head-dim 64 --causal --length 200
"""

from __future__ import annotations

from dataclasses import replace

from lockstep import simt
from lockstep.ladder.parts import mma_rows, paired_rows
from lockstep.ladder.parts.mma_rows import (
    clear,
    correct,
    multiply_keys,
    multiply_values,
    new_maximum,
    sum_weights,
    write_output,
)
from lockstep.ladder.parts.paired_rows import (
    BLOCK,
    OWN,
    PAD,
    PITCH,
    THREADS,
    blank_copied,
    start_copies,
)
from lockstep.ladder.parts.rows import EMPTY, VECTOR
from lockstep.ladder.rung import Launch, LaunchPlan, PhasePlan, Problem, Rung, Tensors
from lockstep.simt import Constant, Secret, cuda, float32, int32, wmma

PROGRAMS = (264, 132, 396, 528, 4)  # blocks: one to four for each multiprocessor of an H200; or few


@simt.device
def copy_own_rows(q_tile, q, first, q_row0, seq, warp_row, D: Constant):
    """Start copying the warp's 16 rows of Q; past the end of the head, the last row once more."""
    lane = cuda.threadIdx.x % 32
    for i in range(16 * D // VECTOR // 32):
        chunk = i * 32 + lane
        row = warp_row + chunk // (D // VECTOR)
        col = chunk % (D // VECTOR) * VECTOR
        source_row = first + min(q_row0 + row, seq - 1)
        cuda.memcpy_async(q_tile, (0, row, col), q, (source_row, col), VECTOR)


@simt.device
def item_of(turn):
    """The query tile, of those of all heads, that this block takes in a round."""
    place = cuda.blockIdx.x
    if turn % 2 == 1:
        place = cuda.gridDim.x - 1 - cuda.blockIdx.x
    return turn * cuda.gridDim.x + place


@simt.kernel
def persistent_mma(
    q: Secret,  # [B·H·S, D]
    k: Secret,
    v: Secret,
    out,
    seq: int32,
    length: Secret[int32],  # keys that count
    heads: int32,  # of all sequences
    scale_log2: float32,
    D: Constant,
    CAUSAL: Constant,
    DTYPE: Constant,
):
    q_tile = cuda.shared.array((1, BLOCK, D + PAD), DTYPE)
    k_tile = cuda.shared.array((2, BLOCK, D + PAD), DTYPE)
    v_tile = cuda.shared.array((2, BLOCK, D + PAD), DTYPE)
    s_tile = cuda.shared.array((BLOCK, PITCH), float32)
    p_tile = cuda.shared.array((BLOCK, PITCH), DTYPE)
    acc = cuda.local.array(D // 16, wmma.accumulator)  # [16, D] fp32 per warp
    s = cuda.local.array(BLOCK // 16, wmma.accumulator)  # [16, BLOCK] fp32 per warp
    scores = cuda.local.array(OWN, float32)

    tid = cuda.threadIdx.x
    row = tid // 2
    half = tid % 2
    warp_row = 16 * (tid // 32)
    q_tiles = (seq + BLOCK - 1) // BLOCK
    items = q_tiles * heads
    stage = 0

    with simt.phase("first loads"):
        item = item_of(0)
        first = item % heads * seq  # row of the head's first token
        copy_own_rows(q_tile, q, first, BLOCK * (q_tiles - 1 - item // heads), seq, warp_row, D)
        start_copies(k_tile, v_tile, 0, k, v, first, 0, seq, D)

    for turn in range((items + cuda.gridDim.x - 1) // cuda.gridDim.x):
        item = item_of(turn)
        # the last round may have fewer tiles than there are blocks
        if item < items:
            following = item_of(turn + 1)
            next_first = following % heads * seq
            # causal tiles grow towards the end of the sequence: the longest come first
            q_tile_idx = q_tiles - 1 - item // heads
            q_row0 = BLOCK * q_tile_idx
            first = item % heads * seq
            kv_tiles = q_tile_idx + 1 if CAUSAL else q_tiles
            # keys that this thread's row sees
            limit = min(length, q_row0 + row + 1) if CAUSAL else length
            clear(acc, D)
            m = EMPTY
            l = 0.0
            for kv_tile in range(kv_tiles):
                kv_row0 = BLOCK * kv_tile
                with simt.phase("load kv"):
                    cuda.pipeline_wait_prior(0)
                    blank_copied(v_tile, stage, length - kv_row0, D, DTYPE)
                    # the copies of all threads are in, and all are done with the other stage
                    cuda.syncthreads()
                    last = kv_tile + 1 == kv_tiles
                    if not last or following < items:
                        source = next_first if last else first
                        row0 = 0 if last else kv_row0 + BLOCK
                        start_copies(k_tile, v_tile, 1 - stage, k, v, source, row0, seq, D)
                with simt.phase("scores"):
                    multiply_keys(s, s_tile, q_tile, k_tile, stage, warp_row, D)
                    if last and following < items:
                        next_row0 = BLOCK * (q_tiles - 1 - following // heads)
                        copy_own_rows(q_tile, q, next_first, next_row0, seq, warp_row, D)
                        cuda.pipeline_commit()
                with simt.phase("softmax"):
                    top = new_maximum(s_tile, scores, row, half, limit - kv_row0, m, scale_log2)
                    l = sum_weights(s_tile, p_tile, scores, row, half, m, top, l, scale_log2, DTYPE)
                    m = top
                with simt.phase("output"):
                    correct(acc, s_tile, warp_row, D)
                    multiply_values(acc, p_tile, v_tile, stage, warp_row, D)
                stage = 1 - stage
            with simt.phase("write"):
                write_output(out, acc, s_tile, first, q_row0, seq, warp_row, row, half, l, D, DTYPE)


def _tiles_of(problem: Problem, programs: int) -> list[list[int]]:
    """The key tiles of each query tile that a block takes, by block."""
    tiles, heads = paired_rows.query_tiles(problem), problem.heads
    lengths = [tiles - item // heads if problem.causal else tiles for item in range(tiles * heads)]
    taken: list[list[int]] = [[] for _ in range(programs)]
    for start in range(0, len(lengths), programs):
        backwards = start // programs % 2 == 1
        for place, length in enumerate(lengths[start : start + programs]):
            taken[programs - 1 - place if backwards else place].append(length)
    return taken


def _blocks(problem: Problem, programs: int) -> int:
    """No more blocks than there are query tiles."""
    return min(programs, paired_rows.query_tiles(problem) * problem.heads)


def launches(problem: Problem, tensors: Tensors, programs: int) -> list[Launch]:
    """One launch of as many blocks as are to stay."""
    arguments = paired_rows.arguments(problem, tensors) | {"heads": problem.heads}
    return [Launch(persistent_mma, (_blocks(problem, programs),), THREADS, arguments)]


def plans(problem: Problem, programs: int) -> list[LaunchPlan]:
    """Full tiles, whatever is masked; what is moved is what block_tile_mma moves."""
    D, blocks = problem.D, _blocks(problem, programs)
    taken = _tiles_of(problem, blocks)
    visits = max(sum(lengths) for lengths in taken)
    chunks = BLOCK * D // VECTOR
    phases = (
        PhasePlan("first loads", 3 * chunks, THREADS),
        PhasePlan("load kv", 2 * chunks, THREADS, 1, visits),
        *mma_rows.tile_phases(problem, visits),
        PhasePlan("write", chunks, THREADS, 1, max(map(len, taken))),
    )
    visited = paired_rows.tiles_visited(problem) * problem.heads
    plan = paired_rows.plan(
        problem,
        "persistent_mma",
        mma_rows.shared_bytes(D),
        phases=phases,
        warp_barriers=mma_rows.warp_barriers(problem),
        mma=mma_rows.products_per_tile(D) * visited,
    )
    return [replace(plan, grid=(blocks,), iterations=visits)]


RUNG = Rung(
    name="persistent_mma",
    summary="persistent blocks that take tile after tile, while copies go on",
    launches=launches,
    plans=plans,
    constant_time=True,
    across_heads=True,
    options={"programs": PROGRAMS},
)
