"""warp_mma on tiles of 45 x 90: fragments where they fit, ordinary cores at the edges.

Fragments cover 32 of the 45 rows and 80 of the 90 keys. Warps are spread over rows alone, so two of
the eight multiply and six wait.

    lockstep trace warp_mma --tile 45x90 --seq 256 --head-dim 64
"""

from __future__ import annotations

from dataclasses import replace

from lockstep import simt
from lockstep.ladder.parts.row_shares import FRAGMENT
from lockstep.ladder.parts.rows import EMPTY, VECTOR, dot8, stage_rows, warp_max, warp_sum
from lockstep.ladder.parts.tiled import start_rows, tiled_plan, walk, write_rows
from lockstep.ladder.rung import BYTES, LaunchPlan, PhasePlan, Problem, shared_layout
from lockstep.simt import Constant, cuda, float32, int32, wmma

THREADS = 256
WARPS = THREADS // 32
PAD = 8  # elements after each row: rows start in different banks
BLOCK_Q, BLOCK_KV = 45, 90
# what fragments cover
ROWS = BLOCK_Q // FRAGMENT * FRAGMENT
KEYS = BLOCK_KV // FRAGMENT * FRAGMENT
S_PITCH = KEYS + FRAGMENT + PAD
BELOW = (BLOCK_Q - ROWS) * BLOCK_KV  # scores in rows that fragments leave out
BESIDE = ROWS * (BLOCK_KV - KEYS)  # and in keys that they leave out


@simt.device
def scores_in_fragments(s_tile, q_tile, k_tile, warp, D: Constant):
    """Rows 0 to 31 by keys 0 to 79: a warp takes 16 rows, so there is work for two."""
    for row in range(FRAGMENT * warp, ROWS, FRAGMENT * WARPS):
        for col in range(0, KEYS, FRAGMENT):
            s = wmma.fill(0.0)
            for d in range(0, D, FRAGMENT):
                queries = wmma.load_a(q_tile, (row, d))
                keys = wmma.load_b(k_tile, (col, d), layout="col")
                s = wmma.mma_sync(queries, keys, s)
            wmma.store(s_tile, (row, col), s)


@simt.device
def scores_at_edges(s_tile, q_tile, k_tile, D: Constant):
    """The scores below and beside the fragments, one per thread and turn."""
    for i in range(cuda.threadIdx.x, BELOW + BESIDE, THREADS):
        row = ROWS + i // BLOCK_KV
        col = i % BLOCK_KV
        if i >= BELOW:
            row = (i - BELOW) // (BLOCK_KV - KEYS)
            col = KEYS + (i - BELOW) % (BLOCK_KV - KEYS)
        score = 0.0
        for d in range(0, D, VECTOR):
            query = cuda.vload(q_tile, (row, d), VECTOR)
            score = dot8(query, cuda.vload(k_tile, (col, d), VECTOR), score)
        s_tile[row, col] = score


@simt.device
def softmax_by_warps(
    s_tile, p_tile, m, l, factors, warp, lane, first_q, seen, scale_log2, CAUSAL: Constant,
    DTYPE: Constant,
):  # fmt: skip
    """A warp takes a row at a time; `seen` keys of the tile exist."""
    for row in range(warp, BLOCK_Q, WARPS):
        limit = seen
        if CAUSAL:
            limit = min(seen, first_q + row + 1)
        before = m[row]
        top = EMPTY
        for col in range(lane, BLOCK_KV, 32):
            score = s_tile[row, col] * scale_log2 if col < limit else EMPTY
            top = max(top, score)
        top = max(before, warp_max(top))
        base = 0.0 if top == EMPTY else top
        part = 0.0
        for col in range(lane, BLOCK_KV, 32):
            p = cuda.exp2(s_tile[row, col] * scale_log2 - base) if col < limit else 0.0
            p_tile[row, col] = DTYPE(p)
            part += p
        part = warp_sum(part)
        factor = cuda.exp2(before - base)
        # all lanes have read m[row] before one writes it
        cuda.syncwarp()
        if lane == 0:
            factors[row] = factor
            l[row] = l[row] * factor + part
            m[row] = top


