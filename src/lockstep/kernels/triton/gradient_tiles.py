"""One tile in the backward kernels: its weights again, and the gradients of its scores.

With r = q·k, the raw score of a pair, and everything else as in `lockstep.numerics`,

    s  = softcap(scale r) + bias      p  = exp(s - m) / l
    dP = dO vᵀ                        dS = p (dP - delta)      delta = Σ_d dO·O - dlse
    dr = scale · slope · dS           slope = 1 - tanh², the softcap's own

A tile is [BLOCK_Q, BLOCK_KV] where dQ is summed and [BLOCK_KV, BLOCK_Q] where dK and dV are, so
that p and dS go from registers into the next product. The functions here serve both: `a` and `b`
are q and k, or k and q. `scale` is left to the end of the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.triton.groups import BiasHead, Head, RowStatistics, TileRanges
from lockstep.kernels.triton.products import product
from lockstep.kernels.triton.tiles import finish_scores


@triton.jit
def count_tiles(ranges, MASKED: tl.constexpr):
    """How many tiles of `ranges` need a mask; unless MASKED, how many need none."""
    if not MASKED:
        return ranges.masked - ranges.whole
    return (ranges.whole - ranges.start) + (ranges.end - ranges.masked)


@triton.jit
def nth_tile(i, ranges, MASKED: tl.constexpr):
    """The i-th of those, in ascending order."""
    if not MASKED:
        return ranges.whole + i
    n_first = ranges.whole - ranges.start
    return tl.where(i < n_first, ranges.start + i, ranges.masked + i - n_first)


@triton.jit
def tiles_of_pass(ranges, PASS: tl.constexpr, ASCENDING: tl.constexpr):
    """The tiles of a pass, of those in `ranges`: pass 1 for the tiles without a mask, then 2 for
    the masked ones. If ASCENDING, 0 for the masked ones before them, and 2 for those after."""
    start, whole, masked, end = ranges
    if PASS == 0:
        masked = end
    elif PASS == 2 and ASCENDING:
        start = whole
    return TileRanges(start, whole, masked, end)


@triton.jit
def exact_weights(s, m, norm, unit, RECIPROCAL: tl.constexpr):
    """Weights of scores of any size: the difference to m, where it is small, is exact."""
    x = (s - m) * unit
    return tl.exp2(x) * norm if RECIPROCAL else tl.exp2(x - norm)


@triton.jit
def weights(
    a,  # [M, BLOCK_D], or three terms of it, and so is b
    b,  # [N, BLOCK_D]
    m,  # [M, 1] or [1, N] fp32, and so is norm: see `gradient_rows`
    norm,
    bias,  # [M, N] fp32, or None, and so is alibi
    alibi,
    seen,  # [M, N] bool, or None
    scoring,
    PRECISION: tl.constexpr,
    SWAPPED: tl.constexpr = False,
):
    """p [M, N] fp32, and the slope of the softcap [M, N], 1 without one.

    Scores are those of the forward, to the bit: `tiles.scores`; if a are keys, with SWAPPED.
    """
    s = product(a, b, PRECISION, SWAPPED)  # [M, N] fp32
    s, slope = finish_scores(s, bias, alibi, scoring)
    if PRECISION == "terms":
        p = exact_weights(s, m, norm, scoring.unit, True)
    else:
        p = exact_weights(s, m, norm, scoring.unit, a.dtype == tl.float32)
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    return p, slope


@triton.jit
def score_gradients(p, dp, delta, slope, seen):
    """dS [M, N] fp32, times the slope of the softcap. 0 for hidden pairs, whatever dp holds."""
    ds = p * (dp - delta) * slope
    if seen is not None:
        ds = tl.where(seen, ds, 0.0)
    return ds


@triton.jit
def finite(x, PRECISION: tl.constexpr):
    """x with 0 for what is not finite, as a factor for weights that are 0 where x is not seen.

    0 · x would be NaN there. What is lost for pairs that are seen comes back through m, which
    is NaN for a row with anything not finite in it, and so are all weights of that row.
    """
    if PRECISION == "terms":
        first, second, third = x
        # The first term of a number that is not finite is not, and the others are.
        nonfinite = (first.to(tl.float32) * 0.0) != 0.0
        zero = tl.zeros_like(first)
        second, third = tl.where(nonfinite, zero, second), tl.where(nonfinite, zero, third)
        clean = (tl.where(nonfinite, zero, first), second, third)
    else:
        nonfinite = (x.to(tl.float32) * 0.0) != 0.0
        clean = tl.where(nonfinite, 0.0, x.to(tl.float32)).to(x.dtype)
    return clean


@triton.jit
def bias_of_head(inputs, stride_b, b64, q_head, kv_start):
    """The bias of a query head of a sequence, from its first key on."""
    bias_ptr = inputs.bias_ptr + b64 * stride_b.b + q_head * stride_b.h
    if inputs.kv_starts_ptr is not None:
        bias_ptr += kv_start * stride_b.k
    return BiasHead(bias_ptr, stride_b.h, stride_b.q, stride_b.k)


@triton.jit
def offset(stride, b64, head, ALIGN: tl.constexpr):
    """The distance from the first row of a tensor to that of a head; strides are in units of ALIGN
    elements."""
    return b64 * (stride.b * ALIGN) + head * (stride.h * ALIGN)


@triton.jit
def first_row(ptr, stride, b64, head, start, ALIGN: tl.constexpr):
    """Where a sequence's first row of a head is."""
    return ptr + offset(stride, b64, head, ALIGN) + start * (stride.s * ALIGN)


