"""Gradients of keys and values: dK = scale Σ_q dS q,  dV = Σ_q p dO.

One program owns BLOCK_KV keys of one KV head and loops over all rows that see any of them: first
the tiles of queries that see all of its keys, then those at the edges, the diagonal say; each time
the query heads of the group in ascending order and their tiles in ascending order, cut at fixed
positions of the sequence. No other program adds to its keys. Scores are held transposed,
[BLOCK_KV, BLOCK_Q]: p and dS are then the left factors of the products that follow.

If ASCENDING, all tiles of queries come in ascending order, and each under all heads of the group
before the next: the bits of a key then do not depend on the other keys of its tile. With
`dk_sums_ptr` and `dv_sums_ptr` a program starts from the sums that it finds there, and leaves them
there: its queries are some of those of a sequence (`carry`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.sequences import find_sequence, nan_where, whole_sequence
from lockstep.kernels.triton.gradient_tiles import (
    count_tiles,
    finite,
    load_bias,
    load_factor,
    load_pair,
    nth_tile,
    score_gradients,
    tiles_of_pass,
    weights,
)
from lockstep.kernels.triton.groups import BiasHead, Head, HeadGroup, Scoring, TileRanges, Window
from lockstep.kernels.triton.products import add_weighted, product
from lockstep.kernels.triton.tiles import (
    alibi_of,
    is_seen,
    seen_by_all,
    seen_by_any,
    tile_ranges,
)


@triton.jit
def add_queries(
    ranges,
    dk,
    dv,
    k,
    v,
    kv_idx,
    bias_head,
    slopes_ptr,
    rows_ptr,
    queries,
    douts,
    Sq,
    q_len,
    kv_len,
    window,
    scoring,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    COPIES: tl.constexpr,
    MASKED: tl.constexpr,
    ASCENDING: tl.constexpr,
):
    """Adds the tiles of queries that need a mask, under each head of the group; unless MASKED,
    those that need none."""
    tiles = count_tiles(ranges, MASKED)
    # One loop over heads and tiles: a loop inside a loop would keep two sets of addresses.
    # Masked tiles are few: they need no pipeline, and its memory goes to their finite copies. Terms
    # are finite as they are.
    CLEAN: tl.constexpr = MASKED and PRECISION != "terms"
    for i in tl.range(0, tiles * GROUP, num_stages=1 if CLEAN else None):
        g, nth = 0, i
        if GROUP > 1:
            g, nth = (i % GROUP, i // GROUP) if ASCENDING else (i // tiles, i % tiles)
        g = tl.cast(g, tl.int64)
        first = nth_tile(nth, ranges, MASKED) * BLOCK_Q
        q_rows = Head(queries.ptr + g * queries.stride_h, queries.stride_s)
        q = load_factor(q_rows, first, q_len, D, BLOCK_Q, BLOCK_D, MASKED, PRECISION)
        q_idx = first + tl.arange(0, BLOCK_Q)
        of_rows = rows_ptr + g * Sq * 4
        m, norm = load_pair(of_rows, q_idx, q_len, COPIES, MASKED)
        bias, alibi, seen = None, None, None
        position = q_idx[None, :] + (kv_len - q_len)
        if slopes_ptr is not None:
            alibi = alibi_of(tl.load(slopes_ptr + g).to(tl.float32), position, kv_idx)
        if MASKED:
            seen = is_seen(position, kv_idx, kv_len, window)
            seen &= q_idx[None, :] < q_len
        if bias_head is not None:
            bias = load_bias(
                bias_head.ptr + g * bias_head.stride_h, bias_head, q_idx[None, :], kv_idx, q_len,
                kv_len,
            )  # [BLOCK_KV, BLOCK_Q]  # fmt: skip
            seen &= bias != float("-inf")
        p, slope = weights(
            k, q, m[None, :], norm[None, :], bias, alibi, seen, scoring, PRECISION, True
        )  # fmt: skip
        dout_rows = Head(douts.ptr + g * douts.stride_h, douts.stride_s)
        dout = load_factor(
            dout_rows, first, q_len, DV, BLOCK_Q, BLOCK_DV, MASKED, PRECISION
        )  # fmt: skip
        if PRECISION == "terms":
            # Weights in three terms take registers: dP comes when they are done with.
            dv = add_weighted(p, dout, dv, PRECISION)
        dp = product(v, dout, PRECISION, CHAINS=1)  # [BLOCK_KV, BLOCK_Q]
        if PRECISION != "terms":
            dv = add_weighted(p, finite(dout, PRECISION) if CLEAN else dout, dv, PRECISION)
        # No earlier: registers are short until the weights are there.
        delta, _ = load_pair(of_rows + 2, q_idx, q_len, COPIES, MASKED)
        ds = score_gradients(p, dp, delta[None, :], slope, seen)
        dk = add_weighted(ds, finite(q, PRECISION) if CLEAN else q, dk, PRECISION)
    return dk, dv


@unspecialized(triton.jit)
def sum_keys(
    q_ptr, k_ptr, v_ptr, bias_ptr, kv_lens_ptr, kv_starts_ptr, alibi_slopes_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, dout_ptr, rows_ptr,
    dk_ptr, dv_ptr, dk_sums_ptr, dv_sums_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    stride_bb, stride_bh, stride_bq, stride_bk, stride_ab,
    B, Hq, Sq, Skv, n_slots, left, right, scale, cap_scale, score_scale, unit,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    RAW: tl.constexpr, PRECISION: tl.constexpr, ASCENDING: tl.constexpr,
    K_TOKENS_FIRST: tl.constexpr, V_TOKENS_FIRST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Programs run over the key tiles of a head, then the batch, then the KV heads.

    The first tiles come first: under a causal mask they are the longest. Strides of q, k, v and
    dout are in units of ALIGN elements. Keys of a bad sequence (`sequences`) have gradients of NaN.
    """
    window = Window(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    scoring = Scoring(
        cap_scale if HAS_SOFTCAP else None, score_scale if not RAW else None, unit
    )  # fmt: skip
    head, slot = tl.program_id(0) // n_slots, tl.program_id(0) % n_slots
    Hkv = Hq // GROUP
    if cu_seqlens_k_ptr is not None:
        b, tile, is_good, kv_start, kv_len, q_start, q_len = find_sequence(
            slot, cu_seqlens_k_ptr, cu_seqlens_q_ptr, B, Skv, Sq, 1, BLOCK_KV
        )
        dk_row = head.to(tl.int64)
        stride_row = Hkv
    else:
        b, tile, head = head % B, slot, head // B
        is_good, q_start, q_len, kv_start, kv_len = whole_sequence(
            b, Sq, Skv, kv_lens_ptr, kv_starts_ptr
        )
        dk_row = (b * Hkv + head).to(tl.int64) * Skv
        stride_row = 1
    # How many keys there are to write: of those beyond kv_lens, zeros.
    n_keys = kv_len if cu_seqlens_k_ptr is not None else Skv
    first_key = tile * BLOCK_KV
    if first_key >= n_keys:
        return
    kv_idx = first_key + tl.arange(0, BLOCK_KV)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_DV], tl.float32)
    if dk_sums_ptr is not None:
        sums_row, is_there = (dk_row + kv_idx)[:, None], (kv_idx < n_keys)[:, None]
        d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
        dk = tl.load(dk_sums_ptr + sums_row * D + d, mask=is_there & (d < D), other=0.0)
        dv = tl.load(dv_sums_ptr + sums_row * DV + e, mask=is_there & (e < DV), other=0.0)

    if is_good and first_key < kv_len:
        shift = kv_len - q_len
        last_key = tl.minimum(first_key + BLOCK_KV, kv_len) - 1
        # Which rows see a key is which keys a row sees, with left and right exchanged.
        near, far = first_key - shift, last_key - shift
        of_keys = Window(window.right, window.left)
        lo, hi = seen_by_any(near, far, q_len, of_keys)
        all_lo, all_hi = seen_by_all(near, far, q_len, of_keys)
        ranges = tile_ranges(lo, hi, all_lo, all_hi, BLOCK_Q, bias_ptr is not None)
        b64, h64 = b.to(tl.int64), head.to(tl.int64)
        k_ptr += b64 * (stride_kb * ALIGN) + h64 * (stride_kh * ALIGN)
        v_ptr += b64 * (stride_vb * ALIGN) + h64 * (stride_vh * ALIGN)
        k_ptr += kv_start * (stride_ks * ALIGN)
        v_ptr += kv_start * (stride_vs * ALIGN)
        keys = Head(k_ptr, stride_ks * ALIGN)
        k = load_factor(keys, first_key, kv_len, D, BLOCK_KV, BLOCK_D, True, PRECISION)
        values = Head(v_ptr, stride_vs * ALIGN)
        v = load_factor(values, first_key, kv_len, DV, BLOCK_KV, BLOCK_DV, True, PRECISION)
        q_head = h64 * GROUP
        q_ptr += b64 * (stride_qb * ALIGN) + q_head * (stride_qh * ALIGN)
        q_ptr += q_start * (stride_qs * ALIGN)
        dout_ptr += b64 * (stride_ob * ALIGN) + q_head * (stride_oh * ALIGN)
        dout_ptr += q_start * (stride_os * ALIGN)
        # Statistics lie [B, Hq, Sq], or [Hq, T] of a packed batch.
        row = q_head * Sq + q_start
        if cu_seqlens_k_ptr is None:
            row += b64 * Hq * Sq
        bias_head = None
        if bias_ptr is not None:
            bias_ptr = bias_ptr + b64 * stride_bb + q_head * stride_bh
            if kv_starts_ptr is not None:
                bias_ptr += kv_start * stride_bk
            bias_head = BiasHead(bias_ptr, stride_bh, stride_bq, stride_bk)
        slopes_ptr = None
        if alibi_slopes_ptr is not None:
            slopes_ptr = alibi_slopes_ptr + b64 * stride_ab + q_head
        # Masked tiles come last: the other way round, ptxas waits for every single product. Masks
        # take registers, which smaller tiles make up for; but a sum that is to be the same with and
        # without a mask needs the same tiles. Terms take more time in smaller ones.
        EDGES_APART: tl.constexpr = ASCENDING and HAS_RIGHT
        SAME: tl.constexpr = ASCENDING or PRECISION == "terms"
        MASKED_Q: tl.constexpr = BLOCK_Q if SAME else max(16, BLOCK_Q // 2)
        for PASS in tl.static_range(0 if EDGES_APART else 1, 3):
            if PASS != 1 or bias_ptr is None:
                share = 1 if PASS == 1 else BLOCK_Q // MASKED_Q
                some = tiles_of_pass(ranges, PASS, EDGES_APART)
                some = TileRanges(
                    some.start * share, some.whole * share, some.masked * share, some.end * share
                )
                dk, dv = add_queries(
                    some, dk, dv, k, v, kv_idx[:, None], bias_head, slopes_ptr, rows_ptr + row * 4,
                    HeadGroup(q_ptr, stride_qh * ALIGN, stride_qs * ALIGN),
                    HeadGroup(dout_ptr, stride_oh * ALIGN, stride_os * ALIGN),
                    Sq, q_len, kv_len, window, scoring, D, DV, GROUP, PRECISION,
                    BLOCK_Q if PASS == 1 else MASKED_Q, BLOCK_D, BLOCK_DV, COPIES, PASS != 1,
                    ASCENDING,
                )  # fmt: skip

    if dk_sums_ptr is not None:
        tl.store(dk_sums_ptr + sums_row * D + d, dk, mask=is_there & (d < D))
        tl.store(dv_sums_ptr + sums_row * DV + e, dv, mask=is_there & (e < DV))
    else:
        is_key = (kv_idx < kv_len)[:, None]
        inside = (kv_idx < n_keys)[:, None]
        # Adding 0 makes one zero of the two.
        nan_or_zero = nan_where(not is_good)
        dk = tl.where(is_key, tl.fma(dk, scale, 0.0), 0.0) + nan_or_zero
        dv = tl.where(is_key, dv, 0.0) + nan_or_zero
        key = kv_start + kv_idx
        if kv_starts_ptr is not None:
            # The keys before the first one come behind the last: they have zeros, too.
            key = tl.where(key < Skv, key, key - Skv)
        rows = (dk_row + key * stride_row)[:, None]  # [BLOCK_KV, 1]
        k_rows, v_rows = rows, rows
        if K_TOKENS_FIRST or V_TOKENS_FIRST:
            tokens = (b.to(tl.int64) * Skv + key)[:, None]
            k_rows = tokens * Hkv + head if K_TOKENS_FIRST else rows
            v_rows = tokens * Hkv + head if V_TOKENS_FIRST else rows
        d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
        tl.store(dk_ptr + k_rows * D + d, dk.to(dk_ptr.dtype.element_ty), mask=inside & (d < D))
        tl.store(dv_ptr + v_rows * DV + e, dv.to(dv_ptr.dtype.element_ty), mask=inside & (e < DV))
