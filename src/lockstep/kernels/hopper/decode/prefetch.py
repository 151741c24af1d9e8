"""Lines of memory that the producer brings to the L2 before they are needed.

Where a program changes from one sequence to the next, it needs numbers of pages, and then queries.
While all SMs read keys and values, each of the two takes as long to come as a tile or two.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

LINE = gl.constexpr(128)  # bytes


@gluon.jit
def prefetch_pages(cache, b, key, n_keys):
    """The numbers of the pages of sequence b, which has `n_keys` keys, from that of `key` on: up to
    32 lines of them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    BYTES: gl.constexpr = cache.table_ptr.dtype.element_ty.primitive_bitwidth // 8
    size = cache.ROWS if cache.WHOLE_PAGES else cache.page_size
    last = divide(gl.maximum(n_keys - 1, 0), size)
    at = divide(key, size) + gl.arange(0, 32, layout) * (LINE // BYTES)
    _prefetch(cache.table_ptr + b.to(gl.int64) * cache.stride_tb + gl.minimum(at, last))


@gluon.jit
def prefetch_queries(rows, b, head, q_tile, q_start, n_q):
    """The query rows of a tile, up to 64 lines of them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LINES: gl.constexpr = 2 * rows.D // LINE  # of a row
    i = gl.arange(0, 64, layout)
    row = gl.minimum(q_tile * ROWS + i // LINES, n_q * rows.group - 1)
    query = divide(row, rows.group)
    at = b.to(gl.int64) * rows.stride_qb
    at += (head * rows.group + row - query * rows.group).to(gl.int64) * rows.stride_qh
    at += (q_start + query).to(gl.int64) * rows.stride_qs
    _prefetch(rows.q_ptr + at + i % LINES * (LINE // 2))


@gluon.jit
def _prefetch(pointers):
    """A warp: bring the lines at `pointers` to the L2, without waiting for them."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
