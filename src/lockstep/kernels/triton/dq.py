"""Gradients of queries: dQ = scale Σ_kv dS k.

One program owns BLOCK_Q queries of one head and loops over the tiles of BLOCK_KV keys that they
see: first those that all of them see, then those at the edges, the diagonal say; each time in
ascending order, cut at fixed positions of the sequence. If ASCENDING, all tiles come in ascending
order: the bits of a row then do not depend on the other queries of its tile.

With `dq_sums_ptr` a program starts from the sums that it finds there, and leaves them there: its
keys are some of those of a sequence (`carry`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.sequences import find_sequence, nan_where, whole_sequence
from lockstep.kernels.triton.gradient_tiles import (
    bias_of_head,
    count_tiles,
    finite,
    load_bias,
    load_factor,
    load_statistics,
    nth_tile,
    offset,
    row_of,
    score_gradients,
    tiles_of_pass,
    weights,
)
from lockstep.kernels.triton.groups import (
    BiasStrides,
    GradientInputs,
    GradientSizes,
    Head,
    RowStatistics,
    Scoring,
    Strides,
    Window,
)
from lockstep.kernels.triton.products import add_weighted, product
from lockstep.kernels.triton.tiles import (
    alibi_of,
    is_seen,
    tiles_seen,
)


@triton.jit
def add_keys(
    ranges,
    dq,
    q,
    dout,
    stats,
    q_idx,
    keys,
    values,
    bias_head,
    slope,
    q_len,
    kv_len,
    window,
    scoring,
    D: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the tiles of keys that need a mask; unless MASKED, those that need none."""
    tiles = count_tiles(ranges, MASKED)
    # Masked tiles are few: they need no pipeline, and its memory goes to their finite copies. With
    # terms there is room for both.
    for i in tl.range(0, tiles, num_stages=1 if MASKED and PRECISION != "terms" else None):
        first = nth_tile(i, ranges, MASKED) * BLOCK_KV
        k = load_factor(keys, first, kv_len, D, BLOCK_KV, BLOCK_D, MASKED, PRECISION)
        v = load_factor(values, first, kv_len, DV, BLOCK_KV, BLOCK_DV, MASKED, PRECISION)
        bias, alibi, seen = None, None, None
        kv_idx = first + tl.arange(0, BLOCK_KV)[None, :]
        position = q_idx + (kv_len - q_len)
        if slope is not None:
            alibi = alibi_of(slope, position, kv_idx)
        if MASKED:
            seen = is_seen(position, kv_idx, kv_len, window)
            if bias_head is not None:
                bias = load_bias(bias_head.ptr, bias_head, q_idx, kv_idx, q_len, kv_len)
                seen &= bias != float("-inf")
        p, slope_of_cap = weights(
            q, k, stats.m, stats.norm, bias, alibi, seen, scoring, PRECISION
        )  # fmt: skip
        dp = product(dout, v, PRECISION, CHAINS=1)  # [BLOCK_Q, BLOCK_KV]
        ds = score_gradients(p, dp, stats.delta, slope_of_cap, seen)
        dq = add_weighted(ds, finite(k, PRECISION) if MASKED else k, dq, PRECISION)
    return dq


