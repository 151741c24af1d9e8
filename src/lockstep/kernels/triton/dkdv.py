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
    bias_of_head,
    count_tiles,
    finite,
    first_row,
    load_bias,
    load_factor,
    load_pair,
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
    HeadGroup,
    Scoring,
    Strides,
    TileRanges,
    Window,
)
from lockstep.kernels.triton.products import add_weighted, product
from lockstep.kernels.triton.tiles import (
    alibi_of,
    is_seen,
    tiles_seen,
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


@triton.jit
def in_parts(ranges, n: tl.constexpr):
    """The same tiles, each of them cut into n."""
    return TileRanges(ranges.start * n, ranges.whole * n, ranges.masked * n, ranges.end * n)


@triton.jit
def add_passes(
    ranges, dk, dv, k, v, kv_idx, bias_head, slopes_ptr, rows_ptr, queries, douts, Sq, q_len,
    kv_len, window, scoring, D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, ASCENDING: tl.constexpr, COPIES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Adds all tiles of queries: those that need no mask, then those that do."""
    # Masked tiles come last: the other way round, ptxas waits for every single product. Masks take
    # registers, which smaller tiles make up for; but a sum that is to be the same with and without
    # a mask needs the same tiles. Terms take more time in smaller ones.
    EDGES_APART: tl.constexpr = ASCENDING and window.right is not None
    SAME: tl.constexpr = ASCENDING or PRECISION == "terms"
    MASKED_Q: tl.constexpr = BLOCK_Q if SAME else max(16, BLOCK_Q // 2)
    for PASS in tl.static_range(0 if EDGES_APART else 1, 3):
        if PASS != 1 or bias_head is None:
            share = 1 if PASS == 1 else BLOCK_Q // MASKED_Q
            some = in_parts(tiles_of_pass(ranges, PASS, EDGES_APART), share)
            dk, dv = add_queries(
                some, dk, dv, k, v, kv_idx, bias_head, slopes_ptr, rows_ptr, queries, douts,
                Sq, q_len, kv_len, window, scoring, D, DV, GROUP, PRECISION,
                BLOCK_Q if PASS == 1 else MASKED_Q, BLOCK_D, BLOCK_DV, COPIES, PASS != 1, ASCENDING,
            )  # fmt: skip
    return dk, dv


@triton.jit
def load_sums(ptr, row, is_there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sums of a tile of keys that come in blocks: those of the blocks before."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(ptr + row * D + d, mask=is_there & (d < D), other=0.0)


@triton.jit
def store_sums(ptr, row, is_there, sums, D: tl.constexpr):
    d = tl.arange(0, sums.shape[1])[None, :]
    tl.store(ptr + row * D + d, sums, mask=is_there & (d < D))


@triton.jit
def rows_that_see(
    first_key, kv_len, q_len, window, HAS_BIAS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """The tiles of query rows that see a key of the tile from `first_key` on."""
    shift = kv_len - q_len
    last_key = tl.minimum(first_key + BLOCK_KV, kv_len) - 1
    # Which rows see a key is which keys a row sees, with left and right exchanged.
    near, far = first_key - shift, last_key - shift
    of_keys = Window(window.right, window.left)
    return tiles_seen(near, far, q_len, of_keys, BLOCK_Q, HAS_BIAS)


@triton.jit
def store_keys(
    dk, dv, dk_ptr, dv_ptr, dk_row, stride_row, kv_idx, kv_start, kv_len, n_keys, b, head, Hkv, Skv,
    scale, is_good, HAS_STARTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    K_TOKENS_FIRST: tl.constexpr, V_TOKENS_FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys, zeros for keys beyond their sequence."""
    is_key = (kv_idx < kv_len)[:, None]
    inside = (kv_idx < n_keys)[:, None]
    # Adding 0 makes one zero of the two.
    nan_or_zero = nan_where(not is_good)
    dk = tl.where(is_key, tl.fma(dk, scale, 0.0), 0.0) + nan_or_zero
    dv = tl.where(is_key, dv, 0.0) + nan_or_zero
    key = kv_start + kv_idx
    if HAS_STARTS:
        # The keys before the first one come after the last: they have zeros, too.
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


@triton.jit
def locate_keys(inputs, sizes, GROUP: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The tile of keys of this program: its sequence, KV head and number; whether the sequence is
    good, and where its keys and queries begin and how many there are; the first row of dk, and the
    rows from one key to the next."""
    B, Hq, Sq, Skv, n_slots = sizes
    head, slot = tl.program_id(0) // n_slots, tl.program_id(0) % n_slots
    Hkv = Hq // GROUP
    if inputs.cu_seqlens_k_ptr is not None:
        b, tile, is_good, kv_start, kv_len, q_start, q_len = find_sequence(
            slot, inputs.cu_seqlens_k_ptr, inputs.cu_seqlens_q_ptr, B, Skv, Sq, 1, BLOCK_KV
        )
        dk_row = head.to(tl.int64)
        stride_row = Hkv
    else:
        b, tile, head = head % B, slot, head // B
        is_good, q_start, q_len, kv_start, kv_len = whole_sequence(
            b, Sq, Skv, inputs.kv_lens_ptr, inputs.kv_starts_ptr
        )
        dk_row = (b * Hkv + head).to(tl.int64) * Skv
        stride_row = 1
    return b, head, tile, is_good, kv_start, kv_len, q_start, q_len, dk_row, stride_row


@unspecialized(triton.jit)
def sum_keys(
    inputs: GradientInputs, dk_ptr, dv_ptr, dk_sums_ptr, dv_sums_ptr,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_o: Strides,
    stride_b: BiasStrides, stride_ab, sizes: GradientSizes, limits: Window, scale, scales: Scoring,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    RAW: tl.constexpr, PRECISION: tl.constexpr, ASCENDING: tl.constexpr,
    K_TOKENS_FIRST: tl.constexpr, V_TOKENS_FIRST: tl.constexpr, COPIES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Programs run over the key tiles of a head, then the batch, then the KV heads.

    The first tiles come first: under a causal mask they are the longest. Strides of q, k, v and
    dout are in units of ALIGN elements. Keys of a bad sequence (`sequences`) have gradients of NaN.
    """
    window = Window(limits.left if HAS_LEFT else None, limits.right if HAS_RIGHT else None)
    cap_scale = scales.cap_scale if HAS_SOFTCAP else None
    scoring = Scoring(cap_scale, None if RAW else scales.score_scale, scales.unit)
    Sq, Skv, Hkv = sizes.Sq, sizes.Skv, sizes.Hq // GROUP
    b, head, tile, is_good, kv_start, kv_len, q_start, q_len, dk_row, stride_row = locate_keys(
        inputs, sizes, GROUP, BLOCK_KV
    )
    # How many keys there are to write: of those beyond kv_lens, zeros.
    n_keys = kv_len if inputs.cu_seqlens_k_ptr is not None else Skv
    first_key = tile * BLOCK_KV
    if first_key >= n_keys:
        return
    kv_idx = first_key + tl.arange(0, BLOCK_KV)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_DV], tl.float32)
    if dk_sums_ptr is not None:
        sums_row, is_there = (dk_row + kv_idx)[:, None], (kv_idx < n_keys)[:, None]
        dk = load_sums(dk_sums_ptr, sums_row, is_there, D, BLOCK_D)
        dv = load_sums(dv_sums_ptr, sums_row, is_there, DV, BLOCK_DV)

    if is_good and first_key < kv_len:
        ranges = rows_that_see(
            first_key, kv_len, q_len, window, inputs.bias_ptr is not None, BLOCK_Q, BLOCK_KV
        )
        b64, h64 = b.to(tl.int64), head.to(tl.int64)
        k_ptr = inputs.k_ptr + offset(stride_k, b64, h64, ALIGN)
        v_ptr = inputs.v_ptr + offset(stride_v, b64, h64, ALIGN)
        k_ptr += kv_start * (stride_k.s * ALIGN)
        v_ptr += kv_start * (stride_v.s * ALIGN)
        keys = Head(k_ptr, stride_k.s * ALIGN)
        k = load_factor(keys, first_key, kv_len, D, BLOCK_KV, BLOCK_D, True, PRECISION)
        values = Head(v_ptr, stride_v.s * ALIGN)
        v = load_factor(values, first_key, kv_len, DV, BLOCK_KV, BLOCK_DV, True, PRECISION)
        q_head = h64 * GROUP
        q_ptr = first_row(inputs.q_ptr, stride_q, b64, q_head, q_start, ALIGN)
        dout_ptr = first_row(inputs.dout_ptr, stride_o, b64, q_head, q_start, ALIGN)
        row = row_of(b64, q_head, q_start, sizes, inputs.cu_seqlens_k_ptr is not None)
        bias_head, slopes_ptr = None, None
        if inputs.bias_ptr is not None:
            bias_head = bias_of_head(inputs, stride_b, b64, q_head, kv_start)
        if inputs.alibi_slopes_ptr is not None:
            slopes_ptr = inputs.alibi_slopes_ptr + b64 * stride_ab + q_head
        dk, dv = add_passes(
            ranges, dk, dv, k, v, kv_idx[:, None], bias_head, slopes_ptr, inputs.rows_ptr + row * 4,
            HeadGroup(q_ptr, stride_q.h * ALIGN, stride_q.s * ALIGN),
            HeadGroup(dout_ptr, stride_o.h * ALIGN, stride_o.s * ALIGN),
            Sq, q_len, kv_len, window, scoring, D, DV, GROUP, PRECISION, ASCENDING, COPIES,
            BLOCK_Q, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    if dk_sums_ptr is not None:
        store_sums(dk_sums_ptr, sums_row, is_there, dk, D)
        store_sums(dv_sums_ptr, sums_row, is_there, dv, DV)
    else:
        store_keys(
            dk, dv, dk_ptr, dv_ptr, dk_row, stride_row, kv_idx, kv_start, kv_len, n_keys, b, head,
            Hkv, Skv, scale, is_good, inputs.kv_starts_ptr is not None, D, DV,
            K_TOKENS_FIRST, V_TOKENS_FIRST, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
