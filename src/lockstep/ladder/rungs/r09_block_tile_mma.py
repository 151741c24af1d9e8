"""block_tile_mma: block_tile with both products on warp matrix fragments; constant-time.

What changed from block_tile: Q·Kᵀ and P·V are m16n16k16 fragments. A warp owns 16 rows of the tile
in both products and in the softmax between them, so scores travel through shared memory without a
block barrier, and there is one barrier per key tile: the one that hands over the copies.

The output stays in fragments from the first tile to the last. `parts/mma_rows.py` has the steps of
a tile.

    lockstep trace block_tile_mma --seq 256 --head-dim 64 --causal --length 200
"""

from __future__ import annotations

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
    start_copy,
)
from lockstep.ladder.parts.rows import EMPTY, VECTOR
from lockstep.ladder.rung import Launch, LaunchPlan, PhasePlan, Problem, Rung, Tensors
from lockstep.simt import Constant, Secret, cuda, float32, int32, wmma


@simt.kernel
def block_tile_mma(
    q: Secret,  # [B·H·S, D]
    k: Secret,
    v: Secret,
    out,
    seq: int32,
    length: Secret[int32],  # keys that count
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
    # causal tiles grow towards the end of the sequence: the longest start first
    q_tile_idx = cuda.gridDim.y - 1 - cuda.blockIdx.y
    q_row0 = BLOCK * q_tile_idx
    first = cuda.blockIdx.x * seq  # row of this head's first token
    kv_tiles = (seq + BLOCK - 1) // BLOCK
    limit = length  # keys that this thread's row sees
    if CAUSAL:
        kv_tiles = q_tile_idx + 1
        limit = min(length, q_row0 + row + 1)

    with simt.phase("load q"):
        start_copy(q_tile, 0, q, first, q_row0, seq, D)
        start_copies(k_tile, v_tile, 0, k, v, first, 0, seq, D)
        clear(acc, D)
    m = EMPTY
    l = 0.0

    for kv_tile in range(kv_tiles):
        stage = kv_tile % 2
        kv_row0 = BLOCK * kv_tile
        with simt.phase("load kv"):
            cuda.pipeline_wait_prior(0)
            blank_copied(v_tile, stage, length - kv_row0, D, DTYPE)
            # the copies of all threads are in, and all are done with the other stage
            cuda.syncthreads()
            if kv_tile + 1 < kv_tiles:
                start_copies(k_tile, v_tile, 1 - stage, k, v, first, kv_row0 + BLOCK, seq, D)

        with simt.phase("scores"):
            multiply_keys(s, s_tile, q_tile, k_tile, stage, warp_row, D)
        with simt.phase("softmax"):
            top = new_maximum(s_tile, scores, row, half, limit - kv_row0, m, scale_log2)
            l = sum_weights(s_tile, p_tile, scores, row, half, m, top, l, scale_log2, DTYPE)
            m = top
        with simt.phase("output"):
            correct(acc, s_tile, warp_row, D)
            multiply_values(acc, p_tile, v_tile, stage, warp_row, D)

    with simt.phase("write"):
        write_output(out, acc, s_tile, first, q_row0, seq, warp_row, row, half, l, D, DTYPE)


def launches(problem: Problem, tensors: Tensors) -> list[Launch]:
    """One launch: heads by query tiles."""
    arguments = paired_rows.arguments(problem, tensors)
    return [Launch(block_tile_mma, paired_rows.grid(problem), THREADS, arguments)]


def plans(problem: Problem) -> list[LaunchPlan]:
    """Full tiles, whatever is masked."""
    tiles, D = paired_rows.query_tiles(problem), problem.D
    phases = (
        *paired_rows.copy_phases(problem),
        *mma_rows.tile_phases(problem, tiles),
        PhasePlan("write", BLOCK * D // VECTOR, THREADS),
    )
    visited = paired_rows.tiles_visited(problem) * problem.heads
    return [
        paired_rows.plan(
            problem,
            "block_tile_mma",
            mma_rows.shared_bytes(D),
            phases=phases,
            warp_barriers=mma_rows.warp_barriers(problem),
            mma=mma_rows.products_per_tile(D) * visited,
        )
    ]


RUNG = Rung(
    name="block_tile_mma",
    summary="the same on fragments, the output in them from first to last tile",
    launches=launches,
    plans=plans,
    constant_time=True,
)
