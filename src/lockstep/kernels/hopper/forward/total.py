"""Where the products of the spans that have ended are kept: `common/spans.py`.

They take as many registers as the products under way, for which there is no room at D 128. There,
the last quarter of their columns is in shared memory, `memory` below; elsewhere that is None.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.spans import fold_products


@gluon.jit
def empty_products(acc, memory):
    """Those of no spans; acc are accumulators of all columns."""
    if memory is None:
        zeros = ()
        for p in gl.static_range(len(acc)):
            zeros = zeros + (gl.zeros_like(acc[p]),)  # noqa: RUF005, Gluon does not unpack
        return zeros
    else:  # noqa: RET505, Gluon would go on and return both
        a, b, c, d = _quarters(gl.zeros_like(acc[0]))
        memory.store(d)
        return a, b, c


@gluon.jit
def add_products(total, memory, keep, acc, add):
    """The products of a span that ended, acc, times `add` [ROWS], and those before times `keep`."""
    if memory is None:
        return fold_products(total, keep, acc, add)
    else:  # noqa: RET505
        a, b, c, d = _fold_quarters(total, memory, keep, acc[0], add)
        memory.store(d)
        return a, b, c


@gluon.jit
def all_products(total, memory, keep, acc, add):
    """`add_products` of the last span, as accumulators of all columns."""
    if memory is None:
        return fold_products(total, keep, acc, add)
    else:  # noqa: RET505
        a, b, c, d = _fold_quarters(total, memory, keep, acc[0], add)
        return (_joined(a, b, c, d, acc[0]),)


@gluon.jit
def _fold_quarters(total, memory, keep, acc, add):
    a, b, c, d = _quarters(acc)
    layout: gl.constexpr = d.type.layout
    a = _fold(total[0], keep, a, add)
    b = _fold(total[1], keep, b, add)
    c = _fold(total[2], keep, c, add)
    return a, b, c, _fold(memory.load(layout), keep, d, add)


@gluon.jit
def _halves(x):
    """The left and the right columns of x [ROWS, n]."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _quarters(x):
    """x [ROWS, n] in four parts of its columns."""
    left, right = _halves(x)
    a, b = _halves(left)
    c, d = _halves(right)
    return a, b, c, d


@gluon.jit
def _joined(a, b, c, d, like):
    """`_quarters` undone; the result has the layout of `like`."""
    R: gl.constexpr = like.shape[0]
    N: gl.constexpr = like.shape[1]
    left = gl.join(a, b).permute((0, 2, 1)).reshape([R, N // 2])
    right = gl.join(c, d).permute((0, 2, 1)).reshape([R, N // 2])
    x = gl.join(left, right).permute((0, 2, 1)).reshape([R, N])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def _fold(total, keep, part, add):
    """`fold_products` of one part [ROWS, ·]."""
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    keeps = gl.expand_dims(gl.convert_layout(keep, rows, assert_trivial=True), 1)
    adds = gl.expand_dims(gl.convert_layout(add, rows, assert_trivial=True), 1)
    zero = gl.zeros_like(part)
    return gl.fma(total, keeps + zero, part * adds)
