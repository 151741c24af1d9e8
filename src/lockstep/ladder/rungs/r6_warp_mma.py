"""warp_mma: both products on warp matrix fragments, m16n16k16.

What changed from small_tile_2d: a warp multiplies 16 x 16 x 16 at a time on tensor cores. Two
kernels, by the option `tile`:

    tile="45x90"    the tile stays as it was. Fragments cover 32 of its 45 rows and 80 of its 90
                    keys, ordinary cores the rest; warps are spread over rows alone, so two of the
                    eight multiply and six wait.
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
from lockstep.ladder.parts.rows import EMPTY, FULL, VECTOR, dot8, stage_rows, warp_max, warp_sum
from lockstep.ladder.parts.tiled import start_rows, tiled_plan, walk, write_rows
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

THREADS = 256
WARPS = THREADS // 32
PAD = 8  # elements behind each row: rows start in different banks
TILES = {"128x128": (128, 128), "64x64": (64, 64), "45x90": (45, 90)}

# tile="45x90": what fragments cover
BLOCK_Q, BLOCK_KV = TILES["45x90"]
ROWS = BLOCK_Q // FRAGMENT * FRAGMENT
KEYS = BLOCK_KV // FRAGMENT * FRAGMENT
S_PITCH = KEYS + FRAGMENT + PAD
BELOW = (BLOCK_Q - ROWS) * BLOCK_KV  # scores in rows that fragments leave out
BESIDE = ROWS * (BLOCK_KV - KEYS)  # and in keys that they leave out
# tile="64x64", "128x128": warps over both dimensions
WARP_ROWS, WARP_COLS = 4, 2


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
    end = seq  # of the keys that some row of this block sees
    limit = seq  # of the keys that this thread's row sees
    if CAUSAL:
        end = min(seq, first_q + BLOCK)
        limit = min(seq, first_q + row + 1)

    with simt.phase("load q"):
        stage_rows(q_tile, q, first + first_q, seq - first_q, BLOCK, D, THREADS, DTYPE)
        for i in range(BLOCK // 64):
            for n in range(D // 32):
                acc[i, n] = wmma.fill(0.0)
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
            cuda.syncthreads()

        with simt.phase("softmax"):
            most = visible_scores(
                s_tile, scores, row, part, limit - first_kv, BLOCK, THREADS // BLOCK
            )  # fmt: skip
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
            for i in range(BLOCK // 64):
                factors = wmma.load_c(s_tile, (warp_row + FRAGMENT * i, 0))
                for n in range(D // 32):
                    acc[i, n] = acc[i, n] * factors
            for kv in range(0, BLOCK, FRAGMENT):
                for n in range(D // 32):
                    col = warp_col * (D // 2) + FRAGMENT * n
                    values = wmma.load_b(v_tile, (kv, col))
                    for i in range(BLOCK // 64):
                        weights = wmma.load_a(p_tile, (warp_row + FRAGMENT * i, kv))
                        acc[i, n] = wmma.mma_sync(weights, values, acc[i, n])

    with simt.phase("write"):
        # the last factors have been read
        cuda.syncthreads()
        for hop in range(THREADS // BLOCK // 2):
            l += cuda.shfl_xor_sync(FULL, l, 1 << hop)
        spread_row(s_tile, row, part, 1.0 / l, THREADS // BLOCK)
        cuda.syncthreads()
        for i in range(BLOCK // 64):
            factors = wmma.load_c(s_tile, (warp_row + FRAGMENT * i, 0))
            for n in range(D // 32):
                acc[i, n] = acc[i, n] * factors
        # half of each warp's columns at a time where the output is wider than the tile
        for n0 in range(0, D // 32, min(D, BLOCK) // 32):
            cuda.syncthreads()
            for i in range(BLOCK // 64):
                for n in range(min(D, BLOCK) // 32):
                    col = warp_col * (min(D, BLOCK) // 2) + FRAGMENT * n
                    wmma.store(s_tile, (warp_row + FRAGMENT * i, col), acc[i, n0 + n])
            cuda.syncthreads()
            write_columns(
                out, s_tile, first + first_q, seq - first_q, FRAGMENT * n0, BLOCK, D,
                min(D, BLOCK), DTYPE,
            )  # fmt: skip


def launches(problem: Problem, tensors: Tensors, tile: str) -> list[Launch]:
    """One launch: a block per query tile, head and sequence."""
    arguments = usual_arguments(problem, tensors)
    block_q, _ = TILES[tile]
    grid = (-(-problem.S // block_q), problem.H, problem.B)
    if tile == "45x90":
        return [Launch(warp_mma_edged, grid, THREADS, arguments)]
    return [Launch(warp_mma, grid, THREADS, {**arguments, "BLOCK": block_q})]


def shared_bytes(D: int, tile: str) -> int:
    """Q, K and V, scores, weights; with edges also the output and three numbers per row."""
    block_q, block_kv = TILES[tile]
    pitch = S_PITCH if tile == "45x90" else block_kv + PAD
    arrays = [rows * (D + PAD) * BYTES for rows in (block_q, block_kv, block_kv)]
    arrays += [block_q * pitch * 4, block_q * pitch * BYTES]
    if tile == "45x90":
        arrays += [block_q * (D + PAD) * 4, *[block_q * 4] * 3]
    return shared_layout(*arrays)


def plans(problem: Problem, tile: str) -> list[LaunchPlan]:
    """A fragment product is the work of 32 threads."""
    D, (block_q, block_kv) = problem.D, TILES[tile]
    walked = walk(problem, block_q, block_kv)
    tiles = max(walked.tiles)
    rows, keys = block_q // FRAGMENT, block_kv // FRAGMENT  # in fragments
    depth, edged = D // FRAGMENT, tile == "45x90"
    fragment_threads = 32 * min(rows, WARPS) if edged else THREADS
    phases = [
        PhasePlan("load q", block_q * D // VECTOR, THREADS),
        PhasePlan("load kv", 2 * block_kv * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", 32 * rows * keys, fragment_threads, depth, tiles),
        PhasePlan("scores at edges", BELOW + BESIDE, THREADS, D, tiles),
        PhasePlan("softmax", 32 * block_q, THREADS, -(-block_kv // 32), tiles),
        PhasePlan("output at edges", block_q * D, THREADS, block_kv, tiles),
        PhasePlan("output", 32 * rows * depth, fragment_threads, keys, tiles),
        PhasePlan("write", block_q * D // VECTOR, THREADS),
    ]
    if not edged:
        phases[4] = PhasePlan("softmax", THREADS, THREADS, block_q * block_kv // THREADS, tiles)
        phases = [phase for phase in phases if "edges" not in phase.name]
    grid = (walked.q_tiles, problem.H, problem.B)
    plan = tiled_plan(
        problem,
        "warp_mma_edged" if edged else "warp_mma",
        grid,
        THREADS,
        walked,
        shared_bytes(D, tile),
        tuple(phases),
        5 if edged else 4,
    )
    last = 0 if edged else 1 + 2 * (D // min(D, block_q))  # barriers of the writing beyond one
    visited = sum(walked.tiles)
    return [
        replace(
            plan,
            barriers=plan.barriers + last * walked.q_tiles * problem.heads,
            warp_barriers=block_q * visited * problem.heads if edged else 0,
            mma=2 * rows * keys * depth * visited * problem.heads,
        )
    ]


RUNG = Rung(
    name="warp_mma",
    summary="both products on 16×16×16 fragments; then tiles that leave no warp idle",
    launches=launches,
    plans=plans,
    options={"tile": tuple(TILES)},
    variants=({"tile": "45x90"}, {"tile": "64x64"}, {"tile": "128x128"}),
)
