"""Tiles of up to 32 query rows.

A product of a warpgroup has 64 rows. In its layout (`common/accumulator.py`) each thread has two
rows, eight apart. With no more query rows than half of that, they are the upper rows of the
product, and the lower ones are left out of what is not a product. FEW is the most rows that there
may be: 8, which are the first rows of a product; 32, of which each 8 are upper rows of a warp; or
0 for tiles of all rows.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.decode import plan

FEW_ROWS, UPPER_ROWS = gl.constexpr(plan.FEW_ROWS), gl.constexpr(plan.UPPER_ROWS)
# Rows that few queries are loaded to: no fewer than four warps load at once.
LOADED_ROWS = gl.constexpr(16)


@gluon.jit
def row_in_tile(i, FEW: gl.constexpr):
    """The query row that row i of a product is, counted from the first of its tile; one that there
    is not for lower rows, if these are left out."""
    if FEW == UPPER_ROWS:
        i = gl.where(i % 16 < 8, i // 16 * 8 + i % 8, ROWS)
    return i


@gluon.jit
def halves(x):
    """The upper and the lower rows of x [ROWS, ·], [UPPER_ROWS, ·] each."""
    x = x.reshape([4, 2, 8, x.shape[1]]).permute((0, 2, 3, 1))
    upper, lower = x.split()
    return upper.reshape([UPPER_ROWS, x.shape[2]]), lower.reshape([UPPER_ROWS, x.shape[2]])


@gluon.constexpr_function
def loaded_rows(FEW):
    """Rows of a product that queries are loaded to."""
    return (LOADED_ROWS if FEW_ROWS == FEW else ROWS).value


@gluon.jit
def clear_other_rows(q_smem, FEW: gl.constexpr):
    """Makes the rows 0 that no query is ever loaded to."""
    if FEW == FEW_ROWS:
        N: gl.constexpr = q_smem.shape[0]
        D: gl.constexpr = q_smem.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        q_smem.store(gl.zeros([N, D], q_smem.dtype, layout))


@gluon.jit
def upper_rows(x, FEW: gl.constexpr):
    """The upper rows of x [ROWS, ·], or all unless FEW."""
    if FEW:
        return halves(x)[0]
    else:  # noqa: RET505, Gluon would go on and return both
        return x


@gluon.jit
def with_lower_rows(upper, lower):
    """`halves` undone."""
    n: gl.constexpr = upper.shape[1]
    x = gl.join(upper, lower).reshape([4, 8, n, 2]).permute((0, 3, 1, 2))
    return x.reshape([ROWS, n])


@gluon.jit
def upper_of_rows(x, layout: gl.constexpr, FEW: gl.constexpr):
    """`upper_rows` of one number for each row, [ROWS], in the given layout."""
    if FEW:
        x, _lower = x.reshape([4, 2, 8]).permute((0, 2, 1)).split()
        x = x.reshape([UPPER_ROWS])
    return gl.convert_layout(x, layout)


@gluon.jit
def all_of_rows(x, layout: gl.constexpr, FEW: gl.constexpr):
    """One number for each row, [ROWS], of those of the upper rows, in the given layout: any for the
    others."""
    if FEW:
        x = gl.join(x, x).reshape([4, 8, 2]).permute((0, 2, 1)).reshape([ROWS])
    return gl.convert_layout(x, layout)


@gluon.jit
def as_operand(weights, dtype: gl.constexpr, layout: gl.constexpr, FEW: gl.constexpr):
    """Weights as the left operand of a product with values."""
    p = weights.to(dtype)
    if FEW:
        p = with_lower_rows(p, gl.zeros_like(p))
    return gl.convert_layout(p, layout)


@gluon.jit
def times_rows(x, factors, FEW: gl.constexpr):
    """x [ROWS, ·] times factors of its rows; if FEW, of its upper rows alone."""
    if FEW:
        upper, lower = halves(x)
        rows: gl.constexpr = gl.SliceLayout(1, upper.type.layout)
        upper = upper * gl.expand_dims(gl.convert_layout(factors, rows), 1)
        whole = with_lower_rows(upper, lower)
        return gl.convert_layout(whole, x.type.layout, assert_trivial=True)
    else:  # noqa: RET505
        rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        return x * gl.expand_dims(gl.convert_layout(factors, rows), 1)
