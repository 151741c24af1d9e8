"""The common part of the tiled rungs: the phases of a block, and the loop over the tiles.

A block owns BLOCK_Q query rows and walks over tiles of BLOCK_KV keys. Everything it works on lies
in shared memory: the operands, the scores s, the weights p = exp2(s - m), and for its rows

    acc = Σ p v    m = max s    l = Σ p    over the keys seen so far
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep import simt
from lockstep.ladder.rung import BYTES, LaunchPlan, PhasePlan, Problem
from lockstep.simt import Constant, cuda
from lockstep.simt.types import SECTOR

from .rows import EMPTY, VECTOR, dot8


@simt.device
def start_rows(acc, m, l, ROWS: Constant, D: Constant, THREADS: Constant):
    """Set m, l and acc of every row to those of a row that has seen no key."""
    for i in range(cuda.threadIdx.x, ROWS * D, THREADS):
        acc[i // D, i % D] = 0.0
    for row in range(cuda.threadIdx.x, ROWS, THREADS):
        m[row] = EMPTY
        l[row] = 0.0


@simt.device
def masked(score, q_idx, kv_idx, seq, scale_log2, CAUSAL: Constant):
    """The score in log2 units, or minus infinity where it is not seen."""
    seen = kv_idx < seq
    if CAUSAL:
        seen = seen & (kv_idx <= q_idx)
    return score * scale_log2 if seen else EMPTY


@simt.device
def score_elements(
    scores,  # [BLOCK_Q, BLOCK_KV]
    q_tile,
    k_tile,
    first_q,
    first_kv,
    seq,
    scale_log2,
    BLOCK_Q: Constant,
    BLOCK_KV: Constant,
    D: Constant,
    THREADS: Constant,
    CAUSAL: Constant,
):
    """A key and three queries, a third of the tile apart, per thread and turn.

    Neighbouring lanes read keys D elements apart, which often lie in the same banks.
    """
    for i in range(cuda.threadIdx.x, BLOCK_Q // 3 * BLOCK_KV, THREADS):
        a = i // BLOCK_KV
        b = a + BLOCK_Q // 3
        c = b + BLOCK_Q // 3
        col = i % BLOCK_KV
        score_a = 0.0
        score_b = 0.0
        score_c = 0.0
        for d in range(0, D, VECTOR):
            key = cuda.vload(k_tile, (col, d), VECTOR)
            score_a = dot8(cuda.vload(q_tile, (a, d), VECTOR), key, score_a)
            score_b = dot8(cuda.vload(q_tile, (b, d), VECTOR), key, score_b)
            score_c = dot8(cuda.vload(q_tile, (c, d), VECTOR), key, score_c)
        kv_idx = first_kv + col
        scores[a, col] = masked(score_a, first_q + a, kv_idx, seq, scale_log2, CAUSAL)
        scores[b, col] = masked(score_b, first_q + b, kv_idx, seq, scale_log2, CAUSAL)
        scores[c, col] = masked(score_c, first_q + c, kv_idx, seq, scale_log2, CAUSAL)


@simt.device
def softmax_by_one_thread(scores, weights, acc, m, l, rows, cols, D: Constant):
    """The online softmax of rows × cols scores, by thread 0; the other threads wait."""
    if cuda.threadIdx.x == 0:
        for row in range(rows):
            before = m[row]
            top = before
            for col in range(cols):
                top = max(top, scores[row, col])
            part = 0.0
            for col in range(cols):
                p = cuda.exp2(scores[row, col] - top)
                weights[row, col] = p
                part += p
            correction = cuda.exp2(before - top)
            for d in range(D):
                acc[row, d] *= correction
            l[row] = l[row] * correction + part
            m[row] = top


@simt.device
def add_values_by_column(acc, weights, v_tile, rows, cols, D: Constant, THREADS: Constant):
    """acc += weights v, row after row, a thread for each of the D columns: the others idle."""
    for row in range(rows):
        for col in range(cuda.threadIdx.x, D, THREADS):
            total = acc[row, col]
            for kv in range(cols):
                total += weights[row, kv] * v_tile[kv, col]
            acc[row, col] = total


@simt.device
def write_rows(
    out,
    acc,
    l,
    first,  # row of `out` that row 0 goes to
    present,  # rows there are
    ROWS: Constant,
    D: Constant,
    THREADS: Constant,
    DTYPE: Constant,
):
    """out = acc / l, four elements per thread and instruction."""
    for i in range(cuda.threadIdx.x, ROWS * (D // 4), THREADS):
        row = i // (D // 4)
        col = i % (D // 4) * 4
        if row < present:
            inverse = 1.0 / l[row]
            part = cuda.vload(acc, (row, col), 4)
            packed = cuda.vec(
                DTYPE(part.x * inverse),
                DTYPE(part.y * inverse),
                DTYPE(part.z * inverse),
                DTYPE(part.w * inverse),
            )
            cuda.vstore(out, (first + row, col), packed)


@dataclass(frozen=True)
class Walk:
    """Which KV tiles the blocks of one head visit: all, or with a causal mask those that their
    last row sees."""

    tiles: tuple[int, ...]  # per query tile
    kv_rows: tuple[int, ...]  # rows of K in them

    @property
    def q_tiles(self) -> int:
        return len(self.tiles)


def walk(problem: Problem, block_q: int, block_kv: int) -> Walk:
    """The tiles of one head, in closed form."""
    S = problem.S
    ends = [min(S, (t + 1) * block_q) if problem.causal else S for t in range(-(-S // block_q))]
    tiles = tuple(-(-end // block_kv) for end in ends)
    return Walk(tiles, tuple(min(S, n * block_kv) for n in tiles))


def tiled_plan(
    problem: Problem,
    kernel: str,
    grid: tuple[int, ...],
    block: int,
    walked: Walk,
    shared_bytes: int,
    phases: tuple[PhasePlan, ...],
    barriers_per_tile: int,
) -> LaunchPlan:
    """The plan of a kernel whose blocks load their queries once, their tiles of K and V as they
    walk, write their rows, and meet once more between the last tile and the writing."""
    heads, D = problem.heads, problem.D
    loads = (problem.S + 2 * sum(walked.kv_rows)) * D * BYTES * heads
    stores = problem.S * D * BYTES * heads
    return LaunchPlan(
        kernel=kernel,
        grid=grid,
        block=block,
        shared_bytes=shared_bytes,
        phases=phases,
        iterations=max(walked.tiles),
        barriers=(sum(walked.tiles) * barriers_per_tile + walked.q_tiles) * heads,
        load_bytes=loads,
        store_bytes=stores,
        load_sectors=loads // SECTOR,
        store_sectors=stores // SECTOR,
    )
