"""What the tiled rungs have in common: the phases of a block, and the walk over the tiles.

A block owns BLOCK_Q query rows and walks over tiles of BLOCK_KV keys. Everything it works on lies
in shared memory: the operands, the scores s, the weights p = exp2(s - m), and for its rows

    acc = Σ p v    m = max s    l = Σ p    over the keys seen so far
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep import simt
from lockstep.simt import Constant, cuda

from .parts import EMPTY, VECTOR, block_max, block_sum, dot8
from .rung import BYTES, SECTOR, LaunchPlan, PhasePlan, Problem


@simt.device
def start_rows(acc, m, l, ROWS: Constant, D: Constant, THREADS: Constant):
    """No key seen yet."""
    for i in range(cuda.threadIdx.x, ROWS * D, THREADS):
        acc[i // D, i % D] = 0.0
    for row in range(cuda.threadIdx.x, ROWS, THREADS):
        m[row] = EMPTY
        l[row] = 0.0


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
    """One score per thread and turn. Neighbouring lanes read keys D elements apart."""
    for i in range(cuda.threadIdx.x, BLOCK_Q * BLOCK_KV, THREADS):
        row = i // BLOCK_KV
        col = i % BLOCK_KV
        score = 0.0
        for d in range(0, D, VECTOR):
            query = cuda.vload(q_tile, (row, d), VECTOR)
            score = dot8(query, cuda.vload(k_tile, (col, d), VECTOR), score)
        seen = first_kv + col < seq
        if CAUSAL:
            seen = seen & (first_kv + col <= first_q + row)
        scores[row, col] = score * scale_log2 if seen else EMPTY


@simt.device
def softmax_by_one_thread(scores, weights, acc, m, l, rows, cols, D: Constant):
    """The online softmax of the tile's rows and cols, by thread 0; everybody else waits."""
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
def softmax_by_tree(
    scores, weights, acc, m, l, maxima, sums, rows, cols, D: Constant, THREADS: Constant
):
    """The online softmax of the tile's rows and cols, a row at a time: a thread per score, and two
    reductions over the block. `maxima` and `sums` [warps] take turns, so one barrier each will do.
    """
    for row in range(rows):
        before = m[row]
        top = EMPTY
        for col in range(cuda.threadIdx.x, cols, THREADS):
            top = max(top, scores[row, col])
        top = max(before, block_max(top, maxima, THREADS // 32))
        part = 0.0
        for col in range(cuda.threadIdx.x, cols, THREADS):
            p = cuda.exp2(scores[row, col] - top)
            weights[row, col] = p
            part += p
        part = block_sum(part, sums, THREADS // 32)
        correction = cuda.exp2(before - top)
        for d in range(cuda.threadIdx.x, D, THREADS):
            acc[row, d] *= correction
        if cuda.threadIdx.x == 0:
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
