"""Values that are not finite, and the rows that do not see them.

A hidden key has the weight 0, and 0 · v is 0 unless v is NaN or infinite: then it is NaN, and the
row depends on a key that it does not see. The result itself says whether that happened: it is not
finite then. In this rare case the kernel computes its rows once more with such values replaced by
0, and then adds them here, key by key, to the rows that see them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.triton.tiles import (
    any_nonfinite,
    is_nonfinite,
    is_seen,
    load_bias,
    load_by_pointer,
)


@triton.jit
def add_nonfinite(
    tile_lo,
    tile_hi,
    rows_ptr,
    values,
    pages,
    rows,
    bias_rows,
    span,
    kv_len,
    window,
    DV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STRIDE_SPAN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Adds to the rows of out [BLOCK_Q] the values that are not finite and that they see.

    With a STRIDE_SPAN it adds them to the parts of the rows, which are so far apart.
    """
    d = tl.arange(0, BLOCK_DV)[None, :]
    start = 0
    if pages.first_key is not None:
        start = pages.first_key
    for tile in range(tile_lo, tile_hi):
        first = tile * BLOCK_KV
        v = load_by_pointer(
            values, pages, start + first, start + kv_len, DV, BLOCK_KV, BLOCK_DV, PAGE_SIZE, True,
            IN_PAGE=PAGE_SIZE % BLOCK_KV == 0 and pages.first_key is None,
        )  # fmt: skip
        if any_nonfinite(v):
            span_ptr = rows_ptr[:, None] + d
            if STRIDE_SPAN != 0:
                span_ptr += first // span * STRIDE_SPAN
            inside = rows.is_row[:, None] & (d < DV)
            for kv_idx in range(first, tl.minimum(first + BLOCK_KV, kv_len)):
                value = load_by_pointer(
                    values, pages, start + kv_idx, start + kv_len, DV, 1, BLOCK_DV, PAGE_SIZE, True,
                    IN_PAGE=True,
                )  # [1, BLOCK_DV]  # fmt: skip
                key = kv_idx + tl.arange(0, 1)[None, :]
                seen = is_seen(rows.position[:, None], key, kv_len, window)
                if bias_rows is not None:
                    seen &= load_bias(bias_rows, key, rows.is_row, kv_len) != float("-inf")
                # Any positive weight would do: the sum is infinite or NaN either way.
                nonfinite = tl.where(seen & is_nonfinite(value), value.to(tl.float32), 0.0)
                out = tl.load(span_ptr, mask=inside, other=0.0).to(tl.float32) + nonfinite
                # Rows that do not see it keep their bits: -0 + 0 would be 0.
                changed = inside & (nonfinite != 0.0)
                tl.store(span_ptr, out.to(rows_ptr.dtype.element_ty), mask=changed)
