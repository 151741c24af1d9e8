"""Where rows lie in a tensor map, clipped to their sequence or not."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

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
