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

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import close, fold, fold_sink, store_statistics
from lockstep.kernels.sequences import nan_where
from lockstep.kernels.triton.groups import (
    BiasRows,
    Head,
    Pages,
    RowPointers,
    Rows,
    Scoring,
    State,
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
from lockstep.kernels.triton.tiles import (
    is_nonfinite,
    seen_by_all,
    seen_by_any,
    tile_ranges,
)

_ANY_ADDRESS = (
    *("bias_ptr", "sinks_ptr", "kv_lens_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr"),
    *("page_table_ptr", "kv_starts_ptr", "alibi_slopes_ptr"),
)


@triton.jit
def store_nan(
    out_ptr, lse_ptr, statistics_ptr, row, is_row, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """The results of rows of a bad sequence."""
    dv = tl.arange(0, BLOCK_DV)[None, :]
    nan = tl.full([row.shape[0], BLOCK_DV], float("nan"), out_ptr.dtype.element_ty)
    tl.store((out_ptr + row * DV)[:, None] + dv, nan, mask=is_row[:, None] & (dv < DV))
    tl.store(lse_ptr + row, float("nan"), mask=is_row)
    if statistics_ptr is not None:
        nans = tl.full([row.shape[0]], float("nan"), tl.float32)
        store_statistics(statistics_ptr, row, nans, nans, is_row)


@unspecialized(triton.jit, any_address=_ANY_ADDRESS)
def attend(
    q_ptr, k_ptr, v_ptr, bias_ptr, sinks_ptr, kv_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    page_table_ptr, kv_starts_ptr, alibi_slopes_ptr,
    out_ptr, lse_ptr, statistics_ptr, parts_ptr, part_stats_ptr,
    state_ptr, state_stats_ptr, next_state_ptr, next_state_stats_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_bb, stride_bh, stride_bq, stride_bk,
    stride_tb, stride_ab, stride_rb, stride_rh, stride_rs,
    B, Hkv, Sq, Skv, n_pages, wanted, n_slots, n_spans, run_spans,
    left, right, cap_scale, score_scale, unit, natural,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, RAW: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    FOLDS: tl.constexpr, LEAST_SPAN: tl.constexpr, EARLY: tl.constexpr,
    CONSTANT_TIME: tl.constexpr, SECRET_LENGTHS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Pointers may be None where a call has no such tensor.

    Strides of q, k and v are in units of ALIGN elements, so that wide loads are known to be
    aligned. `stride_r*` count rows of out and lse. Lengths, offsets and page numbers are checked:
    `sequences`.
    """
    window = Window(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    scoring = Scoring(
        cap_scale if HAS_SOFTCAP else None, score_scale if not RAW else None, unit
    )  # fmt: skip
    if EARLY and parts_ptr is not None:
        # Lets `split_kv` start as soon as there is room, to wait for the parts where it needs them.
        gdc_launch_dependents()
    b, head, tile, q_start, q_len, kv_start, kv_len, is_good = locate(
        tl.program_id(0), n_slots, B, Hkv, Sq, Skv, kv_lens_ptr, kv_starts_ptr, cu_seqlens_q_ptr,
        cu_seqlens_k_ptr, GROUP, BLOCK_Q,
    )  # fmt: skip
    # The loop over keys ends here, whether or not a row sees them.
    kv_stop = kv_len
    if SECRET_LENGTHS:
        kv_stop = Skv
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    n_rows = q_len * GROUP
    if tile < 0 or tile * BLOCK_Q >= n_rows:
        return
    is_row = row < n_rows
    q_idx, q_head = row // GROUP, head * GROUP + row % GROUP
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    b64 = b.to(tl.int64)
    q_rows = q_ptr + b64 * (stride_qb * ALIGN) + q_head.to(tl.int64) * (stride_qh * ALIGN)
    q_rows += (q_start + q_idx) * (stride_qs * ALIGN)
    q = tl.load(q_rows[:, None] + d, mask=is_row[:, None] & (d < D), other=0.0)
    k_ptr += head.to(tl.int64) * (stride_kh * ALIGN)
    v_ptr += head.to(tl.int64) * (stride_vh * ALIGN)
    table_ptr, first_key = page_table_ptr, None
    if PAGE_SIZE == 0:
        k_ptr += b64 * (stride_kb * ALIGN) + kv_start * (stride_ks * ALIGN)
        v_ptr += b64 * (stride_vb * ALIGN) + kv_start * (stride_vs * ALIGN)
    else:
        table_ptr += b64 * stride_tb
        if kv_starts_ptr is not None:
            first_key = kv_start.to(tl.int32)
    k_desc, v_desc = None, None
    if TMA:
        # Made before a length is looked at: that takes its time as well.
        # Pages follow one another without a gap: one long column of rows.
        n_keys = kv_stop if PAGE_SIZE == 0 else 1 << 30
        k_desc = tl.make_tensor_descriptor(
            k_ptr, [n_keys, D], [stride_ks * ALIGN, 1], [BLOCK_KV, BLOCK_D]
        )
        v_desc = tl.make_tensor_descriptor(
            v_ptr, [n_keys, DV], [stride_vs * ALIGN, 1], [BLOCK_KV, BLOCK_DV]
        )

    out_row = b64 * stride_rb + q_head.to(tl.int64) * stride_rh + (q_start + q_idx) * stride_rs
    out_rows = out_ptr + out_row * DV
    is_here = True if SECRET_LENGTHS else is_good
    if not is_here:
        # It has no parts: `split_kv` checks its numbers, too.
        if parts_ptr is None:
            store_nan(out_ptr, lse_ptr, statistics_ptr, out_row, is_row, DV, BLOCK_DV)
        return

    shift = kv_len - q_len
    position = q_idx + shift

    first_position = tile * BLOCK_Q // GROUP + shift
    last_position = (tl.minimum(tile * BLOCK_Q + BLOCK_Q, n_rows) - 1) // GROUP + shift
    lo, hi = seen_by_any(first_position, last_position, kv_len, window)
    all_lo, all_hi = seen_by_all(first_position, last_position, kv_len, window)
    if SECRET_LENGTHS:
        lo, hi, all_lo, all_hi = 0, kv_stop, 0, 0
    span = span_of(q_len, kv_stop, Hkv, window, wanted, GROUP, LEAST_SPAN)
    if parts_ptr is not None:
        run = run_spans * span
        run_first = tl.program_id(1) * run
        lo, hi = tl.maximum(lo, run_first), tl.minimum(hi, run_first + run)
        if lo >= hi:
            return
    ranges = tile_ranges(lo, hi, all_lo, all_hi, BLOCK_KV)

    bias_rows = None
    if bias_ptr is not None:
        bias_ptr = bias_ptr + b64 * stride_bb + q_head.to(tl.int64) * stride_bh
        bias_ptr += q_idx.to(tl.int64) * stride_bq
        if kv_starts_ptr is not None:
            bias_ptr += kv_start * stride_bk
        bias_rows = BiasRows(bias_ptr, stride_bk)
    slopes = None
    if alibi_slopes_ptr is not None:
        of_sequence = alibi_slopes_ptr + b64 * stride_ab
        slopes = tl.load(of_sequence + q_head, mask=is_row, other=0.0).to(tl.float32)  # [BLOCK_Q]
    to = None
    if parts_ptr is not None:
        part_rows = parts_ptr + out_row * n_spans * DV
        to = RowPointers(part_rows, part_stats_ptr + out_row * n_spans * 2)

    # Some of the packed sequences may have no folds: those should not pay for them.
    STRAIGHT_FIRST: tl.constexpr = not FOLDS or cu_seqlens_q_ptr is not None
    nan_sum = tl.zeros([BLOCK_Q, 1], tl.float32)
    has_nonfinite = tl.program_id(0) < 0
    rows = Rows(position, is_row)
    keys = Head(k_ptr, stride_ks * ALIGN, stride_kb * ALIGN, k_desc)
    values = Head(v_ptr, stride_vs * ALIGN, stride_vb * ALIGN, v_desc)
    pages = Pages(table_ptr, n_pages, first_key)
    for CLEAN in tl.static_range(1 if CONSTANT_TIME else 2):
        if CLEAN == 0 or has_nonfinite:
            m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_Q], tl.float32)
            state = State(m, l, tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32))
            folded = state
            if state_ptr is not None:
                folded = load_state(state_ptr, state_stats_ptr, out_row, is_row, DV, BLOCK_DV)
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
            m, l, acc = state
            folded_m, folded_l, folded_acc = folded
            if not CLEAN:
                first_l, first_folded_l = l, folded_l
            # The compiler may sum weights in another order the second time. They do not depend on
            # v, so the first sums stay.
            l, folded_l = first_l, first_folded_l
            out = acc
            if parts_ptr is not None:
                store_part(State(m, l, acc), to, (hi - 1) // span, is_row, DV, CLEAN)
            elif state_ptr is not None:
                m, l, out = fold(folded_m, folded_l, folded_acc, m, l, acc, unit)
                done = State(m, l, out)
                store_state(done, next_state_ptr, next_state_stats_ptr, out_row, is_row, DV)
            else:
                m, l, acc = fold(folded_m, folded_l, folded_acc, m, l, acc, unit)
                if SECRET_LENGTHS:
                    l += nan_where(not is_good)
                if sinks_ptr is not None:
                    sink = tl.load(sinks_ptr + q_head, mask=is_row, other=0.0).to(tl.float32)
                    m, l, acc = fold_sink(m, l, acc, sink, natural, unit)
                out, lse = close(m, l, acc, natural)
                half = out.to(out_ptr.dtype.element_ty)
                tl.store(out_rows[:, None] + dv, half, mask=is_row[:, None] & (dv < DV))
                tl.store(lse_ptr + out_row, lse, mask=is_row)
                if statistics_ptr is not None:
                    store_statistics(statistics_ptr, out_row, m, l, is_row)
            if not CLEAN and not CONSTANT_TIME:
                nan_sum += tl.sum(out * 0.0, 1, keep_dims=True)
                has_nonfinite = tl.sum(is_nonfinite(nan_sum).to(tl.int32)) != 0
    rows_ptr = out_rows
    if parts_ptr is not None:
        rows_ptr = part_rows
    elif state_ptr is not None:
        rows_ptr = next_state_ptr + out_row * DV
    if not CONSTANT_TIME:  # noqa: SIM102, what is not compiled must not be looked at
        if has_nonfinite:
            # The stores above are other threads' loads here.
            tl.debug_barrier()
            add_nonfinite(
                ranges.start, ranges.end, rows_ptr, values, pages, rows, bias_rows, span, kv_len,
                window, DV, BLOCK_KV, BLOCK_DV, 0 if parts_ptr is None else DV, PAGE_SIZE,
            )  # fmt: skip