@triton.jit
def keys_seen_by(
    first_query, q_len, kv_len, window, HAS_BIAS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """The tiles of keys that some row of the tile from `first_query` on sees."""
    shift = kv_len - q_len
    near = first_query + shift
    far = tl.minimum(first_query + BLOCK_Q, q_len) - 1 + shift
    return tiles_seen(near, far, kv_len, window, BLOCK_KV, HAS_BIAS)


@triton.jit
def store_queries(
    dq, dq_ptr, dq_sums_ptr, dq_row, stride_row, q_idx, q_start, q_len, scale, is_good,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of queries, or their sums where keys come in blocks."""
    rows = (dq_row + (q_start + q_idx) * stride_row)[:, None]  # [BLOCK_Q, 1]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (q_idx < q_len)[:, None] & (d < D)
    if dq_sums_ptr is not None:
        tl.store(dq_sums_ptr + rows * D + d, dq, mask=inside)
    else:
        # Adding 0 makes one zero of the two.
        dq = tl.fma(dq, scale, nan_where(not is_good))
        tl.store(dq_ptr + rows * D + d, dq.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def locate_queries(inputs, sizes, Q_TOKENS_FIRST: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The tile of queries of this program: its sequence, head and number; whether the sequence is
    good, and where its queries and keys begin and how many there are; the first row of dq, and the
    rows from one query to the next."""
    B, Hq, Sq, Skv, n_slots = sizes
    head, slot = tl.program_id(0) // n_slots, tl.program_id(0) % n_slots
    if inputs.cu_seqlens_q_ptr is not None:
        b, tile, is_good, q_start, q_len, kv_start, kv_len = find_sequence(
            slot, inputs.cu_seqlens_q_ptr, inputs.cu_seqlens_k_ptr, B, Sq, Skv, 1, BLOCK_Q
        )
        kv_len = tl.where(is_good, kv_len, 0)
        dq_row = head.to(tl.int64)
        stride_row = Hq
    else:
        b, tile, head = head % B, n_slots - 1 - slot, head // B
        is_good, q_start, q_len, kv_start, kv_len = whole_sequence(
            b, Sq, Skv, inputs.kv_lens_ptr, inputs.kv_starts_ptr
        )
        dq_row = (b * Hq + head).to(tl.int64) * Sq
        stride_row = 1
        if Q_TOKENS_FIRST:
            dq_row = b.to(tl.int64) * Sq * Hq + head
            stride_row = Hq
    return b, head, tile, is_good, q_start, q_len, kv_start, kv_len, dq_row, stride_row


@unspecialized(triton.jit)
def sum_queries(
    inputs: GradientInputs, dq_ptr, dq_sums_ptr,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_o: Strides,
    stride_b: BiasStrides, stride_ab, sizes: GradientSizes, limits: Window, scale, scales: Scoring,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    RAW: tl.constexpr, PRECISION: tl.constexpr, ASCENDING: tl.constexpr,
    Q_TOKENS_FIRST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Programs run over the query tiles of a head, then the batch, then the heads.

    The last tiles come first: under a causal mask they are the longest. Strides of q, k, v and
    dout are in units of ALIGN elements. Queries of a bad sequence (`sequences`) have gradients of
    NaN.
    """
    window = Window(limits.left if HAS_LEFT else None, limits.right if HAS_RIGHT else None)
    cap_scale = scales.cap_scale if HAS_SOFTCAP else None
    scoring = Scoring(cap_scale, None if RAW else scales.score_scale, scales.unit)
    b, head, tile, is_good, q_start, q_len, kv_start, kv_len, dq_row, stride_row = locate_queries(
        inputs, sizes, Q_TOKENS_FIRST, BLOCK_Q
    )
    first_query = tile * BLOCK_Q
    if first_query >= q_len:
        return
    q_idx = first_query + tl.arange(0, BLOCK_Q)
    ranges = keys_seen_by(
        first_query, q_len, kv_len, window, inputs.bias_ptr is not None, BLOCK_Q, BLOCK_KV
    )

    b64, q_head, h64 = b.to(tl.int64), head.to(tl.int64), (head // GROUP).to(tl.int64)
    q_ptr = inputs.q_ptr + offset(stride_q, b64, q_head, ALIGN)
    dout_ptr = inputs.dout_ptr + offset(stride_o, b64, q_head, ALIGN)
    k_ptr = inputs.k_ptr + (offset(stride_k, b64, h64, ALIGN) + kv_start * (stride_k.s * ALIGN))
    v_ptr = inputs.v_ptr + (offset(stride_v, b64, h64, ALIGN) + kv_start * (stride_v.s * ALIGN))
    queries = Head(q_ptr + q_start * (stride_q.s * ALIGN), stride_q.s * ALIGN)
    q = load_factor(queries, first_query, q_len, D, BLOCK_Q, BLOCK_D, True, PRECISION)
    douts = Head(dout_ptr + q_start * (stride_o.s * ALIGN), stride_o.s * ALIGN)
    dout = load_factor(douts, first_query, q_len, DV, BLOCK_Q, BLOCK_DV, True, PRECISION)
    row = row_of(b64, q_head, q_start, sizes, inputs.cu_seqlens_q_ptr is not None)
    m, norm, delta = load_statistics(inputs.rows_ptr + row * 4, q_idx, q_len)
    bias_head = None
    if inputs.bias_ptr is not None:
        bias_head = bias_of_head(inputs, stride_b, b64, q_head, kv_start)
    slope = None
    if inputs.alibi_slopes_ptr is not None:
        # A bad sequence may be one that there is not.
        slope_ptr = inputs.alibi_slopes_ptr + b64 * stride_ab + q_head
        slope = tl.load(slope_ptr, mask=is_good, other=0.0).to(tl.float32)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if dq_sums_ptr is not None:
        dq = tl.load(
            dq_sums_ptr + (dq_row + q_idx * stride_row)[:, None] * D + tl.arange(0, BLOCK_D),
            mask=(q_idx < q_len)[:, None] & (tl.arange(0, BLOCK_D) < D),
            other=0.0,
        )
    # Masked tiles come last: the other way round, ptxas waits for every single product.
    EDGES_APART: tl.constexpr = ASCENDING and HAS_LEFT
    for PASS in tl.static_range(0 if EDGES_APART else 1, 3):
        if PASS != 1 or inputs.bias_ptr is None:
            some = tiles_of_pass(ranges, PASS, EDGES_APART)
            dq = add_keys(
                some, dq, q, dout,
                RowStatistics(m[:, None], norm[:, None], delta[:, None]), q_idx[:, None],
                Head(k_ptr, stride_k.s * ALIGN), Head(v_ptr, stride_v.s * ALIGN), bias_head, slope,
                q_len, kv_len, window, scoring, D, DV, PRECISION, BLOCK_KV, BLOCK_D,
                BLOCK_DV, PASS != 1,
            )  # fmt: skip
    store_queries(
        dq, dq_ptr, dq_sums_ptr, dq_row, stride_row, q_idx, q_start, q_len, scale, is_good,
        D, BLOCK_D,
    )  # fmt: skip
