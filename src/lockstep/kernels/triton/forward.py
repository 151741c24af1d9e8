"""Attention of a tile of query rows over all the keys they see.

    out = softmax(softcap(scale · q kᵀ) + bias) v        lse = log Σ exp(scores)

where the bias may be that of ALiBi: - slope · |position - kv_idx|, made tile by tile.

One program takes BLOCK_Q rows of one KV head (the query heads that share it are packed into rows)
and loops over the tiles of BLOCK_KV keys in ascending order: first those that only some rows see,
at the left edge of a window, then those that all rows see, which need no mask, then those at the
diagonal and at the end of the sequence. Tiles that no row sees are skipped.

In CONSTANT_TIME no step and no address depends on data: values that are not finite are handled by
selects, in every tile that a mask cuts. A row that sees one there is NaN in all columns. With
SECRET_LENGTHS nothing depends on the values of kv_lens either: the loop covers all Skv keys,
masked.

With `parts_ptr` a program loops only over its own run of spans, and stores each span as a part
instead of folding it: `split_kv` does that. With `state_ptr` the keys are a block of those of a
sequence, and a program goes from the state before this block to `next_state_ptr` (`carry`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import close, fold, fold_sink, store_statistics
from lockstep.kernels.sequences import nan_where
from lockstep.kernels.triton.groups import (
    BiasRows,
    BiasStrides,
    Head,
    Pages,
    Place,
    RowPointers,
    Rows,
    Scoring,
    State,
    Strides,
    Window,
)
from lockstep.kernels.triton.nonfinite import add_nonfinite
from lockstep.kernels.triton.spans import (
    attend_tiles,
    load_state,
    locate,
    span_of,
    store_part,
    store_state,
    tiles_of_region,
)
from lockstep.kernels.triton.tiles import is_nonfinite, keys_seen, tile_ranges

_ANY_ADDRESS = (
    *("bias_ptr", "sinks_ptr", "kv_lens_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr"),
    *("page_table_ptr", "kv_starts_ptr", "alibi_slopes_ptr"),
)


@triton.jit
def store_nan(results, row, is_row, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The results of rows of a bad sequence."""
    dv = tl.arange(0, BLOCK_DV)[None, :]
    nan = tl.full([row.shape[0], BLOCK_DV], float("nan"), results.out_ptr.dtype.element_ty)
    tl.store((results.out_ptr + row * DV)[:, None] + dv, nan, mask=is_row[:, None] & (dv < DV))
    tl.store(results.lse_ptr + row, float("nan"), mask=is_row)
    if results.statistics_ptr is not None:
        nans = tl.full([row.shape[0]], float("nan"), tl.float32)
        store_statistics(results.statistics_ptr, row, nans, nans, is_row)


@triton.jit
def bias_of(inputs, stride_b, place):
    """The bias of a tile of rows."""
    bias_ptr = inputs.bias_ptr + place.batch * stride_b.b + place.q_head.to(tl.int64) * stride_b.h
    bias_ptr += place.q_idx.to(tl.int64) * stride_b.q
    if inputs.kv_starts_ptr is not None:
        bias_ptr += place.kv_start * stride_b.k
    return BiasRows(bias_ptr, stride_b.k)


class Inputs(NamedTuple):
    """Pointers to the tensors of a call, None where it has no such tensor."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    bias_ptr: Any
    sinks_ptr: Any
    kv_lens_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    page_table_ptr: Any
    kv_starts_ptr: Any
    alibi_slopes_ptr: Any


class Results(NamedTuple):
    """Pointers to what a program stores of each row, None where it does not."""

    out_ptr: Any
    lse_ptr: Any
    statistics_ptr: Any
    parts_ptr: Any  # of each of its spans: `split_kv`
    part_stats_ptr: Any
    state_ptr: Any  # what it starts from: `carry`
    state_stats_ptr: Any
    next_state_ptr: Any
    next_state_stats_ptr: Any


class Sizes(NamedTuple):
    """Sizes of a call, and how it is cut into programs and spans: `plan`."""

    B: Any
    Hkv: Any
    Sq: Any
    Skv: Any
    n_pages: Any
    wanted: Any
    n_slots: Any
    n_spans: Any
    run_spans: Any


@triton.jit
def load_rows(
    ptr, stride, b64, head, s, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Rows s of heads, 0 where there is none [BLOCK_Q, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)[None, :]
    rows = ptr + b64 * (stride.b * ALIGN) + head.to(tl.int64) * (stride.h * ALIGN)
    rows += s * (stride.s * ALIGN)
    return tl.load(rows[:, None] + d, mask=is_row[:, None] & (d < D), other=0.0)


@triton.jit
def find_keys(
    inputs, stride_k, stride_v, b64, head, kv_start, PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Where the first keys and values of a program are; of page 0 if they are in pages."""
    k_ptr = inputs.k_ptr + head.to(tl.int64) * (stride_k.h * ALIGN)
    v_ptr = inputs.v_ptr + head.to(tl.int64) * (stride_v.h * ALIGN)
    if PAGE_SIZE == 0:
        k_ptr += b64 * (stride_k.b * ALIGN) + kv_start * (stride_k.s * ALIGN)
        v_ptr += b64 * (stride_v.b * ALIGN) + kv_start * (stride_v.s * ALIGN)
    return k_ptr, v_ptr


