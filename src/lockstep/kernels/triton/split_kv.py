"""Split-KV: the parts that `forward.attend` stores, folded into results.

    out = Σ acc_i · exp(m_i) / Σ l_i · exp(m_i)        lse = log Σ l_i · exp(m_i)

One program per row goes over the parts of the spans that the row sees, in ascending order, and does
to them what the forward kernel does to its own spans. So it does not matter which of the two a call
takes, nor how many spans a program of the first kernel had.

`merge_rows` is the same for the results of several calls: `lockstep.merge`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import close, fold, fold_sink, store_statistics
from lockstep.kernels.sequences import checked_range, find_queries, nan_where
from lockstep.kernels.triton.groups import Window
from lockstep.kernels.triton.plan import block_of
from lockstep.kernels.triton.spans import span_of
from lockstep.kernels.triton.tiles import (
    LOG2E,
    seen_by_any,
)

# Parts that are loaded at once: enough to hide how long memory takes, few enough for registers.
BATCH: tl.constexpr = tl.constexpr(16)


@triton.jit
def load_parts(first, last, parts_ptr, part_stats_ptr, stride_part, stride_stats, d,
               DV: tl.constexpr, ARE_RESULTS: tl.constexpr):  # fmt: skip
    """The next BATCH parts of a row, none from `last` on: m [1], l [1], acc [1, BLOCK_DV] of each.

    ARE_RESULTS: parts are (out, lse), which is (acc, m) with l = 1.
    """
    ms, ls, accs = (), (), ()
    for i in tl.static_range(BATCH):
        part = tl.cast(first + i, tl.int64)
        inside = first + i < last
        at = part_stats_ptr + part * stride_stats + tl.arange(0, 1)
        m = tl.load(at, mask=inside, other=float("-inf"))
        l = tl.full([1], 1.0, tl.float32)
        if not ARE_RESULTS:
            l = tl.load(at + 1, mask=inside, other=0.0)
        acc = tl.load(parts_ptr + part * stride_part + d, mask=inside & (d < DV), other=0.0)
        # A part without keys adds nothing, whatever its acc holds.
        acc = tl.where(m[:, None] == float("-inf"), 0.0, acc.to(tl.float32))
        ms, ls, accs = ms + (m,), ls + (l,), accs + (acc,)  # noqa: RUF005
    return ms, ls, accs


@triton.jit
def fold_parts(
    first,
    last,
    parts_ptr,
    part_stats_ptr,
    stride_part,
    stride_stats,
    unit,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ARE_RESULTS: tl.constexpr,
):
    """The state of the parts `first` up to `last` of one row: m [1], l [1], acc [1, BLOCK_DV]."""
    d = tl.arange(0, BLOCK_DV)[None, :]
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for batch in range(first, last, BATCH):
        ms, ls, accs = load_parts(
            batch, last, parts_ptr, part_stats_ptr, stride_part, stride_stats, d, DV, ARE_RESULTS
        )
        for i in tl.static_range(BATCH):
            m, l, acc = fold(m, l, acc, ms[i], ls[i], accs[i], unit)
    return m, l, acc


@triton.jit
def store_row(m, l, acc, out_ptr, lse_ptr, natural, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    out, lse = close(m, l, acc, natural)
    d = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(out_ptr + d, out.to(out_ptr.dtype.element_ty), mask=d < DV)
    tl.store(lse_ptr + tl.arange(0, 1), lse)


_ANY_ADDRESS = (
    "sinks_ptr",
    "kv_lens_ptr",
    "kv_starts_ptr",
    "cu_seqlens_q_ptr",
    "cu_seqlens_k_ptr",
)


@unspecialized(triton.jit, any_address=_ANY_ADDRESS)
def reduce_parts(
    parts_ptr,
    part_stats_ptr,
    sinks_ptr,
    kv_lens_ptr,
    kv_starts_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    out_ptr,
    lse_ptr,
    statistics_ptr,
    B,
    Hkv,
    Sq,
    Skv,
    wanted,
    n_spans,
    left,
    right,
    unit,
    natural,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    LEAST_SPAN: tl.constexpr,
    EARLY: tl.constexpr,
    SECRET_LENGTHS: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One row per program: parts [rows, n_spans, DV], part_stats [rows, n_spans, 2].

    If EARLY, programs start before the parts are there, and wait for them.
    """
    window = Window(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    row = tl.program_id(0)
    Hq = Hkv * GROUP
    if cu_seqlens_q_ptr is not None:
        head, token = row % Hq, row // Hq
        _, q_idx, is_good, _, q_len, _, kv_len = find_queries(
            token, cu_seqlens_q_ptr, cu_seqlens_k_ptr, kv_lens_ptr, B, Sq, Skv, 1, 1, 0,
            kv_starts_ptr,
        )  # fmt: skip
    else:
        head, q_idx = row // Sq % Hq, row % Sq
        if TOKENS_FIRST:
            head, q_idx = row % Hq, row // Hq % Sq
        q_len = Sq
        _, kv_len, is_good = checked_range(row // Sq // Hq, Skv, kv_lens_ptr, kv_starts_ptr)
    position = q_idx + kv_len - q_len
    lo, hi = seen_by_any(position, position, kv_len, window)
    kv_stop = kv_len
    if SECRET_LENGTHS:
        # There is a part of every span.
        lo, hi, kv_stop = 0, Skv, Skv
    span = span_of(q_len, kv_stop, Hkv, window, wanted, GROUP, LEAST_SPAN)
    if EARLY:
        gdc_wait()
    at = row.to(tl.int64)
    m, l, acc = fold_parts(
        lo // span, tl.where(lo < hi, tl.cdiv(hi, span), 0),
        parts_ptr + at * n_spans * DV, part_stats_ptr + at * n_spans * 2, DV, 2, unit,
        DV, BLOCK_DV, False,
    )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        m, l, acc = fold_sink(m, l, acc, sink, natural, unit)
    l += nan_where(not is_good)
    store_row(m, l, acc, out_ptr + at * DV, lse_ptr + at, natural, DV, BLOCK_DV)
    if statistics_ptr is not None:
        store_statistics(statistics_ptr, at + tl.arange(0, 1), m, l, None)


@unspecialized(triton.jit)
def merge_rows(
    parts_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    n_parts,
    n_rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One row per program: parts [n_parts, rows, DV], part_lse [n_parts, rows]."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.cast(n_rows, tl.int64)
    m, l, acc = fold_parts(
        0, n_parts, parts_ptr + row * DV, part_lse_ptr + row, rows * DV, rows, LOG2E,
        DV, BLOCK_DV, True,
    )  # fmt: skip
    store_row(m, l, acc, out_ptr + row * DV, lse_ptr + row, 1.0, DV, BLOCK_DV)


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Combines partial results (out [..., DV], lse [...]) in the order given."""
    parts, part_lse = torch.stack(outs), torch.stack(lses)
    out, lse = torch.empty_like(parts[0]), torch.empty_like(part_lse[0])
    DV, n_rows = out.shape[-1], lse.numel()
    if n_rows:
        merge_rows[(n_rows,)](
            parts, part_lse, out, lse, len(outs), n_rows,
            DV=DV, BLOCK_DV=block_of(DV), num_warps=1,
        )  # fmt: skip
    return out, lse
