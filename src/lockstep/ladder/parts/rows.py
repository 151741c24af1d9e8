"""Pieces that several rungs are made of: rows in shared memory and in registers, reductions.

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
def row_dot8(row, d, b, total):
    """The same with elements d to d + 7 of a row in registers."""
    total += row[d] * b[0]
    total += row[d + 1] * b[1]
    total += row[d + 2] * b[2]
    total += row[d + 3] * b[3]
    total += row[d + 4] * b[4]
    total += row[d + 5] * b[5]
    total += row[d + 6] * b[6]
    total += row[d + 7] * b[7]
    return total


@simt.device
def row_add8(row, d, factor, b):
    """row[d : d + 8] += factor * b, for a row in registers."""
    row[d] += factor * b[0]
    row[d + 1] += factor * b[1]
    row[d + 2] += factor * b[2]
    row[d + 3] += factor * b[3]
    row[d + 4] += factor * b[4]
    row[d + 5] += factor * b[5]
    row[d + 6] += factor * b[6]
    row[d + 7] += factor * b[7]


@simt.device
def scaled8(row, d, factor, DTYPE: Constant):
    """row[d : d + 8] * factor, rounded, as a vector to store."""
    return cuda.vec(
        DTYPE(row[d] * factor),
        DTYPE(row[d + 1] * factor),
        DTYPE(row[d + 2] * factor),
        DTYPE(row[d + 3] * factor),
        DTYPE(row[d + 4] * factor),
        DTYPE(row[d + 5] * factor),
        DTYPE(row[d + 6] * factor),
        DTYPE(row[d + 7] * factor),
    )


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


@simt.device
def rows_max(value, partial, WARPS_PER_ROW: Constant):
    """The largest value of the warps that share a row, in every thread of them: each of the warps
    reduces their results for itself. `partial` [warps] may be written after the next barrier."""
    warp = cuda.threadIdx.x // 32
    value = warp_max(value)
    if cuda.threadIdx.x % 32 == 0:
        partial[warp] = value
    cuda.syncthreads()
    first = warp // WARPS_PER_ROW * WARPS_PER_ROW
    value = partial[first]
    for other in range(1, WARPS_PER_ROW):
        value = max(value, partial[first + other])
    return value


@simt.device
def rows_sum(value, partial, WARPS_PER_ROW: Constant):
    """The sum over the warps that share a row; otherwise like `rows_max`."""
    warp = cuda.threadIdx.x // 32
    value = warp_sum(value)
    if cuda.threadIdx.x % 32 == 0:
        partial[warp] = value
    cuda.syncthreads()
    first = warp // WARPS_PER_ROW * WARPS_PER_ROW
    value = partial[first]
    for other in range(1, WARPS_PER_ROW):
        value += partial[first + other]
    return value
