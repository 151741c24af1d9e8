"""block_tile: one block per 64 x 64 tile, every warp on its own 16 rows; constant-time.

What changed from split_kv: instead of more blocks, more out of each. Both products are blocked in
registers: a thread of Q·Kᵀ holds 8 x 4 scores and loads 12 vectors for every 256 multiplications,
one of P·V holds 4 rows by D / 8 columns of the output from the first tile to the last. K and V come
by asynchronous copies into one of two stages while the other is worked on. A row of scores belongs
to two threads, joined by one shuffle, and to a single warp all the way, so that the only block
barrier is the one per key tile that hands over the copies.

Constant-time: full tiles, `ct.select` for the mask, trip counts from the public S alone, a secret
length within it, and no division.

`--stage` shows the way here: see `r08_block_tile_stages`.

    lockstep trace block_tile --seq 256 --head-dim 64 --causal --length 200
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
    start_copies,
    start_copy,
)
from lockstep.ladder.parts.row_shares import exponentials, visible_scores
from lockstep.ladder.parts.rows import EMPTY, VECTOR
from lockstep.ladder.rung import BYTES, Launch, LaunchPlan, PhasePlan, Problem, Rung, Tensors
from lockstep.simt import Constant, Secret, ct, cuda, float32, int32

from . import r08_block_tile_stages

SCORE_ROWS, SCORE_COLS = 8, 4  # that a thread of Q·Kᵀ holds
OUT_ROWS = 4  # that a thread of P·V holds


@simt.device
def score_row(i, lane):
    """Row, of a warp's 16, that the i-th scores of a lane belong to. The two halves of a warp are
    two rows apart: 16 banks."""
    return i // 2 * 4 + lane // 16 * 2 + i % 2


@simt.device
def widen8(part, into, i):
    """Eight 16-bit values as float32 into row i of registers."""
    into[i, 0] = part[0]
    into[i, 1] = part[1]
    into[i, 2] = part[2]
    into[i, 3] = part[3]
    into[i, 4] = part[4]
    into[i, 5] = part[5]
    into[i, 6] = part[6]
    into[i, 7] = part[7]


@simt.device
def multiply_keys(s, q_tile, k_tile, stage, warp_row, lane, D: Constant):
    """s[i, j] = q · k for this thread's rows and keys."""
    queries = cuda.local.array((SCORE_ROWS, VECTOR), float32)
    key = cuda.local.array((1, VECTOR), float32)
    for i in range(SCORE_ROWS):
        for j in range(SCORE_COLS):
            s[i, j] = 0.0
    for d in range(0, D, VECTOR):
        for i in range(SCORE_ROWS):
            row = warp_row + score_row(i, lane)
            widen8(cuda.vload(q_tile, (0, row, d), VECTOR), queries, i)
        for j in range(SCORE_COLS):
            widen8(cuda.vload(k_tile, (stage, lane % 16 + 16 * j, d), VECTOR), key, 0)
            for i in range(SCORE_ROWS):
                for e in range(VECTOR):
                    s[i, j] += queries[i, e] * key[0, e]


@simt.device
def store_scores(s_tile, s, warp_row, lane):
    """This thread's scores to shared memory."""
    for i in range(SCORE_ROWS):
        for j in range(SCORE_COLS):
            s_tile[warp_row + score_row(i, lane), lane % 16 + 16 * j] = s[i, j]


@simt.device
def store_weights(s_tile, scores, row, half):
    """This thread's weights of a row to where the scores were."""
    for j in range(OWN // 4):
        p = cuda.vec(scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3])
        cuda.vstore(s_tile, (row, 8 * j + 4 * half), p)


@simt.device
def widen_values(v_tile, stage, row, col, values, W: Constant):
    """W neighbouring values as float32 in registers."""
    part = cuda.vload(v_tile, (stage, row, col), W)
    values[0] = part[0]
    values[1] = part[1]
    values[2] = part[2]
    values[3] = part[3]
    if W == 8:
        values[4] = part[4]
        values[5] = part[5]
        values[6] = part[6]
        values[7] = part[7]


