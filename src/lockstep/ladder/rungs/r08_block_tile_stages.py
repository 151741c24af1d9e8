"""The way to block_tile, in three stages of one kernel: a block per 64 x 64 tile, rows by threads.

    one_thread     a thread per row at the softmax and at P·V, so half of the block waits there; one
                   buffer each for K and V; three barriers per key tile: K in, scores in, V in
    double_buffer  the next K and V are copied while these are worked on; two barriers per tile:
                   copies in, scores in
    two_threads    two threads per row, every other key each; they share the maximum by a shuffle
                   and add up their outputs at the end

From there, block_tile keeps a row in one warp all the way and blocks both products in registers.
All stages are constant-time.

    lockstep trace block_tile --stage one_thread --seq 256 --head-dim 64
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lockstep import simt
from lockstep.ladder.parts import paired_rows
from lockstep.ladder.parts.paired_rows import BLOCK, PAD, THREADS, blank_copied, copy, start_copies
from lockstep.ladder.parts.rows import EMPTY, FULL, VECTOR, dot8, row_add8, scaled8
from lockstep.ladder.rung import BYTES, Launch, LaunchPlan, PhasePlan, Problem, Tensors
from lockstep.simt import Constant, Secret, ct, cuda, float32, int32

PITCH = BLOCK + 1  # floats of a row of scores: 32 rows of one column lie in 32 banks


class Stage(NamedTuple):
    """The settings in which one stage differs from the others."""

    share: int  # threads of a row
    buffers: int  # for K, and for V


STAGES = {
    "one_thread": Stage(1, 1),
    "double_buffer": Stage(1, 2),
    "two_threads": Stage(2, 2),
}


@simt.device
def clear(acc, D: Constant):
    """Set this thread's part of the output to zero."""
    for d in range(D):
        acc[d] = 0.0


@simt.device
def correct(acc, factor, D: Constant):
    """Multiply this thread's part of the output by a factor."""
    for d in range(D):
        acc[d] *= factor


