"""Split-KV: the parts that `forward.attend` hands out, folded into results.

    out = Σ out_i · exp(lse_i) / Σ exp(lse_i)        lse = log Σ exp(lse_i)

One program per row goes over the parts of the spans that the row sees, in ascending order, and does
to them what the forward kernel does to its own spans. So it does not matter which of the two a call
takes, nor how many spans a program of the first kernel had.

`merge_parts` is the same for parts that a caller brings: `lockstep.merge`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.plan import block_of
from lockstep.kernels.triton.tiles import close, fold_sink, fold_weights, seen_by_any

# Parts whose loads are under way at once. Each takes five copies, and a warp waits for 63 at most.
AHEAD: tl.constexpr = tl.constexpr(12)


@triton.jit
def largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def weigh_parts(first, last, part_lse_ptr, stride_lse, keep_ptr, add_ptr, CHUNK: tl.constexpr):
    """What the fold of each part multiplies by; returns the largest lse.

    `tiles.fold` for all parts at once: its maxima are a prefix maximum, which no order changes.
    """
    before = tl.full([1], float("-inf"), tl.float32)
    for chunk in range(first, last, CHUNK):
        part = chunk + tl.arange(0, CHUNK)
        at = part_lse_ptr + part.to(tl.int64) * stride_lse
        inside = part < last
        lse = tl.load(at, mask=inside, other=float("-inf"))
        earlier = tl.load(at - stride_lse, mask=inside & (part > chunk), other=float("-inf"))
        m = tl.maximum(tl.associative_scan(earlier, 0, largest), before)
        m_new, keep, add = fold_weights(m, lse)
        tl.store(keep_ptr + part, keep, mask=inside)
        tl.store(add_ptr + part, add, mask=inside)
        before = tl.maximum(before, tl.max(m_new, 0))
    return before


@triton.jit
def fold_parts(
    first,
    last,
    parts_ptr,
    part_lse_ptr,
    stride_part,
    stride_lse,
    keep_ptr,
    add_ptr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The state of the parts `first` up to `last` of one row: m [1], l [1], acc [1, BLOCK_DV].

    Weights first, for all parts at once, by way of memory: what is left is a chain of one fma per
    part, whose loads do not wait for one another.
    """
    m = weigh_parts(first, last, part_lse_ptr, stride_lse, keep_ptr, add_ptr, CHUNK)
    tl.debug_barrier()
    one, d = tl.arange(0, 1)[:, None], tl.arange(0, BLOCK_DV)[None, :]
    l = tl.zeros([1, 1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for part in tl.range(first, last, num_stages=AHEAD):
        at = tl.cast(part, tl.int64)
        keep = tl.load(keep_ptr + at + one)  # [1, 1]
        add = tl.load(add_ptr + at + one)
        out = tl.load(parts_ptr + at * stride_part + d, mask=d < DV, other=0.0)
        # A part that weighs nothing says nothing, whatever its out holds.
        out = tl.where(add == 0.0, 0.0, out.to(tl.float32))
        acc = tl.fma(acc, keep, out * add)
        l = tl.fma(l, keep, add)
    return m, tl.sum(l, 1), acc


@triton.jit
def store_row(m, l, acc, out_ptr, lse_ptr, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    out, lse = close(m, l, acc)
    d = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(out_ptr + d, out.to(out_ptr.dtype.element_ty), mask=d < DV)
    tl.store(lse_ptr + tl.arange(0, 1), lse)


_SIZES = ("B", "Hq", "Sq", "Skv", "n_spans", "left", "right")
_INDICES = ("sinks_ptr", "kv_lens_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr")


@triton.jit(do_not_specialize=(*_SIZES, *_INDICES))
def reduce_parts(
    parts_ptr,
    part_lse_ptr,
    keep_ptr,
    add_ptr,
    sinks_ptr,
    kv_lens_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    out_ptr,
    lse_ptr,
    B,
    Hq,
    Sq,
    Skv,
    n_spans,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SPAN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row per program: parts [rows, n_spans, DV], part_lse [rows, n_spans]."""
    row = tl.program_id(0)
    if cu_seqlens_q_ptr is not None:
        head, token = row % Hq, row // Hq
        b = 0
        for first in range(0, B, 1024):
            ends = first + tl.arange(0, 1024)
            end = tl.load(cu_seqlens_q_ptr + ends + 1, mask=ends < B, other=token + 1)
            b += tl.sum((end <= token).to(tl.int32), 0)
        q_start = tl.load(cu_seqlens_q_ptr + b)
        q_idx = (token - q_start).to(tl.int32)
        q_len = (tl.load(cu_seqlens_q_ptr + b + 1) - q_start).to(tl.int32)
        kv_len = tl.load(cu_seqlens_k_ptr + b + 1) - tl.load(cu_seqlens_k_ptr + b)
        kv_len = kv_len.to(tl.int32)
    else:
        head, q_idx = row // Sq % Hq, row % Sq
        q_len, kv_len = Sq, Skv
        if kv_lens_ptr is not None:
            kv_len = tl.load(kv_lens_ptr + row // Sq // Hq).to(tl.int32)
    position = q_idx + kv_len - q_len
    lo, hi = seen_by_any(position, position, kv_len, left, right, HAS_LEFT, HAS_RIGHT)
    at = row.to(tl.int64)
    m, l, acc = fold_parts(
        lo // SPAN, tl.where(lo < hi, tl.cdiv(hi, SPAN), 0),
        parts_ptr + at * n_spans * DV, part_lse_ptr + at * n_spans, DV, 1,
        keep_ptr + at * n_spans, add_ptr + at * n_spans, DV, BLOCK_DV, CHUNK,
    )  # fmt: skip
    if sinks_ptr is not None:
        m, l, acc = fold_sink(m, l, acc, tl.load(sinks_ptr + head).to(tl.float32))
    store_row(m, l, acc, out_ptr + at * DV, lse_ptr + at, DV, BLOCK_DV)


@triton.jit(do_not_specialize=("n_parts", "n_rows"))
def merge_rows(
    parts_ptr,
    part_lse_ptr,
    keep_ptr,
    add_ptr,
    out_ptr,
    lse_ptr,
    n_parts,
    n_rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row per program: parts [n_parts, rows, DV], part_lse [n_parts, rows]."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.cast(n_rows, tl.int64)
    m, l, acc = fold_parts(
        0, n_parts, parts_ptr + row * DV, part_lse_ptr + row, rows * DV, rows,
        keep_ptr + row * n_parts, add_ptr + row * n_parts, DV, BLOCK_DV, CHUNK,
    )  # fmt: skip
    store_row(m, l, acc, out_ptr + row * DV, lse_ptr + row, DV, BLOCK_DV)


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Combines partial results (out [..., DV], lse [...]) in the order given."""
    parts, part_lse = torch.stack(outs), torch.stack(lses)
    out, lse = torch.empty_like(parts[0]), torch.empty_like(part_lse[0])
    DV, n_rows = out.shape[-1], lse.numel()
    if n_rows:
        keep, add = torch.empty((2, n_rows, len(outs)), dtype=lse.dtype, device=lse.device)
        merge_rows[(n_rows,)](
            parts, part_lse, keep, add, out, lse, len(outs), n_rows,
            DV=DV, BLOCK_DV=block_of(DV), CHUNK=16, num_warps=1,
        )  # fmt: skip
    return out, lse
