"""small_tile_2d: the same tiles, work spread in two dimensions, products without bank conflicts.

What changed from small_tile: every phase hands out (row, column) pairs, so no thread waits for a
phase that has less than 256 columns.

    scores   a warp takes a row, its lanes columns c, c + 32 and c + 64: a query is read once for
             three keys. Rows of Q and K are padded by 16 bytes, which puts the keys that
             neighbouring lanes read into different banks
    softmax  a warp takes a row: shuffles only, no barrier
    output   a thread takes two columns of a row, as one 4-byte access

    lockstep trace small_tile_2d --seq 256 --head-dim 32
"""

from __future__ import annotations

from dataclasses import replace

from lockstep import simt
from lockstep.ladder.parts.rows import EMPTY, VECTOR, dot8, stage_rows, warp_max, warp_sum
from lockstep.ladder.parts.tiled import masked, start_rows, tiled_plan, walk, write_rows
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
PAD = VECTOR  # elements after each row of an operand


@simt.device
def score_rows(
    scores,  # [BLOCK_Q, BLOCK_KV]
    q_tile,  # [BLOCK_Q, D + PAD]
    k_tile,  # [BLOCK_KV, D + PAD]
    first_q,
    first_kv,
    seq,
    scale_log2,
    D: Constant,
    CAUSAL: Constant,
):
    """A warp per row, three scores per lane."""
    a = cuda.threadIdx.x % 32
    b = a + 32
    # the last lanes of the last third compute a score twice rather than wait
    c = min(a + 64, BLOCK_KV - 1)
    for row in range(cuda.threadIdx.x // 32, BLOCK_Q, WARPS):
        score_a = 0.0
        score_b = 0.0
        score_c = 0.0
        for d in range(0, D, VECTOR):
            query = cuda.vload(q_tile, (row, d), VECTOR)
            score_a = dot8(query, cuda.vload(k_tile, (a, d), VECTOR), score_a)
            score_b = dot8(query, cuda.vload(k_tile, (b, d), VECTOR), score_b)
            score_c = dot8(query, cuda.vload(k_tile, (c, d), VECTOR), score_c)
        q_idx = first_q + row
        scores[row, a] = masked(score_a, q_idx, first_kv + a, seq, scale_log2, CAUSAL)
        scores[row, b] = masked(score_b, q_idx, first_kv + b, seq, scale_log2, CAUSAL)
        scores[row, c] = masked(score_c, q_idx, first_kv + c, seq, scale_log2, CAUSAL)


@simt.device
def softmax_rows(scores, corrections, m, l):
    """A warp per row; weights take the place of the scores."""
    lane = cuda.threadIdx.x % 32
    for row in range(cuda.threadIdx.x // 32, BLOCK_Q, WARPS):
        before = m[row]
        a = scores[row, lane]
        b = scores[row, lane + 32]
        c = EMPTY
        if lane + 64 < BLOCK_KV:
            c = scores[row, lane + 64]
        top = max(before, warp_max(max(a, max(b, c))))
        a = cuda.exp2(a - top)
        b = cuda.exp2(b - top)
        c = cuda.exp2(c - top)
        scores[row, lane] = a
        scores[row, lane + 32] = b
        if lane + 64 < BLOCK_KV:
            scores[row, lane + 64] = c
        part = warp_sum(a + b + c)
        # all lanes have read m
        cuda.syncwarp()
        if lane == 0:
            correction = cuda.exp2(before - top)
            corrections[row] = correction
            l[row] = l[row] * correction + part
            m[row] = top


@simt.device
def add_values(acc, weights, v_tile, corrections, D: Constant):
    """acc = acc · correction + weights v, two columns of a row per thread and turn."""
    for i in range(cuda.threadIdx.x, BLOCK_Q * (D // 2), THREADS):
        row = i // (D // 2)
        col = i % (D // 2) * 2
        before = cuda.vload(acc, (row, col), 2)
        left = before.x * corrections[row]
        right = before.y * corrections[row]
        for kv in range(0, BLOCK_KV, 2):
            weight = cuda.vload(weights, (row, kv), 2)
            value = cuda.vload(v_tile, (kv, col), 2)
            left += weight.x * value.x
            right += weight.x * value.y
            value = cuda.vload(v_tile, (kv + 1, col), 2)
            left += weight.y * value.x
            right += weight.y * value.y
        cuda.vstore(acc, (row, col), cuda.vec(left, right))


@simt.kernel
def small_tile_2d(
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
    q_tile = cuda.shared.array((BLOCK_Q, D + PAD), DTYPE)
    k_tile = cuda.shared.array((BLOCK_KV, D + PAD), DTYPE)
    v_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    scores = cuda.shared.array((BLOCK_Q, BLOCK_KV), float32)
    acc = cuda.shared.array((BLOCK_Q, D), float32)
    m = cuda.shared.array(BLOCK_Q, float32)
    l = cuda.shared.array(BLOCK_Q, float32)
    corrections = cuda.shared.array(BLOCK_Q, float32)

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
            score_rows(scores, q_tile, k_tile, first_q, first_kv, seq, scale_log2, D, CAUSAL)
            # the warp that wrote a row also does its softmax
            cuda.syncwarp()
        with simt.phase("softmax"):
            softmax_rows(scores, corrections, m, l)
            cuda.syncthreads()
        with simt.phase("output"):
            add_values(acc, scores, v_tile, corrections, D)

    cuda.syncthreads()
    with simt.phase("write"):
        write_rows(out, acc, l, first + first_q, seq - first_q, BLOCK_Q, D, THREADS, DTYPE)


def launches(problem: Problem, tensors: Tensors) -> list[Launch]:
    """One launch: a block per query tile, head and sequence."""
    arguments = usual_arguments(problem, tensors)
    grid = (-(-problem.S // BLOCK_Q), problem.H, problem.B)
    return [Launch(small_tile_2d, grid, THREADS, arguments)]


def shared_bytes(D: int) -> int:
    """Q and K, padded, and V; scores; acc; m, l and corrections."""
    operands = [BLOCK_Q * (D + PAD), BLOCK_KV * (D + PAD), BLOCK_KV * D]
    floats = [BLOCK_Q * BLOCK_KV, BLOCK_Q * D, BLOCK_Q, BLOCK_Q, BLOCK_Q]
    return shared_layout(*(BYTES * n for n in operands), *(4 * n for n in floats))


def plans(problem: Problem) -> list[LaunchPlan]:
    """Phases of a full tile: rows over the warps, columns over the lanes."""
    D = problem.D
    walked = walk(problem, BLOCK_Q, BLOCK_KV)
    tiles = max(walked.tiles)
    phases = (
        PhasePlan("load q", BLOCK_Q * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * BLOCK_KV * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", BLOCK_Q * 32, THREADS, 3 * D, tiles),
        PhasePlan("softmax", BLOCK_Q * 32, THREADS, 3 + 10, tiles),
        PhasePlan("output", BLOCK_Q * D // 2, THREADS, 2 * BLOCK_KV, tiles),
        PhasePlan("write", BLOCK_Q * D // 4, THREADS),
    )
    grid = (walked.q_tiles, problem.H, problem.B)
    shared = shared_bytes(D)
    plan = tiled_plan(problem, "small_tile_2d", grid, THREADS, walked, shared, phases, 3)
    # per tile: one of each warp after the scores, and one for each row
    meetings = sum(walked.tiles) * problem.heads * (WARPS + BLOCK_Q)
    return [replace(plan, warp_barriers=meetings)]


RUNG = Rung(
    name="small_tile_2d",
    summary="work in two dimensions, padded rows: no idle threads, conflict-free products",
    launches=launches,
    plans=plans,
)
