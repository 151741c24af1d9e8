"""warp_mma: both products on warp matrix fragments, m16n16k16.

What changed from small_tile_2d: a warp multiplies 16 x 16 x 16 at a time on tensor cores. Two
kernels, by the option `tile`:

    tile="45x90"    the tile stays as it was, and fragments do not cover its edges: see
                    `r06_warp_mma_edged`.
    tile="64x64"    tiles that fragments cover, and the eight warps spread four by two over both
    tile="128x128"  dimensions of scores and output, so that none is idle. The output stays in
                    fragments; a row of it is corrected by a fragment of factors, sixteen copies
                    of each.

    lockstep trace warp_mma --tile 64x64 --seq 256 --head-dim 64
"""

from __future__ import annotations

from dataclasses import replace

from lockstep import simt
from lockstep.ladder.parts.row_shares import (
    FRAGMENT,
    exponentials,
    rounded8,
    spread_row,
    store_weights,
    visible_scores,
)
from lockstep.ladder.parts.rows import EMPTY, FULL, VECTOR, stage_rows
from lockstep.ladder.parts.tiled import tiled_plan, walk
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
from lockstep.simt import Constant, cuda, float32, int32, wmma

from . import r06_warp_mma_edged as edged
from .r06_warp_mma_edged import PAD, THREADS

BLOCKS = {"128x128": 128, "64x64": 64}  # queries, and keys, of a tile that fragments cover
EDGED = "45x90"
WARP_ROWS, WARP_COLS = 4, 2  # warps over both dimensions of a tile