@triton.jit
def describe(ptr, n_keys, stride_s, D: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr):
    """A TMA descriptor of the rows from here on."""
    return tl.make_tensor_descriptor(ptr, [n_keys, D], [stride_s, 1], [BLOCK_KV, BLOCK_D])


@triton.jit
def within_run(lo, hi, run):
    """Those of the keys [lo, hi) that are in this program's run of so many keys."""
    first = tl.program_id(1) * run
    return tl.maximum(lo, first), tl.minimum(hi, first + run)


@triton.jit
def attend_regions(
    ranges, lo, span, folded, nan_sum, q, keys, values, pages, rows, bias_rows, slopes, to, kv_len,
    kv_stop, window, scoring, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    FOLDS: tl.constexpr, STRAIGHT_FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, CLEAN: tl.constexpr, CONSTANT_TIME: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The softmax of the last span, of all before it, and a sum that is NaN where a row is."""
    m = tl.full([q.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([q.shape[0]], tl.float32)
    state = State(m, l, tl.zeros([q.shape[0], BLOCK_DV], tl.float32))
    if folded is None:
        folded = state
    span_end = (lo // span + 1) * span
    for REGION in tl.static_range(4):
        # The left edge of a window; the middle, up to the first fold and from there on; the
        # diagonal and the end. To clean up, one masked loop does for all of them.
        HERE = HAS_LEFT if REGION == 0 else STRAIGHT_FIRST if REGION == 1 else FOLDS
        if REGION == 3 or (HERE and not CLEAN):
            tile_lo, tile_hi = tiles_of_region(
                ranges, span_end, REGION, CLEAN, FOLDS and STRAIGHT_FIRST, BLOCK_KV
            )
            state, folded, nan_sum, span_end = attend_tiles(
                tile_lo, tile_hi, state, folded, nan_sum, span_end,
                q, keys, values, pages, rows, bias_rows, slopes, to, span, kv_len, kv_stop,
                window, scoring, D, DV, BLOCK_KV, PAGE_SIZE, PRECISION,
                FOLDS and REGION != 1, REGION == 0 or REGION == 3, CLEAN, CONSTANT_TIME,
            )  # fmt: skip
    return state, folded, nan_sum


@triton.jit
def store_results(
    m, l, acc, inputs, results, place, dv, is_row, unit, natural, DV: tl.constexpr,
    SECRET_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Closes the softmax of rows; returns their out in fp32."""
    if SECRET_LENGTHS:
        l += nan_where(not place.is_good)
    if inputs.sinks_ptr is not None:
        sink = tl.load(inputs.sinks_ptr + place.q_head, mask=is_row, other=0.0).to(tl.float32)
        m, l, acc = fold_sink(m, l, acc, sink, natural, unit)
    out, lse = close(m, l, acc, natural)
    half = out.to(results.out_ptr.dtype.element_ty)
    tl.store(place.out_ptrs[:, None] + dv, half, mask=is_row[:, None] & (dv < DV))
    tl.store(results.lse_ptr + place.out_row, lse, mask=is_row)
    if results.statistics_ptr is not None:
        store_statistics(results.statistics_ptr, place.out_row, m, l, is_row)
    return out


@triton.jit
def attend_keys(
    ranges, lo, hi, span, q, keys, values, pages, rows, bias_rows, slopes, to, inputs, results,
    place, dv, window, scoring, natural, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    FOLDS: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    CONSTANT_TIME: tl.constexpr, SECRET_LENGTHS: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The keys that a tile of rows sees, and what is stored of them; rows that come out as not
    finite are then computed once more, without what they do not see."""
    # Some of the packed sequences may have no folds: those should not pay for them.
    STRAIGHT_FIRST: tl.constexpr = not FOLDS or inputs.cu_seqlens_q_ptr is not None
    nan_sum = tl.zeros([q.shape[0], 1], tl.float32)
    has_nonfinite = tl.program_id(0) < 0
    for CLEAN in tl.static_range(1 if CONSTANT_TIME else 2):
        if CLEAN == 0 or has_nonfinite:
            folded = None
            if results.state_ptr is not None:
                folded = load_state(
                    results.state_ptr, results.state_stats_ptr, place.out_row, rows.is_row, DV,
                    BLOCK_DV,
                )  # fmt: skip
            state, folded, nan_sum = attend_regions(
                ranges, lo, span, folded, nan_sum, q, keys, values, pages, rows, bias_rows, slopes,
                to, place.kv_len, place.kv_stop, window, scoring, D, DV, HAS_LEFT, FOLDS,
                STRAIGHT_FIRST, PAGE_SIZE, PRECISION, CLEAN, CONSTANT_TIME, BLOCK_KV, BLOCK_DV,
            )  # fmt: skip
            m, l, acc = state
            folded_m, folded_l, folded_acc = folded
            if not CLEAN:
                first_l, first_folded_l = l, folded_l
            # The compiler may sum weights in another order the second time. They do not depend on
            # v, so the first sums stay.
            l, folded_l = first_l, first_folded_l
            out = acc
            if results.parts_ptr is not None:
                store_part(State(m, l, acc), to, (hi - 1) // span, rows.is_row, DV, CLEAN)
            elif results.state_ptr is not None:
                m, l, out = fold(folded_m, folded_l, folded_acc, m, l, acc, scoring.unit)
                store_state(
                    State(m, l, out), results.next_state_ptr, results.next_state_stats_ptr,
                    place.out_row, rows.is_row, DV,
                )  # fmt: skip
            else:
                m, l, acc = fold(folded_m, folded_l, folded_acc, m, l, acc, scoring.unit)
                out = store_results(
                    m, l, acc, inputs, results, place, dv, rows.is_row, scoring.unit, natural, DV,
                    SECRET_LENGTHS,
                )  # fmt: skip
            if not CLEAN and not CONSTANT_TIME:
                nan_sum += tl.sum(out * 0.0, 1, keep_dims=True)
                has_nonfinite = tl.sum(is_nonfinite(nan_sum).to(tl.int32)) != 0
    stored_rows = place.out_ptrs
    if results.parts_ptr is not None:
        stored_rows = to.parts
    elif results.state_ptr is not None:
        stored_rows = results.next_state_ptr + place.out_row * DV
    if not CONSTANT_TIME:  # noqa: SIM102, what is not compiled must not be looked at
        if has_nonfinite:
            # The stores above are other threads' loads here.
            tl.debug_barrier()
            add_nonfinite(
                ranges.start, ranges.end, stored_rows, values, pages, rows, bias_rows, span,
                place.kv_len, window, DV, BLOCK_KV, BLOCK_DV,
                0 if results.parts_ptr is None else DV, PAGE_SIZE,
            )  # fmt: skip


@triton.jit
def attend_rows(
    ranges, lo, hi, span, q, keys, values, pages, rows, place, inputs, results, stride_b, stride_ab,
    n_spans, dv, window, scoring, natural, D: tl.constexpr, DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, FOLDS: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    CONSTANT_TIME: tl.constexpr, SECRET_LENGTHS: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A tile of rows, whose place is known, over its keys: finds their bias, slopes and parts."""
    bias_rows, slopes, to = None, None, None
    if inputs.bias_ptr is not None:
        bias_rows = bias_of(inputs, stride_b, place)
    if inputs.alibi_slopes_ptr is not None:
        of_sequence = inputs.alibi_slopes_ptr + place.batch * stride_ab
        slopes = tl.load(of_sequence + place.q_head, mask=rows.is_row, other=0.0).to(tl.float32)
    if results.parts_ptr is not None:
        part_rows = results.parts_ptr + place.out_row * n_spans * DV
        to = RowPointers(part_rows, results.part_stats_ptr + place.out_row * n_spans * 2)
    attend_keys(
        ranges, lo, hi, span, q, keys, values, pages, rows, bias_rows, slopes, to, inputs, results,
        place, dv, window, scoring, natural, D, DV, HAS_LEFT, FOLDS, PAGE_SIZE, PRECISION,
        CONSTANT_TIME, SECRET_LENGTHS, BLOCK_KV, BLOCK_DV,
    )  # fmt: skip


@unspecialized(triton.jit, any_address=_ANY_ADDRESS)
def attend(
    inputs: Inputs, results: Results,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_b: BiasStrides,
    stride_tb, stride_ab, stride_r: Strides,
    sizes: Sizes, limits: Window, scales: Scoring, natural,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, RAW: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    FOLDS: tl.constexpr, LEAST_SPAN: tl.constexpr, EARLY: tl.constexpr,
    CONSTANT_TIME: tl.constexpr, SECRET_LENGTHS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Strides of q, k and v are in units of ALIGN elements, so that wide loads are known to be
    aligned. `stride_r` counts rows of out and lse, `stride_tb` and `stride_ab` lead from one
    sequence to the next in the page table and the slopes. Lengths, offsets and page numbers are
    checked: `sequences`.
    """
    window = Window(limits.left if HAS_LEFT else None, limits.right if HAS_RIGHT else None)
    cap_scale = scales.cap_scale if HAS_SOFTCAP else None
    scoring = Scoring(cap_scale, None if RAW else scales.score_scale, scales.unit)
    if EARLY and results.parts_ptr is not None:
        # Lets `split_kv` start as soon as there is room, to wait for the parts where it needs them.
        gdc_launch_dependents()
    b, head, tile, q_start, q_len, kv_start, kv_len, is_good = locate(
        tl.program_id(0), inputs, sizes, GROUP, BLOCK_Q
    )
    kv_stop = sizes.Skv if SECRET_LENGTHS else kv_len
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    n_rows = q_len * GROUP
    if tile < 0 or tile * BLOCK_Q >= n_rows:
        return
    is_row = row < n_rows
    q_idx, q_head = row // GROUP, head * GROUP + row % GROUP
    dv = tl.arange(0, BLOCK_DV)[None, :]
    b64 = b.to(tl.int64)
    q = load_rows(inputs.q_ptr, stride_q, b64, q_head, q_start + q_idx, is_row, D, BLOCK_D, ALIGN)
    k_ptr, v_ptr = find_keys(inputs, stride_k, stride_v, b64, head, kv_start, PAGE_SIZE, ALIGN)
    table_ptr, first_key = inputs.page_table_ptr, None
    if PAGE_SIZE != 0:
        table_ptr += b64 * stride_tb
        if inputs.kv_starts_ptr is not None:
            first_key = kv_start.to(tl.int32)
    k_desc, v_desc = None, None
    if TMA:
        # Made before a length is looked at: that takes its time as well.
        # Pages follow one another without a gap: one long column of rows.
        n_keys = kv_stop if PAGE_SIZE == 0 else 1 << 30
        k_desc = describe(k_ptr, n_keys, stride_k.s * ALIGN, D, BLOCK_KV, BLOCK_D)
        v_desc = describe(v_ptr, n_keys, stride_v.s * ALIGN, DV, BLOCK_KV, BLOCK_DV)
    out_row = b64 * stride_r.b + q_head.to(tl.int64) * stride_r.h + (q_start + q_idx) * stride_r.s
    out_rows = results.out_ptr + out_row * DV
    is_here = True if SECRET_LENGTHS else is_good
    if not is_here:
        # It has no parts: `split_kv` checks its numbers, too.
        if results.parts_ptr is None:
            store_nan(results, out_row, is_row, DV, BLOCK_DV)
        return

    shift = kv_len - q_len
    rows = Rows(q_idx + shift, is_row)
    lo, hi, all_lo, all_hi = keys_seen(
        tile, n_rows, shift, kv_len, kv_stop, window, GROUP, SECRET_LENGTHS, BLOCK_Q
    )
    span = span_of(q_len, kv_stop, sizes.Hkv, window, sizes.wanted, GROUP, LEAST_SPAN)
    if results.parts_ptr is not None:
        lo, hi = within_run(lo, hi, sizes.run_spans * span)
        if lo >= hi:
            return
    ranges = tile_ranges(lo, hi, all_lo, all_hi, BLOCK_KV)
    keys = Head(k_ptr, stride_k.s * ALIGN, stride_k.b * ALIGN, k_desc)
    values = Head(v_ptr, stride_v.s * ALIGN, stride_v.b * ALIGN, v_desc)
    pages = Pages(table_ptr, sizes.n_pages, first_key)
    place = Place(b64, q_idx, q_head, out_row, out_rows, kv_start, kv_len, kv_stop, is_good)
    attend_rows(
        ranges, lo, hi, span, q, keys, values, pages, rows, place, inputs, results, stride_b,
        stride_ab, sizes.n_spans, dv, window, scoring, natural, D, DV, HAS_LEFT, FOLDS, PAGE_SIZE,
        PRECISION, CONSTANT_TIME, SECRET_LENGTHS, BLOCK_KV, BLOCK_DV,
    )  # fmt: skip
