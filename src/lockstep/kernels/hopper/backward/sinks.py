"""The gradient of sinks: -Σ_rows exp(sink - lse) · delta, in fp64.

The launch that prepares rows sums up each query tile (`sum_tile`), and one more launch the tiles of
each head, of the whole batch (`sum_sinks`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lockstep import numerics
from lockstep.kernels.launch import unspecialized

LOG2E, LN2 = tl.constexpr(numerics.LOG2E), tl.constexpr(numerics.LN2)


@triton.jit
def _exp2(x):
    """2^x in fp64, to 2^-36 of it: the library's has a branch for large exponents, and x is a
    secret of calls in constant time."""
    near = tl.minimum(tl.maximum(x, -1100.0), 1100.0)  # of NaN, a number
    whole = tl.floor(near + 0.5)
    z = (near - whole) * LN2
    p = 1.0 + z * (1.0 / 9)
    for k in tl.static_range(8):
        p = 1.0 + p * z * (1.0 / (8 - k))
    # Each of two factors has an exponent that fp64 has.
    n = whole.to(tl.int64)
    half = n >> 1
    left = ((half + 1023) << 52).to(tl.float64, bitcast=True)
    right = ((n - half + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x == x, p * left * right, x)


@triton.jit
def sum_tile(sink_ptr, m, log2_l, delta, unit, unit_rest):
    """Σ exp(sink - lse) · delta over the rows of a tile, whose statistics are m, log2 l and delta.
    `unit` + `unit_rest` is the unit in fp64."""
    sink = tl.load(sink_ptr).to(tl.float64)
    exact_unit = tl.cast(unit, tl.float64) + tl.cast(unit_rest, tl.float64)
    lse2 = m.to(tl.float64) * exact_unit + log2_l.to(tl.float64)
    share = _exp2(sink * LOG2E - lse2) * delta.to(tl.float64)
    # A sink of -inf is none, whatever a row holds.
    return tl.sum(tl.where(sink == float("-inf"), 0.0, share), 0)


@unspecialized(triton.jit)
def sum_sinks(sink_sums_ptr, dsinks_ptr, n_tiles, H, q_slots, TILES: tl.constexpr):
    """One program per head, which has `n_tiles` tiles in the whole batch, TILES of them at once.
    This one starts before the kernel before has ended."""
    gdc_wait()
    head = tl.program_id(0)
    total = tl.zeros([TILES], tl.float64)
    for first in range(0, n_tiles, TILES):
        i = first + tl.arange(0, TILES)
        tile = (i // q_slots * H + head) * q_slots + i % q_slots
        total -= tl.load(sink_sums_ptr + tile, mask=i < n_tiles, other=0.0)
    dsink = tl.sum(total, 0)
    tl.store(dsinks_ptr + head, dsink.to(dsinks_ptr.dtype.element_ty))
