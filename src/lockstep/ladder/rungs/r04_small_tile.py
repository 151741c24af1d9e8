"""small_tile: tiles of 45 queries by 90 keys, 256 threads, and four ways to do the softmax.

What changed from large_tile: a third of the shared memory (52 KB at D 32) lets several blocks live
on a multiprocessor, and 256 threads share the scores. The grid has three dimensions: query tiles,
heads, batch.

    softmax="sequential"  thread 0 does the softmax of the tile, as before
    softmax="row_shared"  a row at a time over all 256 threads, halving through shared memory
    softmax="row_tree"    the same with shuffles in the warps, then a step per warp
    softmax="tree"        two rows at a time, four warps each: 90 scores keep 128 threads busier

The tree must end in *every* warp: all of them need the maximum. Here each warp reduces the warps'
results, out of scratch memory that no other warp writes to.

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
SOFTMAX = ("tree", "sequential", "row_shared", "row_tree")
WARPS_PER_ROW = {"tree": 4, "row_tree": WARPS, "row_shared": WARPS}
HALVINGS = 8  # of 256 threads down to one


@simt.device
def block_max(value, partial):
    """The largest value of the block, in every thread, through `partial` [THREADS]: no shuffles."""
    tid = cuda.threadIdx.x
    partial[tid] = value
    cuda.syncthreads()
    for hop in range(HALVINGS):
        if tid < THREADS // 2 >> hop:
            partial[tid] = max(partial[tid], partial[tid + (THREADS // 2 >> hop)])
        cuda.syncthreads()
    return partial[0]


@simt.device
def block_sum(value, partial):
    """The sum over the block; otherwise like `block_max`."""
    tid = cuda.threadIdx.x
    partial[tid] = value
    cuda.syncthreads()
    for hop in range(HALVINGS):
        if tid < THREADS // 2 >> hop:
            partial[tid] += partial[tid + (THREADS // 2 >> hop)]
        cuda.syncthreads()
    return partial[0]


@simt.device
def softmax_by_tree(
    scores,
    weights,
    acc,
    m,
    l,
    maxima,
    sums,
    D: Constant,
    WARPS_PER_ROW: Constant,
    SHUFFLES: Constant,
):
    """The online softmax, a thread per score, WARPS_PER_ROW warps to a row: shuffles in the warps,
    then a step per warp; or, without SHUFFLES, halving in shared memory. `maxima` and `sums` take
    turns, so that no barrier is needed before the next reduction."""
    place = cuda.threadIdx.x % (32 * WARPS_PER_ROW)
    for first_row in range(0, BLOCK_Q, WARPS // WARPS_PER_ROW):
        row = first_row + cuda.threadIdx.x // (32 * WARPS_PER_ROW)
        before = EMPTY
        top = EMPTY
        if row < BLOCK_Q:
            before = m[row]
            for col in range(place, BLOCK_KV, 32 * WARPS_PER_ROW):
                top = max(top, scores[row, col])
        if SHUFFLES:
            top = max(before, rows_max(top, maxima, WARPS_PER_ROW))
        else:
            top = max(before, block_max(top, maxima))
        part = 0.0
        if row < BLOCK_Q:
            for col in range(place, BLOCK_KV, 32 * WARPS_PER_ROW):
                p = cuda.exp2(scores[row, col] - top)
                weights[row, col] = p
                part += p
        if SHUFFLES:  # noqa: SIM108 - a device function stands in a statement of its own
            part = rows_sum(part, sums, WARPS_PER_ROW)
        else:
            part = block_sum(part, sums)
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
    WARPS_PER_ROW: Constant,  # at the softmax; 0: one thread does it
    SHUFFLES: Constant,
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
    if WARPS_PER_ROW:
        maxima = cuda.shared.array(WARPS if SHUFFLES else THREADS, float32)
        sums = cuda.shared.array(WARPS if SHUFFLES else THREADS, float32)

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
            if WARPS_PER_ROW:
                softmax_by_tree(
                    scores, weights, acc, m, l, maxima, sums, D, WARPS_PER_ROW, SHUFFLES
                )
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
    arguments = usual_arguments(problem, tensors) | {
        "WARPS_PER_ROW": WARPS_PER_ROW.get(softmax, 0),
        "SHUFFLES": softmax != "row_shared",
    }
    grid = (-(-problem.S // BLOCK_Q), problem.H, problem.B)
    return [Launch(small_tile, grid, THREADS, arguments)]


def shared_bytes(D: int, softmax: str) -> int:
    """Q, K and V; scores and weights; acc; m and l; the scratch of the reductions."""
    operands = [rows * D * BYTES for rows in (BLOCK_Q, BLOCK_KV, BLOCK_KV)]
    floats = [BLOCK_Q * BLOCK_KV, BLOCK_Q * BLOCK_KV, BLOCK_Q * D, BLOCK_Q, BLOCK_Q]
    scratch = {"tree": WARPS, "row_tree": WARPS, "row_shared": THREADS}
    floats += 2 * [scratch[softmax]] if softmax in scratch else []
    return shared_layout(*operands, *(4 * n for n in floats))


def reduction_steps(softmax: str) -> int:
    """Steps of one reduction, a barrier in it counted once: five shuffles in the warps, then a step
    per warp over their results; or halvings in shared memory, each with its barrier."""
    if softmax == "row_shared":
        return 1 + HALVINGS
    return 5 + 1 + WARPS_PER_ROW[softmax]


def plans(problem: Problem, softmax: str) -> list[LaunchPlan]:
    """Phases of a full tile."""
    D = problem.D
    walked = walk(problem, BLOCK_Q, BLOCK_KV)
    tiles = max(walked.tiles)
    if softmax == "sequential":
        at_softmax = PhasePlan("softmax", 1, THREADS, BLOCK_Q * (2 * BLOCK_KV + D), tiles)
        barriers = 4
    else:
        at_once = WARPS // WARPS_PER_ROW[softmax]
        turns = -(-BLOCK_Q // at_once)
        # two reductions, and of each score maximum, exponential and correction
        steps = turns * (3 + 2 * (reduction_steps(softmax) - 1))
        at_softmax = PhasePlan("softmax", at_once * BLOCK_KV, THREADS, steps, tiles)
        barriers = 4 + 2 * turns * (1 if softmax != "row_shared" else 1 + HALVINGS)
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
    summary="45×90 tiles, 256 threads: more blocks at a time; softmax by one thread or by trees",
    launches=launches,
    plans=plans,
    options={"softmax": SOFTMAX},
    variants=tuple({"softmax": name} for name in (*SOFTMAX[1:], SOFTMAX[0])),
    summaries=(
        "45×90 tiles, 256 threads: more blocks at a time; softmax by one thread",
        "a row's softmax by all 256 threads, halving in shared memory",
        "a row's softmax by all 256 threads: shuffles in warps, then a step per warp",
        "two rows at a time, four warps each",
    ),
)
