"""Transpose a matrix through shared memory, with and without a column of padding.

Run it:

    python examples/simt/transpose.py

A warp reads a row of the tile and writes a column of it. In a tile 32 floats wide all elements of a
column lie in one bank, so the warp is served one lane at a time: 32 wavefronts where one would do.
One unused element per row moves every element of a column to a bank of its own.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from lockstep import simt
from lockstep.simt import Constant, cuda, float32

TILE, ROWS = 32, 8


@simt.kernel
def transpose(x: float32[:, :], y: float32[:, :], PAD: Constant):
    tile = cuda.shared.array((TILE, TILE + PAD), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    col = cuda.blockIdx.x * TILE + tx
    row = cuda.blockIdx.y * TILE + ty
    for r in range(0, TILE, ROWS):
        if row + r < x.shape[0] and col < x.shape[1]:
            tile[ty + r, tx] = x[row + r, col]
    cuda.syncthreads()
    # the block turns around, so that neighbouring lanes still write neighbouring addresses
    col = cuda.blockIdx.y * TILE + tx
    row = cuda.blockIdx.x * TILE + ty
    for r in range(0, TILE, ROWS):
        if row + r < y.shape[0] and col < y.shape[1]:
            y[row + r, col] = tile[tx, ty + r]


def main() -> None:
    x = np.arange(200 * 300, dtype=np.float32).reshape(200, 300)
    grid = (-(-300 // TILE), -(-200 // TILE))
    table = Table("padding", "wavefronts", "bank conflicts", "global sectors")
    for pad in (0, 1):
        y = np.full((300, 200), np.nan, np.float32)
        trace = transpose[grid, (TILE, ROWS)](x, y, pad).check()
        assert np.array_equal(y, x.T)
        totals = trace.totals
        counts = (totals.shared_wavefronts, totals.bank_conflicts, totals.global_sectors)
        table.add_row(str(pad), *(f"{n:,}" for n in counts))
    Console().print(trace, table)


if __name__ == "__main__":
    main()
