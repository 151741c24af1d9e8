"""The results of a tile of one consumer: rows that failed are marked, and everything is stored."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    tma_store_wait,
)
from lockstep.kernels.hopper.common.pieces import piece_start, piece_width, row_sums
from lockstep.kernels.hopper.common.softmax import LARGE_MAX, OVERFLOW
from lockstep.kernels.hopper.forward import grouped_rows
from lockstep.kernels.hopper.forward.key_parts import hand_out
from lockstep.kernels.hopper.forward.program import close_total, normalize
from lockstep.kernels.hopper.forward.scheduling.schedule import BAD


@gluon.jit
def store_columns(program, tile, first_row, column: gl.constexpr, o, o_desc):
    """Send columns of the output, which are in shared memory, on their way."""
    fence_async_shared()
    if program.schedule.HEADS:
        grouped_rows.store_rows(program.schedule, tile, first_row, column, o, o_desc)
    else:
        tma_store(o_desc, program.schedule.q_coordinates(tile, first_row, column), o)


@gluon.jit
def store_piece(program, tile, first_row, p: gl.constexpr, x, o, o_desc):
    """Send the p-th piece of the output [ROWS, ·] on its way through shared memory `o`, which may
    have room for several or for half of it."""
    COLUMNS: gl.constexpr = program.v.COLUMNS
    START: gl.constexpr = piece_start(COLUMNS, p)
    WIDTH: gl.constexpr = piece_width(COLUMNS, p)
    ROOM: gl.constexpr = o.shape[4]
    AT: gl.constexpr = START % ROOM
    room = o.reshape([ROWS, ROOM])
    if AT == 0:
        tma_store_wait(0)
    if WIDTH > ROOM:
        left, right = x.reshape([ROWS, 2, ROOM]).permute((0, 2, 1)).split()
        room.store(left)
        store_columns(program, tile, first_row, START, o, o_desc)
        tma_store_wait(0)
        room.store(right)
        store_columns(program, tile, first_row, START + ROOM, o, o_desc)
    else:
        if WIDTH < ROOM:
            room = room.slice(AT, WIDTH, dim=1)
        room.store(x)
        if START + WIDTH == COLUMNS or AT + WIDTH == ROOM:
            store_columns(program, tile, first_row, START - AT, o, o_desc)


@gluon.jit
def store_results(
    c: gl.constexpr, program, results, tile, rows, acc, m, l, beside, error, bad, o_smem, o_desc
):
    """Write the results of a tile; 1 for rows [ROWS] that are to be computed again, else 0. `bad`
    is its first bad key in constant time, and of no use elsewhere."""
    row_layout: gl.constexpr = m.type.layout
    schedule = program.schedule
    is_large = (gl.abs(m) * program.score_scale() >= LARGE_MAX) & (m > -float("inf"))
    if program.build.SPAN:
        # These are totals, and `beside` is the sum r.
        out, lse, m, l = close_total(program, results, tile, c, rows, acc, m, l, beside, error)
    else:
        first_bad = None
        if program.build.CLEANS and not program.schedule.HAS_LEFT:
            first_bad = bad
        out, lse, m, l = normalize(
            program, results, tile, c, rows, acc, m, l, beside, None, first_bad,
            o_desc.dtype,
        )  # fmt: skip
    first_row = tile.q_idx + c * ROWS
    if schedule.SPLIT and c > 0:
        # Rows that are another program's, as no others, are not stored.
        first_row = gl.where(first_row < tile.len_q, first_row, schedule.n_rows(schedule.Sq))
    row = first_row + gl.arange(0, ROWS, row_layout)
    exists = schedule.exist(tile, row)
    wrong = gl.full([ROWS], 0, gl.int32, row_layout)
    if program.build.SECOND_PASS and rows.have_edges():
        total = row_sums(out, row_layout)
        is_nonfinite = exists & ((gl.abs(total) < float("inf")) == 0) & (rows.inner_end != BAD)
        lse = gl.where(is_nonfinite, float("inf"), lse)
        wrong = gl.where(is_nonfinite, 1, 0)
    if program.build.SECOND_PASS:
        overflows = exists & (is_large | ((l < OVERFLOW) == 0))
        lse = gl.where(overflows, float("nan"), lse)
        wrong = wrong | gl.where(overflows, 1, 0)
    if schedule.PARTS:
        is_whole = tile.keys.n_parts == 1
        if not is_whole:
            out, lse, is_whole = hand_out(c, program, results, tile, out, lse)
            wrong = gl.where(exists & is_whole & ((gl.abs(lse) < float("inf")) == 0), 1, 0)
            # Without a key.
            wrong = gl.where(lse == -float("inf"), 0, wrong)
        if is_whole:
            store_rows(
                program, results, tile, first_row, row, out, lse, m, l, exists, o_smem, o_desc
            )
    else:
        store_rows(
            program, results, tile, first_row, row, out, lse, m, l, exists, o_smem, o_desc
        )  # fmt: skip
    return wrong


@gluon.jit
def store_rows(program, results, tile, first_row, row, out, lse, m, l, exists, o_smem, o_desc):
    """Send what rows have on its way; `row` [ROWS] begins with the first."""
    for p in gl.static_range(len(out)):
        x = out[p].to(o_desc.dtype)
        store_piece(program, tile, first_row, p, x, o_smem.index(0), o_desc)
    results.store_statistics(results.place(program.schedule, tile, row), lse, m, l, exists)
