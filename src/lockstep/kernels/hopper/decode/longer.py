"""Packed sequences with more queries than the call says that any has.

They have no tiles, for which there might be no room. Their results are NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that are written together.
_AT_ONCE: tl.constexpr = tl.constexpr(512)


@triton.jit
def refuse_longer(out_ptr, lse_ptr, q_start, n_q, least, Hq, Dv):
    """Whether a sequence has `least` queries or more. Makes the results of one that has NaN: those
    of n_q queries from q_start on, of out [Tq, Hq, Dv] and of lse [Tq, Hq]."""
    is_longer = n_q >= least
    begin = q_start.to(tl.int64) * Hq
    n_rows = tl.where(is_longer, n_q, 0).to(tl.int64) * Hq
    _fill(lse_ptr + begin, n_rows)
    # Head dims are multiples of 8: a thread writes 16 bytes at once.
    _fill(out_ptr + tl.multiple_of(begin * Dv, 8), tl.multiple_of(n_rows * Dv, 8))
    return is_longer


@triton.jit
def _fill(to_ptr, n):
    """Write n times NaN."""
    for first in range(0, n, _AT_ONCE):
        at = first + tl.arange(0, _AT_ONCE)
        tl.store(to_ptr + at, float("nan"), mask=at < n)