@simt.device
def multiply_values(acc, s_tile, v_tile, stage, warp_row, lane, D: Constant, W: Constant):
    """acc[i, c] += p · v for this thread's rows and columns, W columns side by side."""
    weights = cuda.local.array((OUT_ROWS, 4), float32)
    values = cuda.local.array(W, float32)
    for kv in range(0, BLOCK, 4):
        for i in range(OUT_ROWS):
            part = cuda.vload(s_tile, (warp_row + 4 * i + lane // 8, kv), 4)
            weights[i, 0] = part[0]
            weights[i, 1] = part[1]
            weights[i, 2] = part[2]
            weights[i, 3] = part[3]
        for e in range(4):
            for g in range(D // 8 // W):
                widen_values(v_tile, stage, kv + e, 8 * W * g + lane % 8 * W, values, W)
                for i in range(OUT_ROWS):
                    for c in range(W):
                        acc[i, W * g + c] += weights[i, e] * values[c]


@simt.device
def clear(acc, D: Constant):
    """Set this thread's part of the output to zero."""
    for i in range(OUT_ROWS):
        for c in range(D // 8):
            acc[i, c] = 0.0


@simt.device
def write_row(out, row, col, acc, i, inverse, G: Constant, W: Constant, DTYPE: Constant):
    """W neighbouring columns of one row of the output."""
    if W == 8:
        cuda.vstore(
            out,
            (row, col),
            cuda.vec(
                DTYPE(acc[i, W * G] * inverse),
                DTYPE(acc[i, W * G + 1] * inverse),
                DTYPE(acc[i, W * G + 2] * inverse),
                DTYPE(acc[i, W * G + 3] * inverse),
                DTYPE(acc[i, W * G + 4] * inverse),
                DTYPE(acc[i, W * G + 5] * inverse),
                DTYPE(acc[i, W * G + 6] * inverse),
                DTYPE(acc[i, W * G + 7] * inverse),
            ),
        )
    else:
        cuda.vstore(
            out,
            (row, col),
            cuda.vec(
                DTYPE(acc[i, 0] * inverse),
                DTYPE(acc[i, 1] * inverse),
                DTYPE(acc[i, 2] * inverse),
                DTYPE(acc[i, 3] * inverse),
            ),
        )


@simt.device
def write_output(
    out, acc, factors, first, q_row0, seq, warp_row, lane, D: Constant, DTYPE: Constant
):  # fmt: skip
    """This thread's rows and columns of the output, times the factors of their rows."""
    for i in range(OUT_ROWS):
        q_row = warp_row + 4 * i + lane // 8
        inverse = factors[q_row]
        if q_row0 + q_row < seq:
            to = first + q_row0 + q_row
            col = lane % 8 * min(D // 8, VECTOR)
            write_row(out, to, col, acc, i, inverse, 0, min(D // 8, VECTOR), DTYPE)
            if D == 128:
                write_row(out, to, 64 + col, acc, i, inverse, 1, VECTOR, DTYPE)


@simt.device
def correct(acc, factors, warp_row, lane, D: Constant):
    """Multiply this thread's part of the output by the factors of its rows in shared memory."""
    for i in range(OUT_ROWS):
        correction = factors[warp_row + 4 * i + lane // 8]
        for c in range(D // 8):
            acc[i, c] *= correction


@simt.kernel
def block_tile(
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
    s_tile = cuda.shared.array((BLOCK, PITCH), float32)  # scores, then weights
    factors = cuda.shared.array(BLOCK, float32)
    acc = cuda.local.array((OUT_ROWS, D // 8), float32)
    s = cuda.local.array((SCORE_ROWS, SCORE_COLS), float32)
    scores = cuda.local.array(OWN, float32)

    tid = cuda.threadIdx.x
    lane = tid % 32
    row = tid // 2
    half = tid % 2
    warp_row = 16 * (tid // 32)
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
        start_copies(k_tile, v_tile, 0, k, v, first, 0, seq, D)
        clear(acc, D)
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
                start_copies(k_tile, v_tile, 1 - stage, k, v, first, kv_row0 + BLOCK, seq, D)

        with simt.phase("scores"):
            multiply_keys(s, q_tile, k_tile, stage, warp_row, lane, D)
            store_scores(s_tile, s, warp_row, lane)
            cuda.syncwarp()
        with simt.phase("softmax"):
            most = visible_scores(s_tile, scores, row, half, limit - kv_row0, BLOCK, SHARE)
            top = max(m, most * scale_log2)
            # a row that has seen no key yet: infinity minus infinity would be NaN
            base = ct.select(top == EMPTY, 0.0, top)
            factor = ct.exp2(m - base)
            m = top
            l = l * factor + exponentials(scores, scale_log2, base, OWN)
            store_weights(s_tile, scores, row, half)
            factors[row] = factor
            cuda.syncwarp()
        with simt.phase("output"):
            correct(acc, factors, warp_row, lane, D)
            multiply_values(acc, s_tile, v_tile, stage, warp_row, lane, D, min(D // 8, VECTOR))
            # the next scores go where these weights are
            cuda.syncwarp()

    with simt.phase("write"):
        factors[row] = inverse_sum(l)
        cuda.syncwarp()
        write_output(out, acc, factors, first, q_row0, seq, warp_row, lane, D, DTYPE)


def launches(problem: Problem, tensors: Tensors, stage: str) -> list[Launch]:
    """One launch: heads by query tiles."""
    if stage in r08_block_tile_stages.STAGES:
        return r08_block_tile_stages.launches(problem, tensors, stage)
    arguments = paired_rows.arguments(problem, tensors)
    return [Launch(block_tile, paired_rows.grid(problem), THREADS, arguments)]


def plans(problem: Problem, stage: str) -> list[LaunchPlan]:
    """Full tiles, whatever is masked."""
    if stage in r08_block_tile_stages.STAGES:
        return r08_block_tile_stages.plans(problem, stage)
    tiles, D = paired_rows.query_tiles(problem), problem.D
    phases = (
        *paired_rows.copy_phases(problem),
        PhasePlan("scores", BLOCK * BLOCK, THREADS, D, tiles),
        paired_rows.softmax_phase(tiles),
        PhasePlan("output", BLOCK * D, THREADS, BLOCK, tiles),
        PhasePlan("write", BLOCK * D // VECTOR, THREADS),
    )
    shared = 5 * BLOCK * (D + PAD) * BYTES + BLOCK * PITCH * 4 + BLOCK * 4
    per_head = 3 * paired_rows.tiles_visited(problem) + tiles
    warp_barriers = THREADS // 32 * per_head * problem.heads
    return [
        paired_rows.plan(problem, "block_tile", shared, phases=phases, warp_barriers=warp_barriers)
    ]


RUNG = Rung(
    name="block_tile",
    summary="register tiles, copies during the work, one barrier per key tile",
    launches=launches,
    plans=plans,
    constant_time=True,
    options={"stage": ("register_tiles", *r08_block_tile_stages.STAGES)},
    variants=(*({"stage": name} for name in r08_block_tile_stages.STAGES), {}),
    summaries=(
        "128 threads per 64×64 tile; a row of the softmax and of P·V to a thread",
        "the next tile copied during the work: two barriers per key tile, not three",
        "a row to two threads: none idle",
        "products blocked in registers, one barrier per key tile",
    ),
)
