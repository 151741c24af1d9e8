"""Statistics of each row for the gradients, and the gradient of the sinks.

    m      as `Kernel` defines it, +inf for a row that sees no key: its weights are 0; NaN for a row
           whose dO is not finite, so that the gradients of every key it sees are NaN
    norm   = log2 l, and weights are 2^((s - m)·unit - log2 l); for float32 1 / l, by which they are
           multiplied, since a rounded logarithm would cost them more than a rounding
    delta  = Σ_d dO·O - dlse                             dsink = -Σ_rows exp(sink - lse) · delta

They are kept in fp32, side by side, and with the rows of one head together: [B, Hq, Sq, 4], or
[Hq, T, 4] of a packed batch, whose rows are those of one long sequence here. The fourth is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import score_of_sink
from lockstep.kernels.triton.gradient_tiles import exact_weights


@unspecialized(triton.jit)
def prepare_rows(
    out_ptr,
    dout_ptr,
    statistics_ptr,
    dlse_ptr,
    rows_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_rb,
    stride_rh,
    stride_rs,
    S,
    H,
    ALIGN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RECIPROCAL: tl.constexpr,
):
    """`stride_o*` are those of dout in units of ALIGN; `stride_r*` count rows of out and lse."""
    tiles = tl.cdiv(S, BLOCK_ROWS)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    q_idx = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = q_idx < S
    row = b * stride_rb + h * stride_rh + q_idx.to(tl.int64) * stride_rs  # [BLOCK_ROWS]
    dout_row = b * (stride_ob * ALIGN) + h * (stride_oh * ALIGN)
    dout_row += q_idx.to(tl.int64) * (stride_os * ALIGN)
    d = tl.arange(0, BLOCK_DV)[None, :]
    inside = is_row[:, None] & (d < DV)
    out = tl.load(out_ptr + row[:, None] * DV + d, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + dout_row[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)  # [BLOCK_ROWS]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row, mask=is_row, other=0.0)
    m = tl.load(statistics_ptr + 2 * row, mask=is_row, other=0.0)
    l = tl.load(statistics_ptr + 2 * row + 1, mask=is_row, other=1.0)
    is_bad = tl.max(((dout * 0.0) != 0.0).to(tl.int32), 1) != 0
    m = tl.where(is_bad & (m != float("inf")), float("nan"), m)
    to = rows_ptr + (head.to(tl.int64) * S + q_idx) * 4
    tl.store(to, m, mask=is_row)
    tl.store(to + 1, 1.0 / l if RECIPROCAL else tl.log2(l), mask=is_row)
    tl.store(to + 2, delta, mask=is_row)
    tl.store(to + 3, tl.zeros_like(delta), mask=is_row)


@unspecialized(triton.jit, any_address=("cu_seqlens_q_ptr",))
def sum_sinks(
    sinks_ptr, cu_seqlens_q_ptr, rows_ptr, dsinks_ptr, B, H, S, n_sequences, unit, natural,
    BLOCK_ROWS: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    """One program per head. The sum runs over the rows of the whole batch, in order, in fp64."""
    head = tl.program_id(0)
    last_row = S
    if cu_seqlens_q_ptr is not None:
        # Rows after the last sequence are NaN, and belong to none.
        end = tl.load(cu_seqlens_q_ptr + n_sequences)
        last_row = tl.where((end >= 0) & (end <= S), end, S).to(tl.int32)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float64)
    for b in range(B):
        first_row = tl.cast(b * H + head, tl.int64) * S
        for first in range(0, last_row, BLOCK_ROWS):
            q_idx = first + tl.arange(0, BLOCK_ROWS)
            is_row = q_idx < last_row
            at = rows_ptr + (first_row + q_idx) * 4
            m = tl.load(at, mask=is_row, other=float("inf"))
            norm = tl.load(at + 1, mask=is_row, other=0.0)
            delta = tl.load(at + 2, mask=is_row, other=0.0)
            weight = exact_weights(score_of_sink(sink, natural), m, norm, unit, RECIPROCAL)
            # A sink of -inf is none, whatever the row holds.
            share = tl.where(sink == float("-inf"), 0.0, weight * delta)
            total -= share.to(tl.float64)
    dsink = tl.sum(total, 0)
    tl.store(dsinks_ptr + head, dsink.to(dsinks_ptr.dtype.element_ty))
