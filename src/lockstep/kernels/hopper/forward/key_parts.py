"""The parts of a tile whose keys several programs share, or one program after another.

A tile has parts if its sequence has few tiles and many keys (`scheduling/part_rule.py`). Each part
is attended to as if it had all keys there are, and its results go to memory as fp32. The last part
to arrive finds those of all others there, and folds them in their order, so that no bit depends on
which one it is. No program waits for another.

    lse = log Σ exp(lse_i)        out = Σ exp(lse_i - lse) · out_i

A row that failed in one part is marked in the lse of that part, and so in that of the whole: the
second pass computes all parts of it again, and folds them from memory, too. The four threads of a
row may differ in the last bit of an lse, and so all of them have the one that was stored. The
program that folded a tile does its second pass; that this was it stands in the counter of arrivals.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import reciprocal
from lockstep.kernels.hopper.common.gluon_shim import await_warps, gl, gluon
from lockstep.kernels.hopper.common.pieces import piece_start, scale_rows
from lockstep.kernels.hopper.common.scores import LN2, LOG2E
from lockstep.kernels.hopper.common.thread_numbers import of_first_thread

# The bits of a counter that count; those above are the number of a program, and 1.
COUNT_BITS = gl.constexpr(8)


@gluon.jit
def arrivals_of(program, results, tile, c):
    """The counter of a tile's rows of consumer `c`."""
    return results.arrivals_ptr + tile.keys.slot * program.build.CONSUMERS + c


@gluon.jit
def _row_of(c, program, tile, part):
    """The first row of a part of consumer `c`'s rows."""
    slot = tile.keys.slot
    # One of the program's own.
    slot = gl.where(slot < 0, -1 - slot, slot)
    return (slot + part) * program.schedule.BLOCK_Q + c * ROWS


@gluon.jit
def is_own(program, results, tile, c):
    """Whether this program folded the parts of a tile's rows of consumer `c`; or there is one."""
    found = gl.program_id(0) + 1
    if (tile.keys.n_parts > 1) & (tile.keys.slot >= 0):
        found = gl.load(arrivals_of(program, results, tile, c), volatile=True) >> COUNT_BITS
    return found == gl.program_id(0) + 1


@gluon.jit
def hand_out(c: gl.constexpr, program, results, tile, out, lse):
    """Pieces of out [ROWS, ·] and lse [ROWS] of a part go to memory; whether all parts are there
    now. Then these are the results of the tile, where a row is marked if it is in any part."""
    starts = ()
    for p in gl.static_range(len(out)):
        starts = starts + (piece_start(program.v.COLUMNS, p),)  # noqa: RUF005, Gluon does not unpack
    is_last = tile.keys.part + 1 == tile.keys.n_parts
    if tile.keys.slot >= 0:
        store_part(c, program, results, tile, out, lse, starts, None)
        # All of them, before one warp counts, or others read.
        await_warps()
        counter = arrivals_of(program, results, tile, c)
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        is_last = before + 1 == tile.keys.n_parts
        gl.store(counter, (gl.program_id(0) + 1) << COUNT_BITS, mask=is_last)
        if is_last:
            out, lse = fold_parts(c, program, results, tile, out, lse, starts, True)
    else:
        out, lse = _add_part(c, program, results, tile, out, lse, starts)
    return out, lse, is_last


@gluon.jit
def _add_part(c: gl.constexpr, program, results, tile, out, lse, starts):
    """Add a part to those before it, which are this program's, too: their total is in memory. What
    the last one leaves are the results of the tile."""
    first = _row_of(c, program, tile, 0)
    at = results.part_lse_ptr + first + gl.arange(0, ROWS, lse.type.layout)
    # A number of each row to the next.
    STEP: gl.constexpr = program.schedule.BLOCK_Q
    has_total = tile.keys.part > 0
    # As all threads of a row would find it in memory.
    lse = of_first_thread(lse)
    m = gl.load(at, mask=has_total, other=-float("inf"))
    w = gl.load(at + STEP, mask=has_total, other=0.0)
    marks = gl.load(at + 2 * STEP, mask=has_total, other=0.0)
    acc = ()
    for p in gl.static_range(len(out)):
        places, is_column = _places(program, results, first, out[p], starts[p])
        x = gl.load(places, mask=is_column & has_total, other=0.0)
        acc = acc + (x,)  # noqa: RUF005, as above
    is_marked = lse == float("inf")
    marks = gl.where(is_marked, 1.0, marks)
    m, w, acc = _fold_part((m, w, acc), out, gl.where(is_marked, 0.0, lse))
    if tile.keys.part + 1 == tile.keys.n_parts:
        out, lse = _close_parts((m, w, acc))
        lse = _marked(lse, marks)
    else:
        gl.store(at, m)
        gl.store(at + STEP, w)
        gl.store(at + 2 * STEP, marks)
        for p in gl.static_range(len(out)):
            places, is_column = _places(program, results, first, out[p], starts[p])
            gl.store(places, acc[p], mask=is_column)
        # One thread has stored the numbers of a row that four load for the next part.
        await_warps()
    return out, lse


