"""small_tile: tiles of 45 queries by 90 keys, 256 threads, and two ways to do the softmax.

What changed from large_tile: a third of the shared memory (52 KB at D 32) lets several blocks live
on a multiprocessor, and 256 threads share the scores. The grid has three dimensions: query tiles,
heads, batch.

    softmax="sequential"  thread 0 does the softmax of the tile, as before
    softmax="tree"        two rows at a time: a thread per score, warp shuffles, then over the warps

The tree must end in *every* warp: all of them need the maximum. Here each warp reduces the warps'
results for itself, out of scratch memory that is nobody else's.

    lockstep trace small_tile --softmax sequential --seq 256 --head-dim 32
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.parts.rows import EMPTY, VECTOR, rows_max, rows_sum, stage_rows
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

BLOCK_Q, BLOCK_KV, THREADS = 45, 90, 256
WARPS = THREADS // 32
WARPS_PER_ROW = 4  # at the tree softmax
ROWS_AT_ONCE = WARPS // WARPS_PER_ROW
SOFTMAX = ("tree", "sequential")


@simt.device
def softmax_by_tree(scores, weights, acc, m, l, maxima, sums, D: Constant):
    """The online softmax, two rows at a time: a thread per score, shuffles in the warps, then one
    step over the four warps of the row. `maxima` and `sums` [WARPS] take turns, so that one
    barrier each will do."""
    place = cuda.threadIdx.x % (32 * WARPS_PER_ROW)
    for first_row in range(0, BLOCK_Q, ROWS_AT_ONCE):
        row = first_row + cuda.threadIdx.x // (32 * WARPS_PER_ROW)
        before = EMPTY
        top = EMPTY
        if row < BLOCK_Q:
            before = m[row]
            for col in range(place, BLOCK_KV, 32 * WARPS_PER_ROW):
                top = max(top, scores[row, col])
        top = max(before, rows_max(top, maxima, WARPS_PER_ROW))
        part = 0.0
        if row < BLOCK_Q:
            for col in range(place, BLOCK_KV, 32 * WARPS_PER_ROW):
                p = cuda.exp2(scores[row, col] - top)
                weights[row, col] = p
                part += p
        part = rows_sum(part, sums, WARPS_PER_ROW)
        if row < BLOCK_Q:
            correction = cuda.exp2(before - top)
            for d in range(place, D, 32 * WARPS_PER_ROW):
                acc[row, d] *= correction
            if place == 0:
                l[row] = l[row] * correction + part
                m[row] = top


@simt.kernel
def small_tile(
    q,  # [B·H·S, D]
    k,
    v,
    out,
    seq: int32,
    scale_log2: float32,
    D: Constant,
    CAUSAL: Constant,
    SOFTMAX: Constant,
    DTYPE: Constant,
):
    q_tile = cuda.shared.array((BLOCK_Q, D), DTYPE)
    k_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    v_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    scores = cuda.shared.array((BLOCK_Q, BLOCK_KV), float32)
    weights = cuda.shared.array((BLOCK_Q, BLOCK_KV), float32)
    acc = cuda.shared.array((BLOCK_Q, D), float32)
    m = cuda.shared.array(BLOCK_Q, float32)
    l = cuda.shared.array(BLOCK_Q, float32)
    if SOFTMAX == "tree":
        maxima = cuda.shared.array(WARPS, float32)
        sums = cuda.shared.array(WARPS, float32)

    first_q = cuda.blockIdx.x * BLOCK_Q
    # row of this head's first token
    first = (cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * seq
    end = seq  # of the keys that some row of this block sees
    if CAUSAL:
        end = min(seq, first_q + BLOCK_Q)

    with simt.phase("load q"):
        stage_rows(q_tile, q, first + first_q, seq - first_q, BLOCK_Q, D, THREADS, DTYPE)
        start_rows(acc, m, l, BLOCK_Q, D, THREADS)

    for first_kv in range(0, end, BLOCK_KV):
        # the previous tile is still being read
        cuda.syncthreads()
        with simt.phase("load kv"):
            stage_rows(k_tile, k, first + first_kv, seq - first_kv, BLOCK_KV, D, THREADS, DTYPE)
            stage_rows(v_tile, v, first + first_kv, seq - first_kv, BLOCK_KV, D, THREADS, DTYPE)
            cuda.syncthreads()
        with simt.phase("scores"):
            score_elements(
                scores, q_tile, k_tile, first_q, first_kv, seq, scale_log2,
                BLOCK_Q, BLOCK_KV, D, THREADS, CAUSAL,
            )  # fmt: skip
            cuda.syncthreads()
        with simt.phase("softmax"):
            if SOFTMAX == "tree":
                softmax_by_tree(scores, weights, acc, m, l, maxima, sums, D)
            else:
                softmax_by_one_thread(scores, weights, acc, m, l, BLOCK_Q, BLOCK_KV, D)
            cuda.syncthreads()
        with simt.phase("output"):
            add_values_by_column(acc, weights, v_tile, BLOCK_Q, BLOCK_KV, D, THREADS)

    cuda.syncthreads()
    with simt.phase("write"):
        write_rows(out, acc, l, first + first_q, seq - first_q, BLOCK_Q, D, THREADS, DTYPE)


def launches(problem: Problem, tensors: Tensors, softmax: str) -> list[Launch]:
    """One launch: a block per query tile, head and sequence."""
    arguments = usual_arguments(problem, tensors) | {"SOFTMAX": softmax}
    grid = (-(-problem.S // BLOCK_Q), problem.H, problem.B)
    return [Launch(small_tile, grid, THREADS, arguments)]


def shared_bytes(D: int, softmax: str) -> int:
    """Q, K and V; scores and weights; acc; m and l; the scratch of the tree."""
    operands = [rows * D * BYTES for rows in (BLOCK_Q, BLOCK_KV, BLOCK_KV)]
    floats = [BLOCK_Q * BLOCK_KV, BLOCK_Q * BLOCK_KV, BLOCK_Q * D, BLOCK_Q, BLOCK_Q]
    floats += [WARPS, WARPS] if softmax == "tree" else []
    return shared_layout(*operands, *(4 * n for n in floats))


def plans(problem: Problem, softmax: str) -> list[LaunchPlan]:
    """Phases of a full tile. The tree takes two reductions for its rows, each five shuffles in the
    warps and a step per warp over their results."""
    D = problem.D
    walked = walk(problem, BLOCK_Q, BLOCK_KV)
    tiles = max(walked.tiles)
    if softmax == "tree":
        turns = -(-BLOCK_Q // ROWS_AT_ONCE)
        steps = turns * (3 + 2 * (5 + WARPS_PER_ROW))
        at_softmax = PhasePlan("softmax", ROWS_AT_ONCE * BLOCK_KV, THREADS, steps, tiles)
        barriers = 4 + 2 * turns
    else:
        at_softmax = PhasePlan("softmax", 1, THREADS, BLOCK_Q * (2 * BLOCK_KV + D), tiles)
        barriers = 4
    phases = (
        PhasePlan("load q", BLOCK_Q * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * BLOCK_KV * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", BLOCK_Q // 3 * BLOCK_KV, THREADS, 3 * D, tiles),
        at_softmax,
        PhasePlan("output", D, THREADS, BLOCK_Q * BLOCK_KV, tiles),
        PhasePlan("write", BLOCK_Q * D // 4, THREADS),
    )
    grid = (walked.q_tiles, problem.H, problem.B)
    shared = shared_bytes(D, softmax)
    return [tiled_plan(problem, "small_tile", grid, THREADS, walked, shared, phases, barriers)]


RUNG = Rung(
    name="small_tile",
    summary="45×90 tiles, 256 threads: more blocks at a time; softmax by one thread or by a tree",
    launches=launches,
    plans=plans,
    options={"softmax": SOFTMAX},
    variants=({"softmax": "sequential"}, {"softmax": "tree"}),
)
