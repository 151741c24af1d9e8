"""Kernels of a few lines that put a claim about the programming model to the test."""

from __future__ import annotations

from lockstep import simt
from lockstep.simt import Constant, cuda, float32, wmma


@simt.kernel
def pass_to_the_next_lane(x: float32[:], out: float32[:], MEET: Constant):
    """Lanes of one warp exchange values through shared memory, with or without a syncwarp."""
    values = cuda.shared.array(32, float32)
    values[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    if MEET:
        cuda.syncwarp()
    out[cuda.threadIdx.x] = values[(cuda.threadIdx.x + 1) % 32]


@simt.kernel
def store_a_fragment(out: float32[:, :], WIDTH: Constant):
    """One fragment of scores into rows of WIDTH floats."""
    scores = cuda.shared.array((16, WIDTH), float32)
    wmma.store(scores, (0, 0), wmma.fill(1.0))
    cuda.syncwarp()
    for row in range(16):
        if cuda.threadIdx.x < 16:
            out[row, cuda.threadIdx.x] = scores[row, cuda.threadIdx.x]
