"""From a program to its rows, and from the rows over their keys, span by span.

    locate         which rows of which sequence a program works on
    attend_tiles   the tiles that those rows see; spans are folded, or stored as parts

A span is computed in the same way whether it is then folded or stored, so a row gets the same bits
from `forward` and from `split_kv`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.parts import fold
from lockstep.kernels.sequences import checked_range, find_queries, nan_where
from lockstep.kernels.triton import plan
from lockstep.kernels.triton.groups import State
from lockstep.kernels.triton.products import add_weighted
from lockstep.kernels.triton.tiles import (
    alibi_of,
    is_nonfinite,
    is_seen,
    load_bias,
    load_tile,
    online_softmax,
    page_of,
    pages_of_tile,
    scores,
    wrong_pages,
)

SHORT: tl.constexpr = tl.constexpr(plan.SHORT)
LONG: tl.constexpr = tl.constexpr(plan.LONG)
EVERY_SPAN: tl.constexpr = tl.constexpr(plan.EVERY_SPAN)


@triton.jit
def locate(program, inputs, sizes, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Sequence, KV head and tile of a program; where its sequence begins and how long it is, and
    whether it is good: if it is not (`sequences`), it has no keys.

    Slots run over the tiles of one KV head, last tile first: causal tiles grow along the sequence,
    and the longest should not start last. The heads of a sequence come next to one another: in
    pages their keys lie side by side. So do those of packed sequences, where four heads take turns
    by slots: one alone would keep coming back to a few slices of the cache. A tile may be one that
    the sequence does not have.
    """
    n_slots, Hkv = sizes.n_slots, sizes.Hkv
    head, slot = program // n_slots, program % n_slots
    if inputs.cu_seqlens_q_ptr is not None:
        turns = tl.where(Hkv % 4 == 0, 4, 1)
        slot = program // turns % n_slots
        head = program // (turns * n_slots) * turns + program % turns
        b, tile, is_good, q_start, q_len, kv_start, kv_len = find_queries(
            slot, inputs.cu_seqlens_q_ptr, inputs.cu_seqlens_k_ptr, inputs.kv_lens_ptr, sizes.B,
            sizes.Sq, sizes.Skv, GROUP, BLOCK_Q, 1, inputs.kv_starts_ptr,
        )  # fmt: skip
        tile = tl.cdiv(q_len * GROUP, BLOCK_Q) - 1 - tile
    else:
        b, head = head // Hkv, head % Hkv
        tile = n_slots - 1 - slot
        q_start, q_len = tl.full([], 0, tl.int64), sizes.Sq
        kv_start, kv_len, is_good = checked_range(
            b, sizes.Skv, inputs.kv_lens_ptr, inputs.kv_starts_ptr
        )
    return b, head, tile, q_start, q_len, kv_start, kv_len, is_good


