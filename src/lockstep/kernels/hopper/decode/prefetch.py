"""Lines of memory that the producer brings to the L2 before they are needed.

Where a program changes from one sequence to the next, it needs numbers of pages, and then queries.
While all SMs read keys and values, each of the two takes as long to come as a tile or two.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

LINE = gl.constexpr(128)  # bytes
# Bytes that a load brings to the L2 at least.
FETCHED = gl.constexpr(64)
# Pieces that are asked for at once.
FETCHES = gl.constexpr(64)


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
    """The query rows of a tile. They are asked for before its first keys are: behind the keys of
    all SMs they would come last."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    PIECES: gl.constexpr = 2 * rows.D // FETCHED  # of a row
    i = gl.arange(0, FETCHES, layout)
    d = gl.minimum(i % PIECES * (FETCHED // 2), rows.HEAD_DIM - 1)
    end = gl.minimum(q_tile * ROWS + ROWS, n_q * rows.group)
    for first in range(q_tile * ROWS, end, FETCHES // PIECES):
        row = gl.minimum(first + i // PIECES, end - 1)
        query = divide(row, rows.group)
        at = b.to(gl.int64) * rows.stride_qb
        at += (head * rows.group + row - query * rows.group).to(gl.int64) * rows.stride_qh
        at += (q_start + query).to(gl.int64) * rows.stride_qs
        _prefetch(rows.q_ptr + at + d)


@gluon.jit
def _prefetch(pointers):
    """A warp: bring the lines at `pointers` to the L2, without waiting for them."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
