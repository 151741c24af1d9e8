"""A tiled attention kernel as a workload for the machine, and its oracle.

Tiles of 45 queries by 90 keys fit nothing evenly: every loop has a tail, every guard is needed.
"""

from __future__ import annotations

import numpy as np

from lockstep import simt
from lockstep.simt import Constant, cuda, float16, float32, int32

BLOCK_Q, BLOCK_KV, THREADS = 45, 90, 256
WARPS = THREADS // 32
FULL = 0xFFFFFFFF
EMPTY = -1.0e30  # below every score


@simt.device
def warp_max(x):
    for hop in range(5):
        x = max(x, cuda.shfl_xor_sync(FULL, x, 16 >> hop))
    return x


@simt.kernel
def attention(
    q: float16[:, :],  # [B * H * S, D]
    k: float16[:, :],
    v: float16[:, :],
    out: float32[:, :],
    seq: int32,
    scale: float32,
    D: Constant,
    SHIFTED: Constant = False,  # columns shift by block, so that every shared address differs
):
    q_tile = cuda.shared.array((BLOCK_Q, D), float16)
    k_tile = cuda.shared.array((BLOCK_KV, D), float16)
    v_tile = cuda.shared.array((BLOCK_KV, D), float16)
    scores = cuda.shared.array((BLOCK_Q, BLOCK_KV), float32)
    acc = cuda.shared.array((BLOCK_Q, D), float32)
    m = cuda.shared.array(BLOCK_Q, float32)
    l = cuda.shared.array(BLOCK_Q, float32)
    rescale = cuda.shared.array(BLOCK_Q, float32)
    sums = cuda.shared.array(THREADS, float32)

    tid = cuda.threadIdx.x
    lane = tid % 32
    first_q = cuda.blockIdx.x * BLOCK_Q
    head = cuda.blockIdx.y * seq  # row of this head's first token

    with simt.phase("load q"):
        for i in range(tid, BLOCK_Q * D, THREADS):
            row = i // D
            col = i % D
            acc[row, col] = 0.0
            if first_q + row < seq:
                q_tile[row, col] = q[head + first_q + row, col]
            else:
                q_tile[row, col] = float16(0.0)
        if tid < BLOCK_Q:
            m[tid] = EMPTY
            l[tid] = 0.0

    for first_kv in range(0, seq, BLOCK_KV):
        # the previous tile's keys and scores are still being read
        cuda.syncthreads()
        with simt.phase("load kv"):
            for i in range(tid, BLOCK_KV * D, THREADS):
                row = i // D
                col = i % D
                if first_kv + row < seq:
                    k_tile[row, col] = k[head + first_kv + row, col]
                    v_tile[row, col] = v[head + first_kv + row, col]
                else:
                    k_tile[row, col] = float16(0.0)
                    v_tile[row, col] = float16(0.0)
            cuda.syncthreads()

        with simt.phase("scores"):
            for i in range(tid, BLOCK_Q * BLOCK_KV, THREADS):
                row = i // BLOCK_KV
                col = i % BLOCK_KV
                if SHIFTED:
                    col = (i + cuda.blockIdx.x) % BLOCK_KV
                score = 0.0
                for d in range(D):
                    score += q_tile[row, d] * k_tile[col, d]
                if first_kv + col < seq:
                    scores[row, col] = score * scale
                else:
                    scores[row, col] = EMPTY
            cuda.syncthreads()

        with simt.phase("softmax"):
            # one warp per row: the maximum by shuffles, the sum by a tree in shared memory
            for row0 in range(0, BLOCK_Q, WARPS):
                row = row0 + tid // 32
                largest = EMPTY
                if row < BLOCK_Q:
                    for col in range(lane, BLOCK_KV, 32):
                        largest = max(largest, scores[row, col])
                largest = warp_max(largest)
                part = 0.0
                before = EMPTY
                if row < BLOCK_Q:
                    before = m[row]
                    largest = max(largest, before)
                    for col in range(lane, BLOCK_KV, 32):
                        p = cuda.exp(scores[row, col] - largest)
                        scores[row, col] = p
                        part += p
                sums[tid] = part
                cuda.syncthreads()
                half = 16
                while half > 0:
                    if lane < half:
                        sums[tid] += sums[tid + half]
                    cuda.syncthreads()
                    half //= 2
                if lane == 0 and row < BLOCK_Q:
                    factor = cuda.exp(before - largest)
                    l[row] = l[row] * factor + sums[tid]
                    rescale[row] = factor
                    m[row] = largest
            cuda.syncthreads()

        with simt.phase("accumulate"):
            for i in range(tid, BLOCK_Q * D, THREADS):
                row = i // D
                col = i % D
                if SHIFTED:
                    col = (i + cuda.blockIdx.x) % D
                total = acc[row, col] * rescale[row]
                for kv in range(BLOCK_KV):
                    total += scores[row, kv] * v_tile[kv, col]
                acc[row, col] = total

    cuda.syncthreads()
    with simt.phase("write"):
        for i in range(tid, BLOCK_Q * D, THREADS):
            row = i // D
            col = i % D
            if first_q + row < seq:
                out[head + first_q + row, col] = acc[row, col] / l[row]


def problem(batch: int, heads: int, seq: int, dim: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v as float16 [batch * heads * seq, dim], and an output full of NaN."""
    rng = np.random.default_rng(seed)
    rows = batch * heads * seq
    q, k, v = (rng.standard_normal((rows, dim)).astype(np.float16) for _ in range(3))
    return q, k, v, np.full((rows, dim), np.nan, np.float32)


def run(q, k, v, out, seq: int, shifted: bool = False) -> simt.Trace:
    heads, dim = len(q) // seq, q.shape[1]
    grid = (-(-seq // BLOCK_Q), heads)
    return attention[grid, THREADS](q, k, v, out, seq, dim**-0.5, dim, shifted)


def oracle(q, k, v, seq: int) -> np.ndarray:
    """The same in float64."""
    dim = q.shape[1]
    q, k, v = (x.astype(np.float64).reshape(-1, seq, dim) for x in (q, k, v))
    s = q @ k.transpose(0, 2, 1) * dim**-0.5
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True) @ v).reshape(-1, dim)