@simt.device
def output_at_edges(acc, p_tile, v_tile, factors, D: Constant):
    """Correct what is there; add the last keys, or for the last rows all: what fragments omit."""
    for i in range(cuda.threadIdx.x, BLOCK_Q * D, THREADS):
        row = i // D
        col = i % D
        total = acc[row, col] * factors[row]
        for kv in range(KEYS if row < ROWS else 0, BLOCK_KV):
            total += p_tile[row, kv] * v_tile[kv, col]
        acc[row, col] = total


@simt.device
def output_in_fragments(acc, p_tile, v_tile, warp, D: Constant):
    """Add the product of weights and values for rows 0 to 31 and keys 0 to 79."""
    for row in range(FRAGMENT * warp, ROWS, FRAGMENT * WARPS):
        for col in range(0, D, FRAGMENT):
            total = wmma.load_c(acc, (row, col))
            for kv in range(0, KEYS, FRAGMENT):
                weights = wmma.load_a(p_tile, (row, kv))
                total = wmma.mma_sync(weights, wmma.load_b(v_tile, (kv, col)), total)
            wmma.store(acc, (row, col), total)


@simt.kernel
def warp_mma_edged(
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
    v_tile = cuda.shared.array((BLOCK_KV, D + PAD), DTYPE)
    s_tile = cuda.shared.array((BLOCK_Q, S_PITCH), float32)
    p_tile = cuda.shared.array((BLOCK_Q, S_PITCH), DTYPE)
    acc = cuda.shared.array((BLOCK_Q, D + PAD), float32)
    m = cuda.shared.array(BLOCK_Q, float32)
    l = cuda.shared.array(BLOCK_Q, float32)
    factors = cuda.shared.array(BLOCK_Q, float32)

    warp = cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
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
            scores_in_fragments(s_tile, q_tile, k_tile, warp, D)
        with simt.phase("scores at edges"):
            scores_at_edges(s_tile, q_tile, k_tile, D)
            cuda.syncthreads()
        with simt.phase("softmax"):
            softmax_by_warps(
                s_tile, p_tile, m, l, factors, warp, lane, first_q - first_kv, seq - first_kv,
                scale_log2, CAUSAL, DTYPE,
            )  # fmt: skip
            cuda.syncthreads()
        with simt.phase("output at edges"):
            output_at_edges(acc, p_tile, v_tile, factors, D)
            cuda.syncthreads()
        with simt.phase("output"):
            output_in_fragments(acc, p_tile, v_tile, warp, D)

    cuda.syncthreads()
    with simt.phase("write"):
        write_rows(out, acc, l, first + first_q, seq - first_q, BLOCK_Q, D, THREADS, DTYPE)


def plan(problem: Problem) -> LaunchPlan:
    """A fragment product is the work of 32 threads."""
    D, heads = problem.D, problem.heads
    walked = walk(problem, BLOCK_Q, BLOCK_KV)
    tiles, visited = max(walked.tiles), sum(walked.tiles)
    rows, keys, depth = ROWS // FRAGMENT, KEYS // FRAGMENT, D // FRAGMENT  # in fragments
    busy = 32 * min(rows, WARPS)
    phases = (
        PhasePlan("load q", BLOCK_Q * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * BLOCK_KV * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", 32 * rows * keys, busy, depth, tiles),
        PhasePlan("scores at edges", BELOW + BESIDE, THREADS, D, tiles),
        PhasePlan("softmax", 32 * BLOCK_Q, THREADS, -(-BLOCK_KV // 32), tiles),
        PhasePlan("output at edges", BLOCK_Q * D, THREADS, BLOCK_KV, tiles),
        PhasePlan("output", 32 * rows * depth, busy, keys, tiles),
        PhasePlan("write", BLOCK_Q * D // VECTOR, THREADS),
    )
    shared = shared_layout(
        *(rows * (D + PAD) * BYTES for rows in (BLOCK_Q, BLOCK_KV, BLOCK_KV)),
        BLOCK_Q * S_PITCH * 4,
        BLOCK_Q * S_PITCH * BYTES,
        BLOCK_Q * (D + PAD) * 4,
        *[BLOCK_Q * 4] * 3,
    )
    grid = (walked.q_tiles, problem.H, problem.B)
    plan = tiled_plan(problem, "warp_mma_edged", grid, THREADS, walked, shared, phases, 5)
    return replace(
        plan,
        warp_barriers=BLOCK_Q * visited * heads,
        mma=2 * rows * keys * depth * visited * heads,
    )
