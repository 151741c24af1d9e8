"""split_kv with both products on matrix fragments: the partial kernel by `--products mma`.

A block is one of block_tile_mma's: 128 threads, a tile of 64 queries by 64 keys, each warp on 16
rows of its own, the next keys on their way by asynchronous copies. It walks over the keys of its
split alone and writes its fragments as they are: float32, not yet over their sum.

    lockstep trace split_kv --products mma --kv-tiles 2 --seq 512 --head-dim 64
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
)
from lockstep.ladder.parts.paired_rows import (
    BLOCK,
    OWN,
    PAD,
    PITCH,
    THREADS,
    start_copies,
    start_copy,
)
from lockstep.ladder.parts.rows import EMPTY, FULL, VECTOR
from lockstep.ladder.parts.tiled import walk
from lockstep.ladder.rung import BYTES, LaunchPlan, PhasePlan, Problem
from lockstep.simt import Constant, cuda, float32, int32, wmma
from lockstep.simt.types import SECTOR


@simt.kernel
def partial_attention_mma(
    q,  # [B·H·S, D]
    k,
    v,
    part_o: float32[:, :],  # [entries · BLOCK, D]: unnormalised outputs
    part_m: float32[:],  # [entries · BLOCK]
    part_l: float32[:],
    seq: int32,
    kv_tiles: int32,  # that a block attends to
    scale_log2: float32,
    D: Constant,
    GROUP: Constant,  # heads of queries that share a head of keys
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
    first_q = cuda.blockIdx.x * BLOCK
    first = cuda.blockIdx.z * seq  # row of this head's first token
    first_key = first
    if GROUP > 1:
        first_key = cuda.blockIdx.z // GROUP * seq
    # the ends of the keys that some row of this block sees, and this thread's row
    end = min(seq, first_q + BLOCK) if CAUSAL else seq
    limit = min(seq, first_q + row + 1) if CAUSAL else seq
    begin = cuda.blockIdx.y * kv_tiles * BLOCK
    if begin >= end:
        return
    end = min(end, begin + kv_tiles * BLOCK)

    with simt.phase("load q"):
        start_copy(q_tile, 0, q, first, first_q, seq, D)
        start_copies(k_tile, v_tile, 0, k, v, first_key, begin, seq, D)
        clear(acc, D)
    m = EMPTY
    l = 0.0

    for first_kv in range(begin, end, BLOCK):
        stage = (first_kv - begin) // BLOCK % 2
        with simt.phase("load kv"):
            cuda.pipeline_wait_prior(0)
            # the copies of all threads are in, and all are done with the other stage
            cuda.syncthreads()
            if first_kv + BLOCK < end:
                start_copies(
                    k_tile, v_tile, 1 - stage, k, v, first_key, first_kv + BLOCK, seq, D
                )  # fmt: skip

        with simt.phase("scores"):
            multiply_keys(s, s_tile, q_tile, k_tile, stage, warp_row, D)
        with simt.phase("softmax"):
            top = new_maximum(s_tile, scores, row, half, limit - first_kv, m, scale_log2)
            l = sum_weights(s_tile, p_tile, scores, row, half, m, top, l, scale_log2, DTYPE)
            m = top
        with simt.phase("output"):
            correct(acc, s_tile, warp_row, D)
            multiply_values(acc, p_tile, v_tile, stage, warp_row, D)

    with simt.phase("write"):
        tile = cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x
        entry = (tile * cuda.gridDim.y + cuda.blockIdx.y) * BLOCK
        for n in range(D // 16):
            wmma.store(part_o, (entry + warp_row, 16 * n), acc[n], ld=D)
        l += cuda.shfl_xor_sync(FULL, l, 1)
        if half == 0:
            part_m[entry + row] = m
            part_l[entry + row] = l


def partial_plan(problem: Problem, per_block: int, splits: int) -> LaunchPlan:
    """Full tiles; of the blocks of a query tile, those that have keys load its queries."""
    D, heads = problem.D, problem.heads
    walked = walk(problem, BLOCK, BLOCK)
    parts = [-(-tiles // per_block) for tiles in walked.tiles]
    visited, used = sum(walked.tiles), sum(parts)
    steps = min(per_block, max(walked.tiles))
    copies = 2 * visited + used  # of tiles
    # those of the last tile of K and V, by blocks that reach it, and of Q
    last = 2 * (1 if problem.causal else walked.q_tiles) + parts[-1]
    moved = paired_rows.rows_moved(problem, last, copies - last) * D * BYTES
    chunks = BLOCK * D // VECTOR
    stores = used * (BLOCK * D + 2 * BLOCK) * 4 * heads
    return LaunchPlan(
        kernel="partial_attention_mma",
        grid=(walked.q_tiles, splits, heads),
        block=THREADS,
        shared_bytes=mma_rows.shared_bytes(D),
        phases=(
            PhasePlan("load q", 3 * chunks, THREADS),
            PhasePlan("load kv", 2 * chunks, THREADS, 1, steps),
            *mma_rows.tile_phases(problem, steps),
            PhasePlan("write", 2 * chunks, THREADS),
        ),
        iterations=steps,
        barriers=visited * heads,
        warp_barriers=THREADS // 32 * 2 * visited * heads,
        load_bytes=copies * BLOCK * D * BYTES * heads,
        store_bytes=stores,
        load_sectors=moved // SECTOR * heads,
        store_sectors=stores // SECTOR,
        mma=mma_rows.products_per_tile(D) * visited * heads,
        workspace=walked.q_tiles * splits * heads * (BLOCK * D + 2 * BLOCK),
    )
