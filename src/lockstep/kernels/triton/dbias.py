"""Gradient of the bias: dbias = dS, summed over the dims along which the bias is broadcast.

One program owns a tile of the bias and adds, in ascending order, what every sequence, head, query
and key that shares its elements contributes. A bias of full size gets one term per element. The
sum of a broadcast bias depends on what it is broadcast over, the batch included: it could not do
otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.sequences import checked_range, nan_where
from lockstep.kernels.triton.gradient_tiles import (
    load_bias,
    load_factor,
    load_statistics,
    score_gradients,
    weights,
)
from lockstep.kernels.triton.groups import (
    BiasHead,
    BiasStrides,
    Head,
    Scoring,
    Strides,
    Window,
)
from lockstep.kernels.triton.products import product
from lockstep.kernels.triton.tiles import is_seen, seen_by_any


@triton.jit
def add_tiles(
    total,
    begin,
    end,
    q0,
    queries,
    douts,
    keys,
    values,
    rows_ptr,
    its_bias,
    kv_start,
    q_len,
    kv_len,
    window,
    scoring,
    D: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Adds dS of the queries from `q0` on and the tiles of keys [begin, end) of one head. Keys
    before `kv_start`, unless it is None, are not seen."""
    q_idx = q0 + tl.arange(0, BLOCK_Q)
    q = load_factor(queries, q0, q_len, D, BLOCK_Q, BLOCK_D, True, PRECISION)
    dout = load_factor(douts, q0, q_len, DV, BLOCK_Q, BLOCK_DV, True, PRECISION)
    m, norm, delta = load_statistics(rows_ptr, q_idx, q_len)
    for tile in range(begin, end):
        kv0 = tile * BLOCK_KV
        kv_idx = kv0 + tl.arange(0, BLOCK_KV)[None, :]
        k = load_factor(keys, kv0, kv_len, D, BLOCK_KV, BLOCK_D, True, PRECISION)
        v = load_factor(values, kv0, kv_len, DV, BLOCK_KV, BLOCK_DV, True, PRECISION)
        bias = load_bias(its_bias.ptr, its_bias, q_idx[:, None], kv_idx, q_len, kv_len)
        position = q_idx[:, None] + (kv_len - q_len)
        seen = is_seen(position, kv_idx, kv_len, window)
        seen &= bias != float("-inf")
        if kv_start is not None:
            seen &= kv_idx >= kv_start
        p, _ = weights(q, k, m[:, None], norm[:, None], bias, None, seen, scoring, PRECISION)
        dp = product(dout, v, PRECISION, CHAINS=1)
        # The bias is added after the softcap, so its slope does not come in.
        total += score_gradients(p, dp, delta[:, None], 1.0, seen)
    return total


