"""A kernel with a known flaw: a column of shared memory read by a warp, all in one bank."""

from __future__ import annotations

import numpy as np

from lockstep import simt
from lockstep.simt import cuda, float32


@simt.kernel
def transposed(x: float32[:, :], y: float32[:, :]):
    tile = cuda.shared.array((32, 32), float32)
    row = cuda.threadIdx.x // 32
    col = cuda.threadIdx.x % 32
    for r in range(row, 32, 4):
        tile[r, col] = x[r, col]
    cuda.syncthreads()
    for r in range(row, 32, 4):
        y[r, col] = tile[col, r]


def traced():
    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    y = np.full_like(x, np.nan)
    return transposed[1, 128].trace(x, y, record=0)