@triton.jit
def span_of(
    q_len, kv_len, Hkv, window, wanted, GROUP: tl.constexpr, LEAST_SPAN: tl.constexpr
):  # fmt: skip
    """How many keys a sequence has between two folds. `plan.span_of` says why."""
    reach = kv_len
    if window.left is not None and window.right is not None:
        reach = tl.minimum(window.left, kv_len) + tl.minimum(window.right, kv_len) + q_len
        reach = tl.minimum(reach, kv_len)
    tiles = tl.maximum(tl.cdiv(q_len * GROUP, 64) * Hkv, 1)
    short = tl.cdiv(reach, tl.cdiv(wanted, tiles))
    long = tl.cdiv(reach, tl.cdiv(wanted // 2, tiles))
    span = tl.maximum(short, tl.minimum(long, LONG * LEAST_SPAN))
    span = tl.maximum(tl.cdiv(span, LEAST_SPAN), 1)
    span = tl.where((reach <= SHORT * LEAST_SPAN) & (wanted < EVERY_SPAN), SHORT, span)
    return span * LEAST_SPAN


@triton.jit
def tiles_of_region(
    ranges,
    span_end,
    REGION: tl.constexpr,
    CLEAN: tl.constexpr,
    IN_TWO: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """The tiles [lo, hi) of a region. The middle may be IN_TWO: up to the first fold, and after."""
    start, whole, masked, end = ranges
    lo, hi = start, end
    if REGION == 0:
        hi = whole
    elif REGION == 3:
        if not CLEAN:
            lo = masked
    else:
        lo, hi = whole, masked
        if IN_TWO:
            first_fold = tl.minimum(tl.maximum(span_end // BLOCK_KV, whole), masked)
            if REGION == 1:
                hi = first_fold
            else:
                lo = first_fold
    return lo, hi


@triton.jit
def store_part(state, to, span, is_row, DV: tl.constexpr, CLEAN: tl.constexpr):
    """Stores the part of one span. With CLEAN, m and l have been stored before."""
    m, l, acc = state
    # On its way a tile passes through shared memory; half a tile leaves room for a third program.
    HALF: tl.constexpr = acc.shape[1] // 2
    halves = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, HALF]), [0, 2, 1]))
    for i in tl.static_range(2):
        d = i * HALF + tl.arange(0, HALF)[None, :]
        tl.store(to.parts[:, None] + span * DV + d, halves[i], mask=is_row[:, None] & (d < DV))
    if not CLEAN:
        tl.store(to.stats + span * 2, m, mask=is_row)
        tl.store(to.stats + span * 2 + 1, l, mask=is_row)


@triton.jit
def end_span(
    state, folded, nan_sum, to, span, is_row, unit, DV: tl.constexpr, CLEAN: tl.constexpr
):  # fmt: skip
    """Stores a span as a part, if there is a place for parts, and otherwise folds it: m, l and acc
    of the spans so far, and `nan_sum`."""
    m, l, acc = state
    folded_m, folded_l, folded_acc = folded
    if to is None:
        folded_m, folded_l, folded_acc = fold(folded_m, folded_l, folded_acc, m, l, acc, unit)
    else:
        store_part(state, to, span, is_row, DV, CLEAN)
        nan_sum += tl.sum(acc * 0.0, 1, keep_dims=True)
    return folded_m, folded_l, folded_acc, nan_sum


@triton.jit
def load_state(
    state_ptr, stats_ptr, row, is_row, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """The state of rows whose keys come in blocks."""
    dv = tl.arange(0, BLOCK_DV)[None, :]
    acc = tl.load(state_ptr + row[:, None] * DV + dv, mask=is_row[:, None] & (dv < DV), other=0.0)
    m = tl.load(stats_ptr + row * 2, mask=is_row, other=float("-inf"))
    return State(m, tl.load(stats_ptr + row * 2 + 1, mask=is_row, other=0.0), acc)


@triton.jit
def store_state(state, state_ptr, stats_ptr, row, is_row, DV: tl.constexpr):
    """Stores what `load_state` loads."""
    m, l, acc = state
    dv = tl.arange(0, acc.shape[1])[None, :]
    tl.store(state_ptr + row[:, None] * DV + dv, acc, mask=is_row[:, None] & (dv < DV))
    tl.store(stats_ptr + row * 2, m, mask=is_row)
    tl.store(stats_ptr + row * 2 + 1, l, mask=is_row)


@triton.jit
def weights_of_nonfinite(p, v, bias, rows, kv_idx, kv_len, window, MASKED: tl.constexpr):
    """p and v with every value that is not finite replaced by 0, and its key's weight by NaN in the
    rows that see the key; unless MASKED, all rows do."""
    is_bad = is_nonfinite(v)  # [BLOCK_KV, BLOCK_DV]
    flag = nan_where(tl.max(is_bad.to(tl.int32), 1) != 0)[None, :]
    v = tl.where(is_bad, 0.0, v.to(tl.float32)).to(v.dtype)
    if MASKED:
        flag = tl.where(is_seen(rows.position[:, None], kv_idx, kv_len, window), flag, 0.0)
    if bias is not None:
        flag = tl.where(bias == float("-inf"), 0.0, flag)
    return p + flag, v


@triton.jit
def load_values(
    values, pages, first, at, last_key, kv_len, page, DV: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr, IN_PAGE: tl.constexpr,
    CLEAN: tl.constexpr,
):  # fmt: skip
    """A tile of values, 0 where there is none; with CLEAN also for those that are not finite."""
    v = load_tile(
        values, pages, at, last_key, DV, BLOCK_KV, BLOCK_DV, PAGE_SIZE, MASKED, page, IN_PAGE
    )
    if values.desc is not None and MASKED and PAGE_SIZE != 0:
        # A descriptor ends with the sequence, but not within a page.
        inside = first + tl.arange(0, BLOCK_KV)[:, None] < kv_len
        v = tl.where(inside, v, tl.zeros(v.shape, v.dtype))
    if CLEAN:
        v = tl.where(is_nonfinite(v), 0.0, v.to(tl.float32)).to(v.dtype)
    return v


@triton.jit
def place_of(key, pages):
    """Where a key of the sequence is among those of its pages."""
    if pages.first_key is not None:
        key = pages.first_key + key
    return key


@triton.jit
def keys_on_wrong_pages(kv_idx, last_key, pages, PAGE_SIZE: tl.constexpr):
    """Which of these keys are on a page that is not there."""
    _page, is_wrong = page_of(place_of(kv_idx, pages), last_key, pages, PAGE_SIZE)
    return is_wrong


@triton.jit
def scores_of_tile(
    q, k, kv_idx, bias, slopes, is_wrong, pages, rows, last_key, kv_len, window, scoring,
    PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_Q, BLOCK_KV]: NaN for keys on wrong pages, unless PAGE_SIZE is 0, and -inf
    where the bias is and, if MASKED, for keys that a row does not see. `is_wrong` says whether the
    page of all of them is; None if they may be on several pages."""
    alibi = None
    if slopes is not None:
        alibi = alibi_of(slopes[:, None], rows.position[:, None], kv_idx)
    s = scores(q, k, bias, alibi, scoring, PRECISION)
    if PAGE_SIZE != 0:
        if is_wrong is None:
            is_wrong = keys_on_wrong_pages(kv_idx, last_key, pages, PAGE_SIZE)
        s += nan_where(is_wrong)
        if bias is not None:
            s = tl.where(bias == float("-inf"), float("-inf"), s)
    if MASKED:
        s = tl.where(is_seen(rows.position[:, None], kv_idx, kv_len, window), s, float("-inf"))
    return s


@triton.jit
def attend_tiles(
    tile_lo, tile_hi, state, folded, nan_sum, span_end, q, keys, values, pages, rows, bias_rows,
    slopes, to, span, kv_len, kv_stop, window, scoring,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_KV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, FOLDS: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr,
    CONSTANT_TIME: tl.constexpr,
):  # fmt: skip
    """The tiles from `tile_lo` up to `tile_hi`; unless MASKED, every row sees all of them. Rows see
    keys below `kv_len`; all below `kv_stop` exist, and are loaded.

    `state` is that of the span that ends at `span_end`, `folded` that of the spans before; unless
    FOLDS, nothing is seen beyond `span_end`. If there is a place `to` store parts, a finished span
    is stored there, and otherwise folded. With CLEAN, values that are not finite count as 0.
    `nan_sum` [BLOCK_Q, 1] is 0 unless a part that was stored has such values. Keys on a page that
    is not there count as NaN.
    """
    m, l, acc = state
    folded_m, folded_l, folded_acc = folded
    # One tile ahead: where a tile is should not have to be waited for.
    IN_PAGE: tl.constexpr = PAGE_SIZE != 0 and PAGE_SIZE % BLOCK_KV == 0 and pages.first_key is None
    IN_PAGES: tl.constexpr = PAGE_SIZE != 0 and not IN_PAGE
    # Values that some row does not see must not reach it, whatever they are.
    SELECTS: tl.constexpr = CONSTANT_TIME and (MASKED or bias_rows is not None)
    # Where every row sees every key, it does to look for wrong pages once all tiles are done.
    LATER: tl.constexpr = not MASKED and bias_rows is None
    if IN_PAGE:
        next_page, is_next_wrong = page_of(tile_lo * BLOCK_KV, kv_stop, pages, PAGE_SIZE)
        is_any_wrong = tile_lo < 0
    elif IN_PAGES:
        is_any_wrong = pages_of_tile(PAGE_SIZE, BLOCK_KV) < 0
    last_key = place_of(kv_stop, pages)
    # Masked tiles are few, and need room to mask values.
    for tile in tl.range(tile_lo, tile_hi, num_stages=1 if CLEAN else 2 if MASKED else None):
        first = tile * BLOCK_KV
        at = place_of(first, pages)
        page, is_wrong = None, None
        if IN_PAGE:
            page, is_wrong = next_page, is_next_wrong
            next_page, is_next_wrong = page_of(first + BLOCK_KV, kv_stop, pages, PAGE_SIZE)
            is_any_wrong |= is_wrong
        elif IN_PAGES and LATER:
            is_any_wrong |= wrong_pages(at, last_key, pages, PAGE_SIZE, BLOCK_KV)
        k = load_tile(
            keys, pages, at, last_key, D, BLOCK_KV, q.shape[1], PAGE_SIZE, MASKED, page, IN_PAGE
        )
        kv_idx = first + tl.arange(0, BLOCK_KV)[None, :]
        bias = None
        if bias_rows is not None:
            bias = load_bias(bias_rows, kv_idx, rows.is_row, kv_stop)
        s = scores_of_tile(
            q, k, kv_idx, bias, slopes, is_wrong, pages, rows, last_key, kv_len, window, scoring,
            0 if LATER else PAGE_SIZE, PRECISION, MASKED,
        )  # fmt: skip
        if FOLDS:
            # A new span starts afresh. Its weights come first: while they are computed, the product
            # of the tile before is still under way.
            is_new = first == span_end
            span_m, span_l = m, l
            m = tl.where(is_new, float("-inf"), m)
            l = tl.where(is_new, 0.0, l)
        p, alpha, m, l = online_softmax(s, scoring.unit, m, l)
        if FOLDS and is_new:
            folded_m, folded_l, folded_acc, nan_sum = end_span(
                State(span_m, span_l, acc), State(folded_m, folded_l, folded_acc), nan_sum, to,
                first // span - 1, rows.is_row, scoring.unit, DV, CLEAN,
            )  # fmt: skip
            acc = tl.zeros(acc.shape, tl.float32)
            span_end += span
        acc = acc * alpha[:, None]
        v = load_values(
            values, pages, first, at, last_key, kv_len, page, DV, BLOCK_KV, acc.shape[1],
            PAGE_SIZE, MASKED, IN_PAGE, CLEAN,
        )  # fmt: skip
        if SELECTS:
            p, v = weights_of_nonfinite(p, v, bias, rows, kv_idx, kv_len, window, MASKED)
        acc = add_weighted(p, v, acc, PRECISION)
    if PAGE_SIZE != 0 and LATER:
        l += nan_where(is_any_wrong if IN_PAGE else tl.max(is_any_wrong.to(tl.int32), 0) != 0)
    return State(m, l, acc), State(folded_m, folded_l, folded_acc), nan_sum, span_end