class Inputs(NamedTuple):
    """Pointers to what the gradient is computed from; None where a call has no such tensor."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    bias_ptr: Any
    kv_lens_ptr: Any
    kv_starts_ptr: Any
    dout_ptr: Any
    rows_ptr: Any  # `gradient_rows`


class Sizes(NamedTuple):
    """Sizes of the call, and of the bias, which has 1 along dims of which it has one element for
    all."""

    B: Any
    Hq: Any
    Sq: Any
    Skv: Any
    bias_B: Any
    bias_Hq: Any
    bias_Sq: Any
    bias_Skv: Any


@unspecialized(triton.jit)
def sum_bias(
    inputs: Inputs, dbias_ptr,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_o: Strides,
    stride_b: BiasStrides, sizes: Sizes, limits: Window, scales: Scoring,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    RAW: tl.constexpr, PRECISION: tl.constexpr, SHARED_Q: tl.constexpr, SHARED_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """SHARED_Q and SHARED_KV: the bias has one element for all queries, for all keys."""
    window = Window(limits.left if HAS_LEFT else None, limits.right if HAS_RIGHT else None)
    cap_scale = scales.cap_scale if HAS_SOFTCAP else None
    scoring = Scoring(cap_scale, None if RAW else scales.score_scale, scales.unit)
    B, Hq, Sq, Skv, bias_B, bias_Hq, bias_Sq, bias_Skv = sizes
    kv_lens_ptr, kv_starts_ptr = inputs.kv_lens_ptr, inputs.kv_starts_ptr
    kv_tiles, q_tiles = tl.cdiv(bias_Skv, BLOCK_KV), tl.cdiv(bias_Sq, BLOCK_Q)
    program = tl.program_id(0)
    kv_tile, q_tile = program % kv_tiles, program // kv_tiles % q_tiles
    bias_head = program // kv_tiles // q_tiles % bias_Hq
    bias_b = program // kv_tiles // q_tiles // bias_Hq
    first_q_tile = 0 if SHARED_Q else q_tile
    end_q_tile = tl.cdiv(Sq, BLOCK_Q) if SHARED_Q else q_tile + 1
    first_kv_tile = 0 if SHARED_KV else kv_tile
    end_kv_tile = tl.cdiv(Skv, BLOCK_KV) if SHARED_KV else kv_tile + 1

    total = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for b in range(bias_b, B, bias_B):
        kv_start, n_keys, is_good = checked_range(b, Skv, kv_lens_ptr, kv_starts_ptr)
        kv_len = n_keys
        if kv_starts_ptr is not None:
            # Columns of the bias count from the first key of the tensor.
            kv_len += kv_start.to(tl.int32)
        if kv_lens_ptr is not None or kv_starts_ptr is not None:
            total += nan_where(not is_good)
        shift = kv_len - Sq
        b64 = tl.cast(b, tl.int64)
        for head in range(bias_head, Hq, bias_Hq):
            q_head, h64 = tl.cast(head, tl.int64), tl.cast(head // GROUP, tl.int64)
            q_start = inputs.q_ptr + b64 * (stride_q.b * ALIGN) + q_head * (stride_q.h * ALIGN)
            do_start = inputs.dout_ptr + b64 * (stride_o.b * ALIGN) + q_head * (stride_o.h * ALIGN)
            k_start = inputs.k_ptr + b64 * (stride_k.b * ALIGN) + h64 * (stride_k.h * ALIGN)
            v_start = inputs.v_ptr + b64 * (stride_v.b * ALIGN) + h64 * (stride_v.h * ALIGN)
            row = (b64 * Hq + q_head) * Sq
            bias_start = inputs.bias_ptr + b64 * stride_b.b + q_head * stride_b.h
            queries = Head(q_start, stride_q.s * ALIGN)
            douts = Head(do_start, stride_o.s * ALIGN)
            keys, values = Head(k_start, stride_k.s * ALIGN), Head(v_start, stride_v.s * ALIGN)
            its_bias = BiasHead(bias_start, stride_b.h, stride_b.q, stride_b.k)
            for tile in range(first_q_tile, end_q_tile):
                q0 = tile * BLOCK_Q
                last_q = tl.minimum(q0 + BLOCK_Q, Sq) - 1
                lo, hi = seen_by_any(q0 + shift, last_q + shift, kv_len, window)
                begin = tl.maximum(first_kv_tile, lo // BLOCK_KV)
                end = tl.minimum(end_kv_tile, tl.cdiv(hi, BLOCK_KV))
                total = add_tiles(
                    total, begin, end, q0, queries, douts, keys, values, inputs.rows_ptr + row * 4,
                    its_bias, kv_start if kv_starts_ptr is not None else None, Sq, kv_len,
                    window, scoring, D, DV, PRECISION, BLOCK_Q, BLOCK_KV, BLOCK_D, BLOCK_DV,
                )  # fmt: skip

    q_idx = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    kv_idx = kv_tile * BLOCK_KV + tl.arange(0, BLOCK_KV)[None, :]
    if SHARED_Q:
        total = tl.sum(total, 0)[None, :]
        q_idx = tl.zeros([1, 1], tl.int32)
    if SHARED_KV:
        total = tl.sum(total, 1)[:, None]
        kv_idx = tl.zeros([1, 1], tl.int32)
    rows = (bias_b * bias_Hq + bias_head).to(tl.int64) * bias_Sq + q_idx
    inside = (q_idx < bias_Sq) & (kv_idx < bias_Skv)
    at = dbias_ptr + rows * bias_Skv + kv_idx
    tl.store(at, total.to(dbias_ptr.dtype.element_ty), mask=inside)