@gluon.jit
def _marked(lse, marks):
    """lse, or the mark of rows that have it. A sum that overflows in any part is NaN, and stays
    it."""
    return gl.where((marks > 0.0) & (lse == lse), float("inf"), lse)


@gluon.jit
def store_part(c, program, results, tile, out, lse, starts, mask):
    """Pieces of out [ROWS, ·], whose columns begin with `starts`, and lse [ROWS] of a part, unless
    the `mask` is False."""
    row = _row_of(c, program, tile, tile.keys.part)
    gl.store(results.part_lse_ptr + row + gl.arange(0, ROWS, lse.type.layout), lse, mask=mask)
    for p in gl.static_range(len(out)):
        to, is_column = _places(program, results, row, out[p], starts[p])
        if mask is not None:
            is_column = is_column & mask
            gl.store(to, out[p], mask=is_column)
        else:
            gl.store(to, out[p])


@gluon.jit
def _places(program, results, row, x, start):
    """Where a piece [ROWS, ·] of a part lies that begins with `row` and column `start`, and which
    of its columns there are."""
    COLUMNS: gl.constexpr = program.v.COLUMNS
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    row += gl.expand_dims(gl.arange(0, ROWS, rows), 1)
    column = gl.expand_dims(start + gl.arange(0, x.shape[1], columns), 0)
    return results.parts_ptr + row * COLUMNS + column, column < COLUMNS


@gluon.jit
def fold_parts(c, program, results, tile, out, lse, starts, MARKS: gl.constexpr):
    """Pieces of out, as given ones are, and lse of all parts of a tile, which are in memory. With
    MARKS, infinity is the mark of a part, and that of the tile."""
    acc = ()
    for p in gl.static_range(len(out)):
        zero = gl.full(out[p].shape, 0.0, gl.float32, out[p].type.layout)
        acc = acc + (zero,)  # noqa: RUF005
    zero = gl.full([ROWS], 0.0, gl.float32, lse.type.layout)
    total = (zero - float("inf"), zero, acc)
    marks = zero
    number = gl.arange(0, ROWS, lse.type.layout)
    for part in range(tile.keys.n_parts):
        row = _row_of(c, program, tile, part)
        part_lse = gl.load(results.part_lse_ptr + row + number, cache_modifier=".cg")
        if MARKS:
            is_marked = part_lse == float("inf")
            marks = gl.where(is_marked, 1.0, marks)
            part_lse = gl.where(is_marked, 0.0, part_lse)
        part_out = ()
        for p in gl.static_range(len(out)):
            at, is_column = _places(program, results, row, out[p], starts[p])
            if MARKS:
                x = gl.load(at, cache_modifier=".cg")
            else:
                x = gl.load(at, mask=is_column & (row >= 0), other=0.0, cache_modifier=".cg")
            part_out = part_out + (x,)  # noqa: RUF005
        total = _fold_part(total, part_out, part_lse)
    out, lse = _close_parts(total)
    return out, _marked(lse, marks)


@gluon.jit
def _fold_part(total, out, lse):
    """The total with one more part: pieces of out [ROWS, ·], and lse [ROWS]."""
    m, w, acc = total
    m_new = gl.maximum(m, lse)
    origin = gl.where(m_new == -float("inf"), 0.0, m_new)
    keep = gl.exp2((m - origin) * LOG2E)
    add = gl.exp2((lse - origin) * LOG2E)
    w = gl.fma(w, keep, add)
    folded = ()
    for p in gl.static_range(len(acc)):
        ones = gl.full(acc[p].shape, 1.0, gl.float32, acc[p].type.layout)
        x = gl.fma(acc[p], scale_rows(ones, keep), scale_rows(out[p], add))
        folded = folded + (x,)  # noqa: RUF005
    return m_new, w, folded


@gluon.jit
def _close_parts(total):
    """Pieces of out, and lse, of all parts."""
    m, w, acc = total
    is_empty = w == 0.0
    inverse = reciprocal(gl.where(is_empty, 1.0, w))
    lse = m + gl.log2(gl.where(is_empty, 1.0, w)) * LN2
    out = ()
    for p in gl.static_range(len(acc)):
        out = out + (scale_rows(acc[p], inverse),)  # noqa: RUF005
    return out, gl.where(is_empty, -float("inf"), lse)