@simt.device
def clear(acc, BLOCK: Constant, D: Constant):
    """Set the warp's part of the output to zero."""
    for i in range(BLOCK // 64):
        for n in range(D // 32):
            acc[i, n] = wmma.fill(0.0)


@simt.device
def multiply_keys(
    s, s_tile, q_tile, k_tile, warp_row, warp_col, BLOCK: Constant, D: Constant
):  # fmt: skip
    """The warp's part of Q·Kᵀ into shared memory."""
    for i in range(BLOCK // 64):
        for n in range(BLOCK // 32):
            s[i, n] = wmma.fill(0.0)
    for d in range(0, D, FRAGMENT):
        for n in range(BLOCK // 32):
            key = warp_col * (BLOCK // 2) + FRAGMENT * n
            keys = wmma.load_b(k_tile, (key, d), layout="col")
            for i in range(BLOCK // 64):
                queries = wmma.load_a(q_tile, (warp_row + FRAGMENT * i, d))
                s[i, n] = wmma.mma_sync(queries, keys, s[i, n])
    for i in range(BLOCK // 64):
        for n in range(BLOCK // 32):
            key = warp_col * (BLOCK // 2) + FRAGMENT * n
            wmma.store(s_tile, (warp_row + FRAGMENT * i, key), s[i, n])


@simt.device
def correct(acc, s_tile, warp_row, BLOCK: Constant, D: Constant):
    """Multiply the warp's part of the output by the factors of its rows in shared memory."""
    for i in range(BLOCK // 64):
        factors = wmma.load_c(s_tile, (warp_row + FRAGMENT * i, 0))
        for n in range(D // 32):
            acc[i, n] = acc[i, n] * factors


@simt.device
def multiply_values(
    acc, p_tile, v_tile, warp_row, warp_col, BLOCK: Constant, D: Constant
):  # fmt: skip
    """Add the warp's part of P·V to the output."""
    for kv in range(0, BLOCK, FRAGMENT):
        for n in range(D // 32):
            col = warp_col * (D // 2) + FRAGMENT * n
            values = wmma.load_b(v_tile, (kv, col))
            for i in range(BLOCK // 64):
                weights = wmma.load_a(p_tile, (warp_row + FRAGMENT * i, kv))
                acc[i, n] = wmma.mma_sync(weights, values, acc[i, n])


@simt.device
def write_columns(
    out, s_tile, first, present, col0, ROWS: Constant, D: Constant, WIDTH: Constant,
    DTYPE: Constant,
):  # fmt: skip
    """WIDTH columns of the output, from float32 in shared memory to 16 bits: those of the first
    column of warps from `col0` on, those of the second from D / 2 + `col0` on."""
    for i in range(cuda.threadIdx.x, ROWS * WIDTH // VECTOR, THREADS):
        row = i // (WIDTH // VECTOR)
        col = i % (WIDTH // VECTOR) * VECTOR
        if row < present:
            to = col // (WIDTH // 2) * (D // 2) + col0 + col % (WIDTH // 2)
            cuda.vstore(out, (first + row, to), rounded8(s_tile, row, col, DTYPE))


@simt.device
def write_output(
    out, acc, s_tile, first, present, warp_row, warp_col, BLOCK: Constant, D: Constant,
    DTYPE: Constant,
):  # fmt: skip
    """The output by way of shared memory: half of each warp's columns at a time where it is wider
    than the tile."""
    for n0 in range(0, D // 32, min(D, BLOCK) // 32):
        cuda.syncthreads()
        for i in range(BLOCK // 64):
            for n in range(min(D, BLOCK) // 32):
                col = warp_col * (min(D, BLOCK) // 2) + FRAGMENT * n
                wmma.store(s_tile, (warp_row + FRAGMENT * i, col), acc[i, n0 + n])
        cuda.syncthreads()
        write_columns(
            out, s_tile, first, present, FRAGMENT * n0, BLOCK, D, min(D, BLOCK), DTYPE
        )  # fmt: skip


@simt.kernel
def warp_mma(
    q,  # [B·H·S, D]
    k,
    v,
    out,
    seq: int32,
    scale_log2: float32,
    D: Constant,
    BLOCK: Constant,  # queries, and keys, of a tile
    CAUSAL: Constant,
    DTYPE: Constant,
):
    q_tile = cuda.shared.array((BLOCK, D + PAD), DTYPE)
    k_tile = cuda.shared.array((BLOCK, D + PAD), DTYPE)
    v_tile = cuda.shared.array((BLOCK, D + PAD), DTYPE)
    s_tile = cuda.shared.array((BLOCK, BLOCK + PAD), float32)
    p_tile = cuda.shared.array((BLOCK, BLOCK + PAD), DTYPE)
    # a warp's part of the output and of the scores: a quarter of the rows, half of the columns
    acc = cuda.local.array((BLOCK // 64, D // 32), wmma.accumulator)
    s = cuda.local.array((BLOCK // 64, BLOCK // 32), wmma.accumulator)
    scores = cuda.local.array(BLOCK * BLOCK // THREADS, float32)

    tid = cuda.threadIdx.x
    warp_row = tid // 32 // WARP_COLS * (BLOCK // WARP_ROWS)
    warp_col = tid // 32 % WARP_COLS
    row = tid // (THREADS // BLOCK)  # shared by 4 or 2 threads
    part = tid % (THREADS // BLOCK)
    first_q = cuda.blockIdx.x * BLOCK
    # row of this head's first token
    first = (cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * seq
    # the ends of the keys that some row of this block sees, and this thread's row
    end = min(seq, first_q + BLOCK) if CAUSAL else seq
    limit = min(seq, first_q + row + 1) if CAUSAL else seq

    with simt.phase("load q"):
        stage_rows(q_tile, q, first + first_q, seq - first_q, BLOCK, D, THREADS, DTYPE)
        clear(acc, BLOCK, D)
    m = EMPTY
    l = 0.0

    for first_kv in range(0, end, BLOCK):
        # the previous tile is still being read
        cuda.syncthreads()
        with simt.phase("load kv"):
            stage_rows(k_tile, k, first + first_kv, seq - first_kv, BLOCK, D, THREADS, DTYPE)
            stage_rows(v_tile, v, first + first_kv, seq - first_kv, BLOCK, D, THREADS, DTYPE)
            cuda.syncthreads()

        with simt.phase("scores"):
            multiply_keys(s, s_tile, q_tile, k_tile, warp_row, warp_col, BLOCK, D)
            cuda.syncthreads()

        with simt.phase("softmax"):
            seen = limit - first_kv
            most = visible_scores(s_tile, scores, row, part, seen, BLOCK, THREADS // BLOCK)
            top = max(m, most * scale_log2)
            # a row that has seen no key yet: infinity minus infinity would be NaN
            base = 0.0 if top == EMPTY else top
            factor = cuda.exp2(m - base)
            m = top
            l = l * factor + exponentials(scores, scale_log2, base, BLOCK * BLOCK // THREADS)
            store_weights(p_tile, scores, row, part, BLOCK, THREADS // BLOCK, DTYPE)
            spread_row(s_tile, row, part, factor, THREADS // BLOCK)
            cuda.syncthreads()

        with simt.phase("output"):
            correct(acc, s_tile, warp_row, BLOCK, D)
            multiply_values(acc, p_tile, v_tile, warp_row, warp_col, BLOCK, D)

    with simt.phase("write"):
        # the last factors have been read
        cuda.syncthreads()
        for hop in range(THREADS // BLOCK // 2):
            l += cuda.shfl_xor_sync(FULL, l, 1 << hop)
        spread_row(s_tile, row, part, 1.0 / l, THREADS // BLOCK)
        cuda.syncthreads()
        correct(acc, s_tile, warp_row, BLOCK, D)
        write_output(
            out, acc, s_tile, first + first_q, seq - first_q, warp_row, warp_col, BLOCK, D, DTYPE
        )  # fmt: skip


def launches(problem: Problem, tensors: Tensors, tile: str) -> list[Launch]:
    """One launch: a block per query tile, head and sequence."""
    arguments = usual_arguments(problem, tensors)
    block = edged.BLOCK_Q if tile == EDGED else BLOCKS[tile]
    grid = (-(-problem.S // block), problem.H, problem.B)
    if tile == EDGED:
        return [Launch(edged.warp_mma_edged, grid, THREADS, arguments)]
    return [Launch(warp_mma, grid, THREADS, {**arguments, "BLOCK": block})]


def plans(problem: Problem, tile: str) -> list[LaunchPlan]:
    """A fragment product is the work of 32 threads."""
    if tile == EDGED:
        return [edged.plan(problem)]
    D, heads, block = problem.D, problem.heads, BLOCKS[tile]
    walked = walk(problem, block, block)
    tiles, visited = max(walked.tiles), sum(walked.tiles)
    side, depth = block // FRAGMENT, D // FRAGMENT  # in fragments
    phases = (
        PhasePlan("load q", block * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * block * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", 32 * side * side, THREADS, depth, tiles),
        PhasePlan("softmax", THREADS, THREADS, block * block // THREADS, tiles),
        PhasePlan("output", 32 * side * depth, THREADS, side, tiles),
        PhasePlan("write", block * D // VECTOR, THREADS),
    )
    pitch = block + PAD
    shared = shared_layout(
        *[block * (D + PAD) * BYTES] * 3, block * pitch * 4, block * pitch * BYTES
    )
    grid = (walked.q_tiles, problem.H, problem.B)
    plan = tiled_plan(problem, "warp_mma", grid, THREADS, walked, shared, phases, 4)
    writing = 1 + 2 * (D // min(D, block))  # barriers of the writing beyond one
    return [
        replace(
            plan,
            barriers=plan.barriers + writing * walked.q_tiles * heads,
            mma=2 * side * side * depth * visited * heads,
        )
    ]


RUNG = Rung(
    name="warp_mma",
    summary="both products on 16×16×16 fragments; then tiles that leave no warp idle",
    launches=launches,
    plans=plans,
    options={"tile": (*BLOCKS, EDGED)},
    variants=({"tile": "45x90"}, {"tile": "64x64"}, {"tile": "128x128"}),
    summaries=(
        "both products on 16×16×16 fragments, the edges of tiles on ordinary cores",
        "tiles that fragments cover, over warps in both dimensions: no warp idle",
        "larger tiles: K and V are read half as often",
    ),
)
