"""large_tile: a block shares a tile of 120 queries by 120 keys, all of it in shared memory.

What changed from row_per_thread: the work of a row is spread over a block. The 64 threads take
turns at the 14,400 scores of a tile; one of them does the softmax; then each takes a column of the
output. Scores, weights and output live in shared memory: 151 KB at D 32, so that a multiprocessor
holds one block, two warps of the 64 it could. At D 128 the weights overwrite the scores, or it
would be 263 KB, more than any block may have.

    lockstep trace large_tile --seq 240 --head-dim 32
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.parts.rows import VECTOR, stage_rows
from lockstep.ladder.parts.tiled import (
    add_values_by_column,
    score_elements,
    softmax_by_one_thread,
    start_rows,
    tiled_plan,
    walk,
    write_rows,
)
from lockstep.ladder.rung import (
    BYTES,
    Launch,
    LaunchPlan,
    PhasePlan,
    Problem,
    Rung,
    Tensors,
    shared_layout,
    usual_arguments,
)
from lockstep.simt import Constant, cuda, float32, int32

BLOCK_Q, BLOCK_KV, THREADS = 120, 120, 64
IN_PLACE_FROM = 128  # head dim from which weights overwrite scores


@simt.kernel
def large_tile(
    q,  # [B·H·S, D]
    k,
    v,
    out,
    seq: int32,
    scale_log2: float32,
    D: Constant,
    CAUSAL: Constant,
    DTYPE: Constant,
):
    q_tile = cuda.shared.array((BLOCK_Q, D), DTYPE)
    k_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    v_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    scores = cuda.shared.array((BLOCK_Q, BLOCK_KV), float32)
    if D < IN_PLACE_FROM:
        weights = cuda.shared.array((BLOCK_Q, BLOCK_KV), float32)
    acc = cuda.shared.array((BLOCK_Q, D), float32)
    m = cuda.shared.array(BLOCK_Q, float32)
    l = cuda.shared.array(BLOCK_Q, float32)

    first_q = cuda.blockIdx.x * BLOCK_Q
    first = cuda.blockIdx.y * seq  # row of this head's first token
    rows = min(BLOCK_Q, seq - first_q)
    end = seq  # of the keys that some row of this block sees
    if CAUSAL:
        end = min(seq, first_q + BLOCK_Q)

    with simt.phase("load q"):
        stage_rows(q_tile, q, first + first_q, seq - first_q, BLOCK_Q, D, THREADS, DTYPE)
        start_rows(acc, m, l, BLOCK_Q, D, THREADS)

    for first_kv in range(0, end, BLOCK_KV):
        cols = min(BLOCK_KV, seq - first_kv)
        # the previous tile is still being read
        cuda.syncthreads()
        with simt.phase("load kv"):
            stage_rows(k_tile, k, first + first_kv, seq - first_kv, BLOCK_KV, D, THREADS, DTYPE)
            stage_rows(v_tile, v, first + first_kv, seq - first_kv, BLOCK_KV, D, THREADS, DTYPE)
            cuda.syncthreads()
        with simt.phase("scores"):
            score_elements(
                scores,
                q_tile,
                k_tile,
                first_q,
                first_kv,
                seq,
                scale_log2,
                BLOCK_Q,
                BLOCK_KV,
                D,
                THREADS,
                CAUSAL,
            )
            cuda.syncthreads()
        with simt.phase("softmax"):
            if D < IN_PLACE_FROM:
                softmax_by_one_thread(scores, weights, acc, m, l, rows, cols, D)
            else:
                softmax_by_one_thread(scores, scores, acc, m, l, rows, cols, D)
            cuda.syncthreads()
        with simt.phase("output"):
            if D < IN_PLACE_FROM:
                add_values_by_column(acc, weights, v_tile, rows, cols, D, THREADS)
            else:
                add_values_by_column(acc, scores, v_tile, rows, cols, D, THREADS)

    cuda.syncthreads()
    with simt.phase("write"):
        write_rows(out, acc, l, first + first_q, seq - first_q, BLOCK_Q, D, THREADS, DTYPE)


def launches(problem: Problem, tensors: Tensors) -> list[Launch]:
    """One launch: a block per query tile and head."""
    arguments = usual_arguments(problem, tensors)
    return [Launch(large_tile, (-(-problem.S // BLOCK_Q), problem.heads), THREADS, arguments)]


def shared_bytes(D: int) -> int:
    """Q, K and V; scores and, below D 128, weights; acc; m and l."""
    operands = [rows * D * BYTES for rows in (BLOCK_Q, BLOCK_KV, BLOCK_KV)]
    tiles = [BLOCK_Q * BLOCK_KV] * (2 if D < IN_PLACE_FROM else 1)
    return shared_layout(*operands, *(4 * n for n in (*tiles, BLOCK_Q * D, BLOCK_Q, BLOCK_Q)))


def plans(problem: Problem) -> list[LaunchPlan]:
    """Phases of a full tile: one thread of 64 at the softmax, D of them at the output."""
    D = problem.D
    walked = walk(problem, BLOCK_Q, BLOCK_KV)
    tiles = max(walked.tiles)
    phases = (
        PhasePlan("load q", BLOCK_Q * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * BLOCK_KV * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", BLOCK_Q // 3 * BLOCK_KV, THREADS, 3 * D, tiles),
        PhasePlan("softmax", 1, THREADS, BLOCK_Q * (2 * BLOCK_KV + D), tiles),
        PhasePlan("output", D, THREADS, BLOCK_Q * BLOCK_KV, tiles),
        PhasePlan("write", BLOCK_Q * D // 4, THREADS),
    )
    grid = (walked.q_tiles, problem.heads)
    return [
        tiled_plan(problem, "large_tile", grid, THREADS, walked, shared_bytes(D), phases, 4),
    ]


RUNG = Rung(
    name="large_tile",
    summary="a block of 64 threads per 120×120 tile; everything in shared memory",
    launches=launches,
    plans=plans,
)
