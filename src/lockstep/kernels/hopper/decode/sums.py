"""Sums of a run, products of weights and values, in pieces of columns (`common/pieces.py`), and
what is done with all of them. m and l are numbers of the rows, in any layout."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import accumulator
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import piece_start
from lockstep.kernels.hopper.common.rescale import rescale
from lockstep.kernels.hopper.decode.few_rows import times_rows
from lockstep.kernels.hopper.decode.nonfinite import add_nonfinite
from lockstep.kernels.parts import fold


@gluon.jit
def _of_rows(x, like):
    """Numbers of rows as a piece `like` this takes them."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))


@gluon.jit
def rescale_sums(sums, factor, BY_VOTE: gl.constexpr, FEW: gl.constexpr):
    """Sums times a factor of each row; BY_VOTE, where some is not 1 (`common/rescale.py`)."""
    found = ()
    for p in gl.static_range(len(sums)):
        if BY_VOTE:
            found = found + (rescale(sums[p], factor),)  # noqa: RUF005, Gluon does not unpack
        else:
            found = found + (times_rows(sums[p], factor, FEW),)  # noqa: RUF005
    return found


@gluon.jit
def add_nonfinite_values(rows, sizes, cache, run, tile, end, bounds, sums, COLUMNS: gl.constexpr):
    """`nonfinite.add_nonfinite` of all pieces."""
    found = ()
    for p in gl.static_range(len(sums)):
        x = add_nonfinite(
            rows, sizes, cache, run, tile, end, bounds, sums[p], piece_start(COLUMNS, p)
        )
        found = found + (x,)  # noqa: RUF005
    return found


@gluon.jit
def fold_sums(state, part, unit):
    """The state (m, l, sums) of the parts so far with one more part."""
    sums = ()
    m, l = state[0], state[1]
    for p in gl.static_range(len(state[2])):
        like = state[2][p]
        piece_m, piece_l, acc = fold(
            _of_rows(state[0], like), _of_rows(state[1], like), like,
            _of_rows(part[0], like), _of_rows(part[1], like), part[2][p], unit,
        )  # fmt: skip
        sums = sums + (acc,)  # noqa: RUF005
        if p == 0:
            m, l = piece_m, piece_l
    return m, l, sums


@gluon.jit
def load_sums(rows, sizes, run, slot, like, COLUMNS: gl.constexpr):
    """(m, l, sums) that `store_sums` has stored as the first part of a slot."""
    sums = ()
    for p in gl.static_range(len(like)):
        piece_m, piece_l, acc = rows.load_part(
            sizes, run, slot, accumulator(like[p].shape[1]), piece_start(COLUMNS, p)
        )
        sums = sums + (acc,)  # noqa: RUF005
        if p == 0:
            m, l = piece_m, piece_l
    return m, l, sums


@gluon.jit
def store_sums(
    rows, sizes, run, slot, span, state, COLUMNS: gl.constexpr, FEW: gl.constexpr = 0
):  # fmt: skip
    """Hand out the part (m, l, sums) of one span."""
    for p in gl.static_range(len(state[2])):
        m, l = _of_rows(state[0], state[2][p]), _of_rows(state[1], state[2][p])
        rows.store_part(sizes, run, slot, span, m, l, state[2][p], FEW, piece_start(COLUMNS, p))


@gluon.jit
def store_results(rows, sizes, run, state, COLUMNS: gl.constexpr, FEW: gl.constexpr = 0):
    """The results of rows whose parts have all been folded to (m, l, sums)."""
    for p in gl.static_range(len(state[2])):
        m, l = _of_rows(state[0], state[2][p]), _of_rows(state[1], state[2][p])
        rows.store_results(sizes, run, m, l, state[2][p], 0, FEW, piece_start(COLUMNS, p))
