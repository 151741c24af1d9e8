"""Tiles of keys of which some columns are beyond the head dim.

Keys of a page that does not exist are NaN, and so is all that the copy engine finds beyond the end
of a tensor map: these columns, too. Before a product they are made 0, as those of the queries are.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
)
from lockstep.kernels.hopper.decode import plan

LAST_PIECE = gl.constexpr(plan.COLUMNS)


@gluon.jit
def clear_in_tile(tile, HEAD_DIM: gl.constexpr):
    """Makes columns of a tile [·, D] in shared memory 0; those are in its last piece."""
    N: gl.constexpr = tile.shape[1] // LAST_PIECE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shape: gl.constexpr = [N, tile.shape[0], LAST_PIECE]
    pieces = reinterpret(tile, tile.dtype, shape, gl.NVMMASharedLayout(128, 16, 2))
    piece = pieces.index(N - 1)
    keys = piece.load(layout)
    d = (N - 1) * LAST_PIECE + gl.arange(0, LAST_PIECE, gl.SliceLayout(0, layout))
    piece.store(gl.where(gl.expand_dims(d, 0) < HEAD_DIM, keys, gl.zeros_like(keys)))
    fence_async_shared()
    await_warps()


@gluon.jit
def clear_in_operand(keys, first: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A right operand [·, columns, keys] of columns from `first` on, with 0 beyond HEAD_DIM."""
    if first + keys.shape[1] > HEAD_DIM:
        of_columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, keys.type.layout))
        d = first + gl.arange(0, keys.shape[1], of_columns)
        d = gl.expand_dims(gl.expand_dims(d, 0), 2)
        keys = gl.where(d < HEAD_DIM, keys, gl.zeros_like(keys))
    return keys