@triton.jit
def row_of(b64, q_head, q_start, sizes, IS_PACKED: tl.constexpr):
    """The first row of a head in statistics, [B, Hq, Sq], or [Hq, T] of a packed batch."""
    row = q_head * sizes.Sq + q_start
    if not IS_PACKED:
        row += b64 * sizes.Hq * sizes.Sq
    return row


@triton.jit
def load_bias(bias_ptr, bias, q_idx, kv_idx, q_len, kv_len):
    """A tile of the bias of the head at `bias_ptr`, in fp32; the shapes of q_idx and kv_idx say
    whether it is transposed."""
    inside = (q_idx < q_len) & (kv_idx < kv_len)
    at = bias_ptr + q_idx.to(tl.int64) * bias.stride_q + kv_idx.to(tl.int64) * bias.stride_k
    return tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def load_rows(
    head,
    first,
    n,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows `first` to `first + BLOCK` of a head: [BLOCK, BLOCK_D]; MASKED: 0 from row n on."""
    row = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)[None, :]
    start = head.ptr + tl.cast(first, tl.int64) * head.stride_s
    if MASKED:
        at = start + row[:, None] * head.stride_s + d  # [BLOCK, BLOCK_D]
        return tl.load(at, mask=(row < n - first)[:, None] & (d < D), other=0.0)
    # A program loads about 16 rows at once, and from there to the next 16 it is as far for every
    # thread: in the main loop, where registers are short, the distance then takes none of its own.
    near = (row % 16 * head.stride_s)[:, None] + d
    at = start + (row // 16 * (16 * head.stride_s))[:, None] + near
    return tl.load(at, mask=d < D, other=0.0) if D < BLOCK_D else tl.load(at)


@triton.jit
def load_factor(
    head,
    first,
    n,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tile that `load_rows` loads, or the three terms of it."""
    if PRECISION == "terms":
        WIDTH: tl.constexpr = (D + 7) // 8 * 8
        # A stride that is known takes no registers.
        first_terms = Head(head.ptr, 3 * WIDTH)
        second = Head(head.ptr + WIDTH, 3 * WIDTH)
        third = Head(head.ptr + 2 * WIDTH, 3 * WIDTH)
        rows = (
            load_rows(first_terms, first, n, WIDTH, BLOCK, BLOCK_D, MASKED),
            load_rows(second, first, n, WIDTH, BLOCK, BLOCK_D, MASKED),
            load_rows(third, first, n, WIDTH, BLOCK, BLOCK_D, MASKED),
        )
    else:
        rows = load_rows(head, first, n, D, BLOCK, BLOCK_D, MASKED)
    return rows


@triton.jit
def load_pair(rows_ptr, q_idx, q_len, COPIES: tl.constexpr, MASKED: tl.constexpr):
    """Two numbers of rows that lie side by side, each [BLOCK_Q]; beyond the last row 0.

    If a tile has fewer elements than the program has threads, Triton has each thread load all that
    it is going to need, four bytes at a time. COPIES makes up the number.
    """
    column = tl.arange(0, 2 * COPIES)[None, :]
    at = rows_ptr + q_idx[:, None] * 4 + column % 2  # [BLOCK_Q, 2 * COPIES]
    found = tl.load(at, mask=q_idx[:, None] < q_len, other=0.0) if MASKED else tl.load(at)
    if COPIES == 2:
        pairs = tl.trans(tl.reshape(found, [q_idx.shape[0], 2, 2]), 0, 2, 1)
        found, _ = tl.split(pairs)  # [BLOCK_Q, 2]
    return tl.split(found)


@triton.jit
def load_statistics(rows_ptr, q_idx, q_len):
    """m, norm and delta of rows, each [BLOCK_Q]; beyond the last row, anything finite."""
    m, norm = load_pair(rows_ptr, q_idx, q_len, 1, True)
    delta, _ = load_pair(rows_ptr + 2, q_idx, q_len, 1, True)
    return RowStatistics(m, norm, delta)
