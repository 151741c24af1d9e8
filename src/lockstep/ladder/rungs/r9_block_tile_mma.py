"""block_tile_mma: block_tile with both products on warp matrix fragments; constant-time.

What changed from block_tile: Q·Kᵀ and P·V are m16n16k16 fragments. A warp owns 16 rows of the tile
in both products and in the softmax between them, so scores travel through shared memory without a
block barrier, and there is one barrier per key tile: the one that hands over the copies.

The output stays in fragments from the first tile to the last. Which elements of a fragment a lane
holds is up to the hardware; to correct row r of it by a factor, the factor is written sixteen
times side by side and loaded as a fragment of its own.

    lockstep trace block_tile_mma --seq 256 --head-dim 64 --causal --length 200
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.parts import paired_rows
from lockstep.ladder.parts.paired_rows import (
    BLOCK,
    OWN,
    PAD,
    PITCH,
    SHARE,
    THREADS,
    blank_copied,
    inverse_sum,
    start_copy,
)
from lockstep.ladder.parts.row_shares import (
    FRAGMENT,
    exponentials,
    rounded8,
    spread_row,
    store_weights,
    visible_scores,
)
from lockstep.ladder.parts.rows import EMPTY, VECTOR
from lockstep.ladder.rung import BYTES, Launch, LaunchPlan, PhasePlan, Problem, Rung, Tensors
from lockstep.simt import Constant, Secret, ct, cuda, float32, int32, wmma

WIDTH = BLOCK  # columns of the output that are written at a time


@simt.device
def write_rows(out, s_tile, first, q_row0, col0, seq, warp_row, COLS: Constant, DTYPE: Constant):
    """COLS columns of the warp's 16 rows, from float32 in shared memory to 16 bits in global."""
    lane = cuda.threadIdx.x % 32
    for i in range(FRAGMENT * COLS // VECTOR // 32):
        chunk = i * 32 + lane
        row = warp_row + chunk // (COLS // VECTOR)
        col = chunk % (COLS // VECTOR) * VECTOR
        packed = rounded8(s_tile, row, col, DTYPE)
        if q_row0 + row < seq:
            cuda.vstore(out, (first + q_row0 + row, col0 + col), packed)


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
    warp_row = FRAGMENT * (tid // 32)
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
        start_copy(k_tile, 0, k, first, 0, seq, D)
        start_copy(v_tile, 0, v, first, 0, seq, D)
        cuda.pipeline_commit()
        for n in range(D // 16):
            acc[n] = wmma.fill(0.0)
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
                start_copy(k_tile, 1 - stage, k, first, kv_row0 + BLOCK, seq, D)
                start_copy(v_tile, 1 - stage, v, first, kv_row0 + BLOCK, seq, D)
                cuda.pipeline_commit()

        with simt.phase("scores"):
            for n in range(BLOCK // 16):
                s[n] = wmma.fill(0.0)
            for d in range(0, D, 16):
                queries = wmma.load_a(q_tile, (0, warp_row, d))
                for n in range(BLOCK // 16):
                    keys = wmma.load_b(k_tile, (stage, 16 * n, d), layout="col")
                    s[n] = wmma.mma_sync(queries, keys, s[n])
            for n in range(BLOCK // 16):
                wmma.store(s_tile, (warp_row, 16 * n), s[n])
            cuda.syncwarp()

        with simt.phase("softmax"):
            most = visible_scores(s_tile, scores, row, half, limit - kv_row0, BLOCK, SHARE)
            top = max(m, most * scale_log2)
            # a row that has seen no key yet: infinity minus infinity would be NaN
            base = ct.select(top == EMPTY, 0.0, top)
            factor = cuda.exp2(m - base)
            m = top
            l = l * factor + exponentials(scores, scale_log2, base, OWN)
            store_weights(p_tile, scores, row, half, BLOCK, SHARE, DTYPE)
            spread_row(s_tile, row, half, factor, SHARE)
            cuda.syncwarp()

        with simt.phase("output"):
            factors = wmma.load_c(s_tile, (warp_row, 0))
            for n in range(D // 16):
                acc[n] = acc[n] * factors
            for kv in range(0, BLOCK, 16):
                p = wmma.load_a(p_tile, (warp_row, kv))
                for n in range(D // 16):
                    values = wmma.load_b(v_tile, (stage, kv, 16 * n))
                    acc[n] = wmma.mma_sync(p, values, acc[n])

    with simt.phase("write"):
        cuda.syncwarp()
        spread_row(s_tile, row, half, inverse_sum(l), SHARE)
        cuda.syncwarp()
        factors = wmma.load_c(s_tile, (warp_row, 0))
        for n in range(D // 16):
            acc[n] = acc[n] * factors
        for col0 in range(0, D, WIDTH):
            cuda.syncwarp()
            for n in range(min(D, WIDTH) // 16):
                wmma.store(s_tile, (warp_row, 16 * n), acc[col0 // 16 + n])
            cuda.syncwarp()
            write_rows(out, s_tile, first, q_row0, col0, seq, warp_row, min(D, WIDTH), DTYPE)


def launches(problem: Problem, tensors: Tensors) -> list[Launch]:
    """One launch: heads by query tiles."""
    arguments = paired_rows.arguments(problem, tensors)
    return [Launch(block_tile_mma, paired_rows.grid(problem), THREADS, arguments)]


def plans(problem: Problem) -> list[LaunchPlan]:
    """Full tiles, whatever is masked. A fragment product is the work of 32 threads."""
    tiles, D = paired_rows.query_tiles(problem), problem.D
    s_fragments, o_fragments = (BLOCK // 16) ** 2, BLOCK // 16 * D // 16
    phases = (
        *paired_rows.copy_phases(problem),
        PhasePlan("scores", 32 * s_fragments, THREADS, D // 16, tiles),
        paired_rows.softmax_phase(problem),
        PhasePlan("output", 32 * o_fragments, THREADS, BLOCK // 16, tiles),
        PhasePlan("write", BLOCK * D // VECTOR, THREADS),
    )
    shared = 5 * BLOCK * (D + PAD) * BYTES + BLOCK * PITCH * (4 + BYTES)
    mma = 2 * s_fragments * (D // 16) * paired_rows.tiles_visited(problem) * problem.heads
    per_head = 2 * paired_rows.tiles_visited(problem) + tiles * (2 + 2 * -(-D // WIDTH))
    warp_barriers = THREADS // 32 * per_head * problem.heads
    return [
        paired_rows.plan(
            problem, "block_tile_mma", shared, phases=phases, warp_barriers=warp_barriers, mma=mma
        )
    ]


RUNG = Rung(
    name="block_tile_mma",
    summary="the same on fragments, the output in them from first to last tile",
    launches=launches,
    plans=plans,
    constant_time=True,
)
