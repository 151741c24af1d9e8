"""A 64 x 64 tile on warp matrix fragments, each warp on its own 16 rows: the three steps of a tile.

Warp w of the block owns rows 16w to 16w + 15 in both products and in the softmax between them, so
scores and weights pass through shared memory behind barriers of the warp alone. The output stays in
fragments. Which elements of a fragment a lane holds is up to the hardware; to correct row r of it
by a factor, the factor is written sixteen times side by side and loaded as a fragment of its own.

All steps are constant-time.
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.rung import BYTES, PhasePlan, Problem
from lockstep.simt import Constant, ct, cuda, wmma

from . import paired_rows
from .paired_rows import BLOCK, OWN, PAD, PITCH, SHARE, THREADS, inverse_sum
from .row_shares import (
    FRAGMENT,
    exponentials,
    rounded8,
    spread_row,
    store_weights,
    visible_scores,
)
from .rows import EMPTY, VECTOR

WIDTH = BLOCK  # columns of the output that are written at a time


@simt.device
def clear(acc, D: Constant):
    """Set the warp's rows of the output to zero."""
    for n in range(D // 16):
        acc[n] = wmma.fill(0.0)


@simt.device
def multiply_keys(s, s_tile, q_tile, k_tile, stage, warp_row, D: Constant):
    """The warp's 16 rows of Q·Kᵀ into shared memory."""
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


@simt.device
def new_maximum(s_tile, scores, row, half, seen, m, scale_log2):
    """This thread's half of a row into registers; returns the maximum m of the row over the keys
    before and the first `seen` of these."""
    return max(m, visible_scores(s_tile, scores, row, half, seen, BLOCK, SHARE) * scale_log2)


@simt.device
def sum_weights(s_tile, p_tile, scores, row, half, m, top, l, scale_log2, DTYPE: Constant):
    """Weights of this thread's half of a row, and the factor that corrects what came before, into
    shared memory; returns the sum l over this half. m and top: the maximum before and now."""
    # a row that has seen no key yet: infinity minus infinity would be NaN
    base = ct.select(top == EMPTY, 0.0, top)
    factor = ct.exp2(m - base)
    l = l * factor + exponentials(scores, scale_log2, base, OWN)
    store_weights(p_tile, scores, row, half, BLOCK, SHARE, DTYPE)
    spread_row(s_tile, row, half, factor, SHARE)
    cuda.syncwarp()
    return l


@simt.device
def correct(acc, s_tile, warp_row, D: Constant):
    """Multiply the warp's rows of the output by the factors in shared memory."""
    factors = wmma.load_c(s_tile, (warp_row, 0))
    for n in range(D // 16):
        acc[n] = acc[n] * factors


@simt.device
def multiply_values(acc, p_tile, v_tile, stage, warp_row, D: Constant):
    """Add the warp's 16 rows of P·V to the output."""
    for kv in range(0, BLOCK, 16):
        p = wmma.load_a(p_tile, (warp_row, kv))
        for n in range(D // 16):
            values = wmma.load_b(v_tile, (stage, kv, 16 * n))
            acc[n] = wmma.mma_sync(p, values, acc[n])


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


@simt.device
def write_output(
    out, acc, s_tile, first, q_row0, seq, warp_row, row, half, l, D: Constant, DTYPE: Constant
):
    """The warp's rows of the output over their sums, WIDTH columns at a time."""
    cuda.syncwarp()
    spread_row(s_tile, row, half, inverse_sum(l), SHARE)
    cuda.syncwarp()
    correct(acc, s_tile, warp_row, D)
    for col0 in range(0, D, WIDTH):
        cuda.syncwarp()
        for n in range(min(D, WIDTH) // 16):
            wmma.store(s_tile, (warp_row, 16 * n), acc[col0 // 16 + n])
        cuda.syncwarp()
        write_rows(out, s_tile, first, q_row0, col0, seq, warp_row, min(D, WIDTH), DTYPE)


def shared_bytes(D: int) -> int:
    """Q, two stages of K and V, scores and weights."""
    return 5 * BLOCK * (D + PAD) * BYTES + BLOCK * PITCH * (4 + BYTES)


def products_per_tile(D: int) -> int:
    """Fragment products of one key tile."""
    return 2 * (BLOCK // 16) ** 2 * (D // 16)


def tile_phases(problem: Problem, visits: int) -> tuple[PhasePlan, PhasePlan, PhasePlan]:
    """The steps of a tile, by a block that takes `visits` of them. A fragment product is the work
    of 32 threads."""
    s_fragments, o_fragments = (BLOCK // 16) ** 2, BLOCK // 16 * problem.D // 16
    return (
        PhasePlan("scores", 32 * s_fragments, THREADS, problem.D // 16, visits),
        paired_rows.softmax_phase(visits),
        PhasePlan("output", 32 * o_fragments, THREADS, BLOCK // 16, visits),
    )


def warp_barriers(problem: Problem) -> int:
    """The barriers of all warps: two per key tile; for every query tile, two and two for each WIDTH
    columns."""
    written = paired_rows.query_tiles(problem) * (2 + 2 * -(-problem.D // WIDTH))
    return THREADS // 32 * (2 * paired_rows.tiles_visited(problem) + written) * problem.heads
