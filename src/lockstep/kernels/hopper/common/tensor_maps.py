"""Where the copy engine finds what it loads or stores: rows in a tensor map, clipped to their
sequence or not, and the boxes of a tile in shared memory."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, reinterpret

# A ragged tensor map clips rows to [start, start + length): row r of them has the coordinate
# RAGGED - length + r in a dim of size RAGGED, and two further dims take the shift back, modulo
# 2^64 bytes. (The idea is that of triton.tools.ragged_tma.)
RAGGED = gl.constexpr(1 << 30)


@gluon.jit
def coordinates(batch, start, length, head, row, column, CLIPPED: gl.constexpr):
    """Where a row of a head and sequence lies in a tensor map, clipped to the sequence or not."""
    if CLIPPED:
        return RAGGED, start + length, head, RAGGED - length + row, column
    return 0, batch, head, row, column


@gluon.constexpr_function
def rows_of_box(desc):
    """The rows of a box: those of several heads come one behind the other."""
    return desc.block_shape[2] * desc.block_shape[3]


@gluon.jit
def boxes_of(tile, desc):
    """A tile [1, 1, 1, rows, columns] as boxes of a tensor map, which has some rows and columns:
    first all boxes of the first columns, from the first rows on."""
    PARTS: gl.constexpr = tile.shape[3] // rows_of_box(desc)
    PANELS: gl.constexpr = tile.shape[4] // desc.block_shape[4]
    shape: gl.constexpr = [PANELS * PARTS] + desc.block_shape  # noqa: RUF005, Gluon does not unpack
    return reinterpret(tile, tile.dtype, shape, tile.layout)
