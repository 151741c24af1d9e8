"""small_tile: tiles of 45 queries by 90 keys, 256 threads, and two ways to do the softmax.

What changed from large_tile: a third of the shared memory (52 KB at D 32) lets several blocks live
on a multiprocessor, and 256 threads share the scores. The grid has three dimensions: query tiles,
heads, batch.

    softmax="sequential"  thread 0 does the softmax of the tile, as before
    softmax="tree"        a row at a time: a thread per score, warp shuffles, then a tree over warps

The tree must end in *every* warp: all of them need the maximum. Here each warp reduces the eight
warps' results for itself, out of scratch memory that is nobody else's.

    lockstep trace small_tile --softmax sequential --seq 256 --head-dim 32
"""

from __future__ import annotations

from dataclasses import replace

from lockstep import simt
from lockstep.simt import Constant, cuda, float32, int32

from .parts import VECTOR, stage_rows
from .rung import (
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
from .tiled import (
    add_values_by_column,
    score_elements,
    softmax_by_one_thread,
    softmax_by_tree,
    start_rows,
    tiled_plan,
    walk,
    write_rows,
)

BLOCK_Q, BLOCK_KV, THREADS = 45, 90, 256
WARPS = THREADS // 32
SOFTMAX = ("tree", "sequential")


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
                scores, q_tile, k_tile, first_q, first_kv, seq, scale_log2,
                BLOCK_Q, BLOCK_KV, D, THREADS, CAUSAL,
            )  # fmt: skip
            cuda.syncthreads()
        with simt.phase("softmax"):
            if SOFTMAX == "tree":
                softmax_by_tree(
                    scores, weights, acc, m, l, maxima, sums, rows, cols, D, THREADS
                )  # fmt: skip
            else:
                softmax_by_one_thread(scores, weights, acc, m, l, rows, cols, D)
            cuda.syncthreads()
        with simt.phase("output"):
            add_values_by_column(acc, weights, v_tile, rows, cols, D, THREADS)

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
    """Phases of a full tile. The tree takes a row in two reductions, each five shuffles in the
    warps and five more over their results."""
    D = problem.D
    walked = walk(problem, BLOCK_Q, BLOCK_KV)
    tiles = max(walked.tiles)
    if softmax == "tree":
        at_softmax = PhasePlan("softmax", BLOCK_KV, THREADS, BLOCK_Q * (3 + 20), tiles)
        row_barriers = _tree_barriers(problem)
    else:
        at_softmax = PhasePlan("softmax", 1, THREADS, BLOCK_Q * (2 * BLOCK_KV + D), tiles)
        row_barriers = 0
    phases = (
        PhasePlan("load q", BLOCK_Q * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * BLOCK_KV * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", BLOCK_Q * BLOCK_KV, THREADS, D, tiles),
        at_softmax,
        PhasePlan("output", D, THREADS, BLOCK_Q * BLOCK_KV, tiles),
        PhasePlan("write", BLOCK_Q * D // 4, THREADS),
    )
    grid = (walked.q_tiles, problem.H, problem.B)
    shared = shared_bytes(D, softmax)
    plan = tiled_plan(problem, "small_tile", grid, THREADS, walked, shared, phases, 4)
    return [replace(plan, barriers=plan.barriers + row_barriers)]


def _tree_barriers(problem: Problem) -> int:
    """Two for each row of a query tile at each KV tile."""
    tiles = walk(problem, BLOCK_Q, BLOCK_KV).tiles
    rows = (min(BLOCK_Q, problem.S - t * BLOCK_Q) for t in range(len(tiles)))
    return problem.heads * sum(2 * r * n for r, n in zip(rows, tiles, strict=True))


RUNG = Rung(
    name="small_tile",
    summary="45×90 tiles, 256 threads: more blocks at a time; softmax by one thread or by a tree",
    launches=launches,
    plans=plans,
    options={"softmax": SOFTMAX},
    variants=({"softmax": "sequential"}, {"softmax": "tree"}),
)
