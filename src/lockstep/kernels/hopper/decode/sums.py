"""Sums of a run, products of weights and values, in pieces of columns (`common/pieces.py`), and
what is done with all of them. m and l are numbers of the rows, in any layout."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator
from lockstep.kernels.hopper.common.gluon_shim import await_warps, gl, gluon
from lockstep.kernels.hopper.common.pieces import piece_of, piece_start
from lockstep.kernels.hopper.common.rescale import rescale
from lockstep.kernels.hopper.decode.few_rows import times_rows
from lockstep.kernels.hopper.decode.nonfinite import add_nonfinite
from lockstep.kernels.hopper.decode.rows import COLUMNS, SOME_ROWS, rows_and_columns
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
def store_results(rows, sizes, run, state, q_smem, COLUMNS: gl.constexpr, FEW: gl.constexpr = 0):
    """The results of rows whose parts have all been folded to (m, l, sums), by way of the queries'
    shared memory [64, ·], which nothing reads any more, if there is room for them: as a product has
    them, a thread would store two columns at a time."""
    THROUGH: gl.constexpr = q_smem.shape[1] >= COLUMNS
    if THROUGH:
        await_warps()
    for p in gl.static_range(len(state[2])):
        m, l = _of_rows(state[0], state[2][p]), _of_rows(state[1], state[2][p])
        if THROUGH:
            out, _at, _is_row = rows.finish_rows(
                sizes, run, m, l, state[2][p], 0, FEW, piece_start(COLUMNS, p)
            )
            piece_of(q_smem, COLUMNS, p).store(out)
        else:
            rows.store_results(sizes, run, m, l, state[2][p], 0, FEW, piece_start(COLUMNS, p))
    if THROUGH:
        await_warps()
        store_rows_of(rows, sizes, run, q_smem, COLUMNS, FEW)


@gluon.jit
def store_rows_of(rows, sizes, run, q_smem, COLUMNS_V: gl.constexpr, FEW: gl.constexpr):
    """Store out [64, COLUMNS_V], which is in shared memory, some rows at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    N: gl.constexpr = q_smem.shape[0] // SOME_ROWS
    # Query rows of as many rows of a product (`few_rows.py`).
    THERE: gl.constexpr = SOME_ROWS // 2 if FEW else SOME_ROWS
    some = rows_and_columns(q_smem)
    n_rows = gl.minimum(run.n_q * rows.group - run.q_tile * ROWS, ROWS)
    for i in range(gl.cdiv(n_rows, THERE)):
        at, _head, is_row = rows.place_rows(sizes, run, of_rows, SOME_ROWS, i * THERE, FEW)
        for block in gl.static_range((COLUMNS_V + COLUMNS - 1) // COLUMNS):
            d = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            rows.store_out(some.index(block * N + i).load(layout), at, is_row, d)
