"""A kernel to make your own: every row of a matrix, normalised by its largest magnitude.

Run it, then change it; the machine tells you what you did:

    python examples/simt/your_kernel.py
    lockstep trace examples/simt/your_kernel.py:normalise \\
        -a x=64x100 -a y=64x100 --grid 16 --block 128

Things to try, from easy to less so:

1. Delete `cuda.syncwarp()`. Which lines race, and which threads?
2. Give the rows to threads instead of warps. What happens to `sectors`?
3. Replace shared memory by `cuda.shfl_xor_sync`. How many wavefronts are left?
4. Mark the matrix secret, `x: simt.Secret[float32[:, :]]`. The front end will show you the branch
   that gives it away, and how the secret got there; `ct.select` is the way out.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console

from lockstep import simt
from lockstep.simt import cuda, float32

WARPS = 4


@simt.device
def warp_max(values, warp, lane):
    """The largest of the 32 values of a warp, found in shared memory."""
    step = 16
    while step > 0:
        if lane < step:
            values[warp, lane] = max(values[warp, lane], values[warp, lane + step])
        cuda.syncwarp()
        step //= 2
    return values[warp, 0]


@simt.kernel
def normalise(x: float32[:, :], y: float32[:, :]):
    largest = cuda.shared.array((WARPS, 32), float32)
    warp = cuda.warpid
    lane = cuda.laneid
    row = cuda.blockIdx.x * WARPS + warp
    if row >= x.shape[0]:
        return

    with simt.phase("find"):
        most = 0.0
        for col in range(lane, x.shape[1], 32):
            most = max(most, abs(x[row, col]))
        largest[warp, lane] = most
        cuda.syncwarp()
        most = warp_max(largest, warp, lane)

    with simt.phase("scale"):
        if most > 0.0:
            for col in range(lane, x.shape[1], 32):
                y[row, col] = x[row, col] / most


def main() -> None:
    x = np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)
    y = np.full_like(x, np.nan)
    trace = normalise[64 // WARPS, 32 * WARPS](x, y)
    Console().print(trace)
    wanted = x / np.abs(x).max(axis=1, keepdims=True)
    print("right" if np.array_equal(y, wanted) else "wrong")


if __name__ == "__main__":
    main()
