"""The softmax of rows in shared memory, each shared by a few neighbouring threads.

Of SHARE threads (2 or 4) that own a row, thread `part` takes keys 4·part to 4·part + 3 of every
4·SHARE, sixteen bytes at a time. With two threads to a row, and 8 floats of padding after 64 or
128, the eight threads that are served together meet all 32 banks once.
"""

from __future__ import annotations

from lockstep import simt
from lockstep.simt import Constant, ct, cuda
from lockstep.simt.types import FRAGMENT

from .rows import EMPTY, FULL


@simt.device
def visible_scores(s_tile, scores, row, part, seen, KEYS: Constant, SHARE: Constant):
    """This thread's scores of a row into registers, and the largest of the whole row.

    Keys from `seen` on, counted from the tile's first, score -inf.
    """
    most = EMPTY
    seen -= 4 * part
    for j in range(KEYS // (4 * SHARE)):
        s = cuda.vload(s_tile, (row, 4 * SHARE * j + 4 * part), 4)
        scores[4 * j] = ct.select(4 * SHARE * j < seen, s.x, EMPTY)
        scores[4 * j + 1] = ct.select(4 * SHARE * j + 1 < seen, s.y, EMPTY)
        scores[4 * j + 2] = ct.select(4 * SHARE * j + 2 < seen, s.z, EMPTY)
        scores[4 * j + 3] = ct.select(4 * SHARE * j + 3 < seen, s.w, EMPTY)
    for j in range(KEYS // SHARE):
        most = max(most, scores[j])
    for hop in range(SHARE // 2):
        most = max(most, cuda.shfl_xor_sync(FULL, most, 1 << hop))
    return most


@simt.device
def exponentials(scores, scale_log2, base, OWN: Constant):
    """exp2(scale_log2 · s - base) for each of this thread's scores, in place; returns their sum."""
    total = 0.0
    for j in range(OWN):
        scores[j] = ct.exp2(scores[j] * scale_log2 - base)
        total += scores[j]
    return total


@simt.device
def store_weights(
    p_tile, scores, row, part, KEYS: Constant, SHARE: Constant, DTYPE: Constant
):  # fmt: skip
    """This thread's part of a row, rounded to what fragments take."""
    for j in range(KEYS // (4 * SHARE)):
        weights = cuda.vec(
            DTYPE(scores[4 * j]),
            DTYPE(scores[4 * j + 1]),
            DTYPE(scores[4 * j + 2]),
            DTYPE(scores[4 * j + 3]),
        )
        cuda.vstore(p_tile, (row, 4 * SHARE * j + 4 * part), weights)


@simt.device
def spread_row(s_tile, row, part, value, SHARE: Constant):
    """Sixteen copies of `value` at the start of a row, to be loaded as a fragment of factors.

    They take the place of scores that the same thread has read.
    """
    for j in range(FRAGMENT // (4 * SHARE)):
        copies = cuda.vec(value, value, value, value)
        cuda.vstore(s_tile, (row, 4 * SHARE * j + 4 * part), copies)


@simt.device
def rounded8(s_tile, row, col, DTYPE: Constant):
    """Eight neighbouring floats, rounded, as a vector to store."""
    low = cuda.vload(s_tile, (row, col), 4)
    high = cuda.vload(s_tile, (row, col + 4), 4)
    return cuda.vec(
        DTYPE(low.x),
        DTYPE(low.y),
        DTYPE(low.z),
        DTYPE(low.w),
        DTYPE(high.x),
        DTYPE(high.y),
        DTYPE(high.z),
        DTYPE(high.w),
    )
