"""Keys of which a product takes columns beyond the head dim.

A product takes 16 columns at a time. Keys of a page that does not exist are NaN, and so is all that
the copy engine finds beyond the end of a tensor map: with a head dim that is an odd multiple of 8,
8 columns of a product, too. Before it they are made 0, as those of the queries are.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import await_warps, fence_async_shared, gl, gluon


@gluon.constexpr_function
def power_of_two(columns):
    """The least power of two of columns that has room for so many: what a tensor takes."""
    return 1 << (columns - 1).bit_length()


@gluon.constexpr_function
def columns_of_keys(head_dim):
    """The columns of keys that products take."""
    return -(-head_dim // 16) * 16


@gluon.constexpr_function
def columns_of_values(columns, head_dim):
    """The columns of values that products have, of so many of a tile: all, if one product can have
    them. Where sums of two are rescaled in every tile, ptxas waits for each product."""
    return columns if power_of_two(columns) == columns else columns_of_keys(head_dim)


@gluon.jit
def clear_in_tile(columns, N: gl.constexpr):
    """Makes the last columns of some in shared memory [keys, 64] 0: all but the first N."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = columns.load(layout)
    d = gl.expand_dims(gl.arange(0, columns.shape[1], gl.SliceLayout(0, layout)), 0)
    columns.store(gl.where(d < N, keys, gl.zeros_like(keys)))
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
