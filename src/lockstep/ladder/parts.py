"""Pieces that several rungs are made of: staging rows in shared memory, reductions, softmax.

Device functions are inlined where they are called, so a rung's listing shows them in place.
"""

from __future__ import annotations

from lockstep import simt
from lockstep.simt import Constant, cuda

FULL = 0xFFFFFFFF
EMPTY = float("-inf")  # the score of a key that is not seen
VECTOR = 8  # 16-bit elements of a 16-byte access


@simt.device
def stage_rows(
    tile,  # [ROWS, D or more], shared
    source,  # [B·H·S, D], global
    first,  # row of `source` that goes to row 0 of the tile
    present,  # rows there are; the others become zero
    ROWS: Constant,
    D: Constant,
    THREADS: Constant,
    DTYPE: Constant,
):
    """Copy rows into shared memory, 16 bytes per thread and instruction."""
    zero = DTYPE(0.0)
    for i in range(cuda.threadIdx.x, ROWS * (D // VECTOR), THREADS):
        row = i // (D // VECTOR)
        col = i % (D // VECTOR) * VECTOR
        if row < present:
            cuda.vstore(tile, (row, col), cuda.vload(source, (first + row, col), VECTOR))
        else:
            zeros = cuda.vec(zero, zero, zero, zero, zero, zero, zero, zero)
            cuda.vstore(tile, (row, col), zeros)


@simt.device
def dot8(a, b, total):
    """`total` plus the inner product of two vectors of eight."""
    total += a[0] * b[0]
    total += a[1] * b[1]
    total += a[2] * b[2]
    total += a[3] * b[3]
    total += a[4] * b[4]
    total += a[5] * b[5]
    total += a[6] * b[6]
    total += a[7] * b[7]
    return total


@simt.device
def warp_max(value):
    """The largest value of the warp, in every lane."""
    for hop in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL, value, 16 >> hop))
    return value


@simt.device
def warp_sum(value):
    """The sum over the warp, in every lane."""
    for hop in range(5):
        value += cuda.shfl_xor_sync(FULL, value, 16 >> hop)
    return value