@simt.device
def score_tile(s_tile, q_tile, k_tile, buffer, D: Constant):
    """The 64 x 64 scores: a thread has one key and every other query."""
    tid = cuda.threadIdx.x
    col = tid % BLOCK
    for i in range(BLOCK * BLOCK // THREADS):
        row = i * (THREADS // BLOCK) + tid // BLOCK
        s = 0.0
        for d in range(0, D, VECTOR):
            query = cuda.vload(q_tile, (0, row, d), VECTOR)
            s = dot8(query, cuda.vload(k_tile, (buffer, col, d), VECTOR), s)
        s_tile[row, col] = s


@simt.device
def row_max(s_tile, row, part, seen, SHARE: Constant):
    """The largest score of a row among its first `seen` keys, in all threads of the row."""
    most = EMPTY
    for j in range(BLOCK // SHARE):
        kv = SHARE * j + part
        most = max(most, ct.select(kv < seen, s_tile[row, kv], EMPTY))
    if SHARE == 2:
        most = max(most, cuda.shfl_xor_sync(FULL, most, 1))
    return most


@simt.device
def add_row(
    acc, s_tile, v_tile, buffer, row, part, seen, scale_log2, base, D: Constant, SHARE: Constant
):  # fmt: skip
    """acc += Σ p v over this thread's keys of the row; returns Σ p."""
    total = 0.0
    for j in range(BLOCK // SHARE):
        kv = SHARE * j + part
        s = ct.select(kv < seen, s_tile[row, kv], EMPTY)
        p = ct.exp2(s * scale_log2 - base)
        total += p
        for d in range(0, D, VECTOR):
            row_add8(acc, d, p, cuda.vload(v_tile, (buffer, kv, d), VECTOR))
    return total


@simt.device
def write_row(
    out, acc, l, first, q_row, seq, part, D: Constant, SHARE: Constant, DTYPE: Constant
):  # fmt: skip
    """A row of the output over its sum, by the threads of the row."""
    if SHARE == 2:
        l += cuda.shfl_xor_sync(FULL, l, 1)
        for d in range(D):
            acc[d] += cuda.shfl_xor_sync(FULL, acc[d], 1)
    # division has a slow path that depends on its operands, rsqrt squared has none
    root = cuda.rsqrt(l)
    inverse = ct.select(l == 0.0, 0.0, root * root)
    if q_row < seq:
        for d in range(0, D, VECTOR):
            if d // VECTOR % SHARE == part:
                cuda.vstore(out, (first + q_row, d), scaled8(acc, d, inverse, DTYPE))


@simt.kernel
def block_tile_by_rows(
    q: Secret,  # [B·H·S, D]
    k: Secret,
    v: Secret,
    out,
    seq: int32,
    length: Secret[int32],  # keys that count
    scale_log2: float32,
    D: Constant,
    CAUSAL: Constant,
    SHARE: Constant,  # threads of a row
    BUFFERS: Constant,  # for K, and for V
    DTYPE: Constant,
):
    q_tile = cuda.shared.array((1, BLOCK, D + PAD), DTYPE)
    k_tile = cuda.shared.array((BUFFERS, BLOCK, D + PAD), DTYPE)
    v_tile = cuda.shared.array((BUFFERS, BLOCK, D + PAD), DTYPE)
    s_tile = cuda.shared.array((BLOCK, PITCH), float32)
    acc = cuda.local.array(D, float32)

    row = cuda.threadIdx.x // SHARE
    part = cuda.threadIdx.x % SHARE
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
        copy(q_tile, 0, q, first, q_row0, seq, D)
        if BUFFERS == 2:
            start_copies(k_tile, v_tile, 0, k, v, first, 0, seq, D)
        clear(acc, D)
        cuda.syncthreads()
    m = EMPTY
    l = 0.0

    for kv_tile in range(kv_tiles):
        buffer = kv_tile % BUFFERS
        kv_row0 = BLOCK * kv_tile
        with simt.phase("load kv"):
            if BUFFERS == 2:
                cuda.pipeline_wait_prior(0)
                blank_copied(v_tile, buffer, length - kv_row0, D, DTYPE)
            else:
                copy(k_tile, 0, k, first, kv_row0, seq, D)
            cuda.syncthreads()
            if BUFFERS == 2:  # noqa: SIM102 - known when compiled, unlike what follows
                if kv_tile + 1 < kv_tiles:
                    start_copies(k_tile, v_tile, 1 - buffer, k, v, first, kv_row0 + BLOCK, seq, D)

        with simt.phase("scores"):
            score_tile(s_tile, q_tile, k_tile, buffer, D)
            cuda.syncthreads()
        if BUFFERS == 1:
            with simt.phase("load kv"):
                copy(v_tile, 0, v, first, kv_row0, seq, D)
                blank_copied(v_tile, 0, length - kv_row0, D, DTYPE)
                cuda.syncthreads()
        if row < BLOCK:
            with simt.phase("softmax"):
                top = max(m, row_max(s_tile, row, part, limit - kv_row0, SHARE) * scale_log2)
                # a row that has seen no key yet: infinity minus infinity would be NaN
                base = ct.select(top == EMPTY, 0.0, top)
                factor = ct.exp2(m - base)
                m = top
                correct(acc, factor, D)
            with simt.phase("output"):
                l = l * factor + add_row(
                    acc, s_tile, v_tile, buffer, row, part, limit - kv_row0, scale_log2, base,
                    D, SHARE,
                )  # fmt: skip

    with simt.phase("write"):
        if row < BLOCK:
            write_row(out, acc, l, first, q_row0 + row, seq, part, D, SHARE, DTYPE)


def launches(problem: Problem, tensors: Tensors, stage: str) -> list[Launch]:
    """One launch: heads by query tiles."""
    share, buffers = STAGES[stage]
    arguments = paired_rows.arguments(problem, tensors) | {"SHARE": share, "BUFFERS": buffers}
    return [Launch(block_tile_by_rows, paired_rows.grid(problem), THREADS, arguments)]


def plans(problem: Problem, stage: str) -> list[LaunchPlan]:
    """Full tiles, whatever is masked."""
    share, buffers = STAGES[stage]
    tiles, D = paired_rows.query_tiles(problem), problem.D
    own = BLOCK // share
    phases = (
        *paired_rows.copy_phases(problem),
        PhasePlan("scores", BLOCK * BLOCK, THREADS, D, tiles),
        PhasePlan("softmax", share * BLOCK, THREADS, own + D, tiles),
        PhasePlan("output", share * BLOCK, THREADS, own * D, tiles),
        PhasePlan("write", share * BLOCK, THREADS, D // VECTOR // share),
    )
    shared = (1 + 2 * buffers) * BLOCK * (D + PAD) * BYTES + BLOCK * PITCH * 4
    plan = paired_rows.plan(problem, "block_tile_by_rows", shared, phases=phases)
    per_tile = 3 if buffers == 1 else 2
    visited = paired_rows.tiles_visited(problem)
    return [
        replace(
            plan,
            barriers=(per_tile * visited + tiles) * problem.heads,
            # a thread writes 16 bytes of its row at a time: half a sector
            store_sectors=problem.rows * D // VECTOR,
        )
    ]
