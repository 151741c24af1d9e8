"""naive: the definition of attention as three kernels, with all scores in memory.

    scores = q kᵀ · scale      one thread per score                  [S, S] fp32 per head
    scores = exp2(scores - m)  one thread per row, which also adds them up
    out    = scores v / l      one thread per element

Nothing is shared between threads, so every operand comes from global memory for every product, and
the scores make the way to memory and back three times. This is what the rungs above do away with.

    lockstep trace naive --seq 64 --head-dim 32
"""

from __future__ import annotations

import torch

from lockstep import simt
from lockstep.ladder.parts.rows import EMPTY
from lockstep.ladder.rung import (
    BYTES,
    Launch,
    LaunchPlan,
    PhasePlan,
    Problem,
    Rung,
    Tensors,
)
from lockstep.numerics import LOG2E
from lockstep.simt import Constant, cuda, float32, int32
from lockstep.simt.types import SECTOR

THREADS = 256
TILE_ROWS, TILE_COLS = 8, 32  # scores of a block: lanes along the keys
# of the workspace: indices are int32, so more heads than fit below this take turns
MAX_SCORES = 2**30


@simt.kernel
def naive_scores(
    q,  # [B·H·S, D]
    k,
    scores: float32[:, :, :],  # [heads, S, S]
    first_head: int32,
    seq: int32,
    scale_log2: float32,
    D: Constant,
    CAUSAL: Constant,
):
    row = cuda.blockIdx.y * TILE_ROWS + cuda.threadIdx.x // TILE_COLS
    col = cuda.blockIdx.x * TILE_COLS + cuda.threadIdx.x % TILE_COLS
    first = (first_head + cuda.blockIdx.z) * seq  # row of this head's first token
    with simt.phase("scores"):
        if row < seq and col < seq:
            score = 0.0
            for d in range(D):
                score += q[first + row, d] * k[first + col, d]
            score *= scale_log2
            if CAUSAL and col > row:
                score = EMPTY
            scores[cuda.blockIdx.z, row, col] = score


@simt.kernel
def naive_softmax(
    scores: float32[:, :, :],  # [heads, S, S]
    sums: float32[:, :],  # [heads, S]
    seq: int32,
):
    row = cuda.grid(1)
    head = cuda.blockIdx.y
    with simt.phase("softmax"):
        if row < seq:
            m = EMPTY
            for col in range(seq):
                m = max(m, scores[head, row, col])
            l = 0.0
            for col in range(seq):
                p = cuda.exp2(scores[head, row, col] - m)
                scores[head, row, col] = p
                l += p
            sums[head, row] = l


@simt.kernel
def naive_output(
    scores: float32[:, :, :],  # [heads, S, S]
    sums: float32[:, :],  # [heads, S]
    v,  # [B·H·S, D]
    out,
    first_head: int32,
    seq: int32,
    D: Constant,
    DTYPE: Constant,
):
    row = cuda.blockIdx.x * (THREADS // D) + cuda.threadIdx.x // D
    col = cuda.threadIdx.x % D
    first = (first_head + cuda.blockIdx.y) * seq
    with simt.phase("output"):
        if row < seq:
            acc = 0.0
            for kv in range(seq):
                acc += scores[cuda.blockIdx.y, row, kv] * v[first + kv, col]
            out[first + row, col] = DTYPE(acc / sums[cuda.blockIdx.y, row])


def launches(problem: Problem, tensors: Tensors) -> list[Launch]:
    """Three launches for every group of heads whose scores fit the workspace."""
    S, D = problem.S, problem.D
    q, k, v, out = tensors
    at_once = heads_at_once(problem)
    scores = torch.empty(at_once, S, S, device=q.device)
    sums = torch.empty(at_once, S, device=q.device)
    found = []
    for first in range(0, problem.heads, at_once):
        heads = min(at_once, problem.heads - first)
        grids = _grids(problem, heads)
        common = {"first_head": first, "seq": S, "D": D}
        found += [
            Launch(
                naive_scores,
                grids[0],
                THREADS,
                {"q": q, "k": k, "scores": scores, "CAUSAL": problem.causal, **common}
                | {"scale_log2": problem.scale * LOG2E},
            ),
            Launch(naive_softmax, grids[1], THREADS, {"scores": scores, "sums": sums, "seq": S}),
            Launch(
                naive_output,
                grids[2],
                THREADS,
                {"scores": scores, "sums": sums, "v": v, "out": out, "DTYPE": v.dtype, **common},
            ),
        ]
    return found


def heads_at_once(problem: Problem) -> int:
    return max(1, min(problem.heads, MAX_SCORES // problem.S**2))


def _grids(problem: Problem, heads: int) -> tuple[tuple[int, ...], ...]:
    S = problem.S
    return (
        (-(-S // TILE_COLS), -(-S // TILE_ROWS), heads),
        (-(-S // THREADS), heads),
        (-(-S // (THREADS // problem.D)), heads),
    )


def plans(problem: Problem) -> list[LaunchPlan]:
    """Three per group of heads, as they are launched."""
    at_once = heads_at_once(problem)
    found = []
    for first in range(0, problem.heads, at_once):
        found += _plans(problem, min(at_once, problem.heads - first), first == 0)
    return found


def _plans(problem: Problem, heads: int, with_workspace: bool) -> list[LaunchPlan]:
    S, D = problem.S, problem.D
    grids = _grids(problem, heads)
    # rows of scores start at whole sectors, or anywhere
    aligned = S % (SECTOR // 4) == 0
    score_sectors = 4 * S * S * heads // SECTOR if aligned else None
    common = {"block": THREADS, "shared_bytes": 0, "iterations": 1, "barriers": 0}
    # lanes are 32 keys of one query: one sector of q, and one of each key
    per_score = S * D * (-(-S // TILE_COLS) + S) * heads
    # lanes are rows: every one of them is in a sector of its own
    per_row = S * S * heads
    per_element = S * heads * (D // 32) * (3 * S + 1)
    return [
        LaunchPlan(
            kernel="naive_scores",
            grid=grids[0],
            phases=(PhasePlan("scores", TILE_ROWS * TILE_COLS, THREADS, D),),
            load_bytes=2 * BYTES * D * S * S * heads,
            store_bytes=4 * S * S * heads,
            load_sectors=per_score,
            store_sectors=score_sectors,
            workspace=(S * S + S) * heads * with_workspace,
            **common,
        ),
        LaunchPlan(
            kernel="naive_softmax",
            grid=grids[1],
            phases=(PhasePlan("softmax", THREADS, THREADS, 2 * S),),
            load_bytes=8 * S * S * heads,
            store_bytes=4 * (S * S + S) * heads,
            load_sectors=2 * per_row if aligned else None,
            store_sectors=per_row + 4 * S * heads // SECTOR if aligned else None,
            **common,
        ),
        LaunchPlan(
            kernel="naive_output",
            grid=grids[2],
            phases=(PhasePlan("output", THREADS, THREADS, S),),
            load_bytes=((4 + BYTES) * S + 4) * S * D * heads,
            store_bytes=BYTES * S * D * heads,
            load_sectors=per_element,
            store_sectors=BYTES * S * D * heads // SECTOR,
            **common,
        ),
    ]


RUNG = Rung(
    name="naive",
    summary="three passes, all scores in memory",
    launches=launches,
    plans=plans,
)
