"""row_per_thread: one thread owns one query row, from its query to its output; constant-time.

What changed from naive: one kernel and an online softmax, so no score ever reaches memory. The 256
rows of a block share tiles of 32 keys and values in shared memory, where all lanes read the same
element at the same time. Query, output row and softmax state live in registers:

    acc = Σ exp2(s - m) v    l = Σ exp2(s - m)    over the keys seen so far, out = acc / l

The price is parallelism: a row is the work of a single thread, and there are only B·H·S of them.

Constant-time: which keys count is decided by `ct.select` with a secret length, every trip count is
that of the public S, and the division becomes `rsqrt` squared, which has no slow path.

    lockstep trace row_per_thread --seq 256 --head-dim 32 --length 100
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.parts.rows import EMPTY, VECTOR, row_add8, row_dot8, scaled8, stage_rows
from lockstep.ladder.rung import (
    BYTES,
    Launch,
    LaunchPlan,
    PhasePlan,
    Problem,
    Rung,
    Tensors,
    usual_arguments,
)
from lockstep.simt import Constant, Secret, ct, cuda, float32, int32
from lockstep.simt.types import SECTOR

THREADS = 256
BLOCK_KV = 32
GROUP = 8  # keys between two corrections of acc


@simt.kernel
def row_per_thread(
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
    k_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    v_tile = cuda.shared.array((BLOCK_KV, D), DTYPE)
    q_row = cuda.local.array(D, float32)
    acc = cuda.local.array(D, float32)
    scores = cuda.local.array(GROUP, float32)

    row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    first = cuda.blockIdx.y * seq  # row of this head's first token

    with simt.phase("load q"):
        for d in range(D):
            q_row[d] = 0.0
            acc[d] = 0.0
        if row < seq:
            for d in range(0, D, VECTOR):
                part = cuda.vload(q, (first + row, d), VECTOR)
                row_add8(q_row, d, scale_log2, part)
    m = EMPTY
    l = 0.0

    for first_kv in range(0, seq, BLOCK_KV):
        # the previous tile is still being read
        cuda.syncthreads()
        with simt.phase("load kv"):
            stage_rows(k_tile, k, first + first_kv, seq - first_kv, BLOCK_KV, D, THREADS, DTYPE)
            stage_rows(v_tile, v, first + first_kv, seq - first_kv, BLOCK_KV, D, THREADS, DTYPE)
            cuda.syncthreads()
        for group in range(0, BLOCK_KV, GROUP):
            with simt.phase("scores"):
                top = m
                for j in range(GROUP):
                    s = 0.0
                    for d in range(0, D, VECTOR):
                        key = cuda.vload(k_tile, (group + j, d), VECTOR)
                        s = row_dot8(q_row, d, key, s)
                    kv_idx = first_kv + group + j
                    seen = kv_idx < length
                    if CAUSAL:
                        seen = seen & (kv_idx <= row)
                    scores[j] = ct.select(seen, s, EMPTY)
                    top = max(top, scores[j])
            with simt.phase("softmax"):
                # a row that has seen no key yet: infinity minus infinity would be NaN
                base = ct.select(top == EMPTY, 0.0, top)
                correction = ct.exp2(m - base)
                m = top
                l *= correction
                for d in range(D):
                    acc[d] *= correction
                for j in range(GROUP):
                    scores[j] = ct.exp2(scores[j] - base)
                    l += scores[j]
            with simt.phase("output"):
                for j in range(GROUP):
                    for d in range(0, D, VECTOR):
                        value = cuda.vload(v_tile, (group + j, d), VECTOR)
                        row_add8(acc, d, scores[j], value)

    with simt.phase("write"):
        root = cuda.rsqrt(l)
        inverse = ct.select(l == 0.0, 0.0, root * root)
        if row < seq:
            for d in range(0, D, VECTOR):
                cuda.vstore(out, (first + row, d), scaled8(acc, d, inverse, DTYPE))


def launches(problem: Problem, tensors: Tensors) -> list[Launch]:
    """One launch: the rows of a head in blocks of 256."""
    arguments = usual_arguments(problem, tensors) | {"length": problem.keys}
    return [Launch(row_per_thread, _grid(problem), THREADS, arguments)]


def _grid(problem: Problem) -> tuple[int, int]:
    return -(-problem.S // THREADS), problem.heads


def plans(problem: Problem) -> list[LaunchPlan]:
    """Every row takes every key, whatever is masked."""
    S, D = problem.S, problem.D
    q_tiles, heads = _grid(problem)
    tiles = -(-S // BLOCK_KV)
    groups = tiles * (BLOCK_KV // GROUP)
    loads = BYTES * D * S * (1 + 2 * q_tiles) * heads
    phases = (
        PhasePlan("load q", THREADS, THREADS, D),
        PhasePlan("load kv", 2 * BLOCK_KV * D // VECTOR, THREADS, 1, tiles),
        PhasePlan("scores", THREADS, THREADS, GROUP * D, groups),
        PhasePlan("softmax", THREADS, THREADS, GROUP + D, groups),
        PhasePlan("output", THREADS, THREADS, GROUP * D, groups),
        PhasePlan("write", THREADS, THREADS, D),
    )
    # a thread's own row, 16 bytes at a time: each 32-byte sector is asked for twice
    rows_twice = S * D // VECTOR * heads
    return [
        LaunchPlan(
            kernel="row_per_thread",
            grid=(q_tiles, heads),
            block=THREADS,
            shared_bytes=2 * BLOCK_KV * D * BYTES,
            phases=phases,
            iterations=tiles,
            barriers=2 * tiles * q_tiles * heads,
            load_bytes=loads,
            store_bytes=BYTES * D * S * heads,
            load_sectors=rows_twice + 2 * q_tiles * heads * S * D * BYTES // SECTOR,
            store_sectors=rows_twice,
        )
    ]


RUNG = Rung(
    name="row_per_thread",
    summary="one thread owns a query row; online softmax; K and V in shared memory",
    launches=launches,
    plans=plans,
    constant_time=True,
)
