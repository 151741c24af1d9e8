"""Tiles in shared memory that the copy engine loads or stores box by box."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, reinterpret


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
