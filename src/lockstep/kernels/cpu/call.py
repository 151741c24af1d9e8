"""One attention call as numba sees it: addresses, strides, lengths, options.

All layouts meet here. A sequence ``b`` owns ``q_len[b]`` queries from token ``q_first[b]``
and ``kv_len[b]`` keys from ``kv_first[b]``; dense tensors step by a batch stride, packed ones
by their first token, paged ones through a page table. The query rows that share a KV head are
numbered ``row = g · q_len + q_idx``, g being the head's place in its group.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cpu.arguments import record_at
from lockstep.kernels.cpu.compile import compiled
from lockstep.kernels.cpu.scalar import load_word, store_word

# Stands for an unbounded side of a window; sums of two stay inside int32.
UNBOUNDED = 1 << 29


STRIDED = np.dtype([(name, np.int64) for name in ("address", "batch", "head", "row")])
"""A tensor's address and strides in bytes; ``batch`` is the page stride of a page pool."""

CALL = np.dtype(
    [
        ("kind", np.int64),  # storage type of q, k, v, out: see simd.F32
        ("B", np.int64),
        ("G", np.int64),  # query heads per KV head
        ("Hkv", np.int64),
        ("D", np.int64),
        ("Dv", np.int64),
        ("q", STRIDED),
        ("k", STRIDED),
        ("v", STRIDED),
        ("out", STRIDED),
        ("lse", STRIDED),
        ("statistics", STRIDED),  # (m, l) of each row; address 0: not wanted
        ("bias", STRIDED),  # address 0: none
        ("bias_col", np.int64),
        ("bias_kind", np.int64),
        ("sinks", np.int64),  # address of [Hq] fp32; 0: none
        ("q_first", np.int64),  # addresses of [B] int64, and so the next three
        ("q_len", np.int64),
        ("kv_first", np.int64),
        ("kv_len", np.int64),
        ("page_table", np.int64),  # address of [B, pages] int64
        ("page_size", np.int64),  # 0: not paged
        ("pages", np.int64),
        ("left", np.int64),
        ("right", np.int64),
        ("scale", np.float64),
        ("softcap", np.float64),  # 0: none
        ("q_factor", np.float64),  # of queries, before the product
        ("score_factor", np.float64),  # of products: scores, or arguments of the softcap
    ]
)
"""Everything a kernel needs to know about a call; kernels receive it by reference."""
call_at = record_at(CALL)


@compiled
def of_sequence(table, b):
    """Entry b of a per-sequence table such as ``call.q_len``."""
    return load_word(table + 8 * b)


@compiled
def row_address(tensor, first, b, head, token):
    return tensor.address + b * tensor.batch + head * tensor.head + (first + token) * tensor.row


@compiled
def fill_kv_rows(call, tensor, b, h, first, n, padded, zero_row, rows):
    """Addresses of keys first … first + n, then of a row of zeros up to ``padded``."""
    if call.page_size > 0:
        table = call.page_table + 8 * b * call.pages
        for i in range(n):
            page = load_word(table + 8 * ((first + i) // call.page_size))
            row = row_address(tensor, 0, page, h, (first + i) % call.page_size)
            store_word(row, rows + 8 * i)
    else:
        row = row_address(tensor, of_sequence(call.kv_first, b), b, h, first)
        for i in range(n):
            store_word(row + i * tensor.row, rows + 8 * i)
    for i in range(n, padded):
        store_word(zero_row, rows + 8 * i)


@compiled
def split_row(call, b, row):
    """(g, q_idx) of a row of sequence b."""
    length = of_sequence(call.q_len, b)
    return row // length, row % length


@compiled
def visible(call, b, q_idx):
    """The keys [lo, hi) that query q_idx of sequence b sees; lo == hi if none."""
    length = of_sequence(call.kv_len, b)
    diagonal = q_idx + length - of_sequence(call.q_len, b)
    lo = min(max(0, diagonal - call.left), length)
    hi = max(lo, min(length, diagonal + call.right + 1))
    return lo, hi
