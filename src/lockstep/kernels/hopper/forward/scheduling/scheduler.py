"""The scheduler warp says which tile is next, so that no other warp has to work it out.

Where sequences are packed, programs draw tickets: a program that is about to be done with a tile
takes the next one, so none is left with a long tile when the others are done. (A ticket decides
which program computes a tile, never the result.) Else a program's tiles follow from its number.

After the first pass it sends the tiles once more in which rows failed (`second_pass.py`). For
that it has to know them: with a ticket goes the ticket that its program drew before.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import ORDER_HEAD, ORDER_NUMBERS
from lockstep.kernels.hopper.forward.scheduling.schedule import LONGEST_FIRST


@gluon.jit
def schedule_tiles(program):
    if program.schedule.LAYOUT == "varlen":
        schedule_by_ticket(program)
        if program.pages.ROWS:
            gdc_launch_dependents()
            # The kernel before this one runs beside it: who waits for this one, waits for both.
            gdc_wait()
    else:
        schedule_by_program(program)


@gluon.jit
def schedule_by_program(program):
    schedule = program.schedule
    calls = 0
    step = 0
    step, tile = schedule.next(step)
    while tile.exists:
        program.tile_queue.post(calls, tile)
        calls += 1
        step, tile = schedule.next(step + 1)
    program.tile_queue.post(calls, tile)
    if program.build.SECOND_PASS:
        wrong = program.failed.collect()
        calls += 1
        if wrong != 0:
            place = 0
            step = 0
            step, tile = schedule.next(step)
            while tile.exists:
                if (wrong >> (place % 32)) & 1:
                    program.tile_queue.post(calls, tile)
                    calls += 1
                place += 1
                step, tile = schedule.next(step + 1)
        # This one does not exist.
        program.tile_queue.post(calls, tile)


@gluon.jit
def schedule_by_ticket(program):
    schedule = program.schedule
    before_ptr = schedule.sequence_order_ptr + ORDER_HEAD + ORDER_NUMBERS * (schedule.B + 1)
    is_line = schedule.order == LONGEST_FIRST
    calls = 0
    last = -1
    # The first ticket of a program is its number.
    ticket = gl.program_id(0)
    tile = schedule.packed_tile(ticket)
    while tile.exists:
        program.tile_queue.post(calls, tile)
        gl.store(before_ptr + ticket, last, mask=is_line)
        calls += 1
        last = ticket
        # Without an order, there are no further ones.
        ticket = gl.num_programs(0)
        if is_line:
            program.tile_queue.await_wish(calls)
            ticket += gl.atomic_add(schedule.sequence_order_ptr, 1, sem="relaxed", scope="gpu")
        tile = schedule.packed_tile(ticket)
    program.tile_queue.post(calls, tile)
    if program.build.SECOND_PASS:
        wrong = program.failed.collect()
        place = calls
        calls += 1
        if wrong != 0:
            while last >= 0:
                place -= 1
                if (wrong >> (place % 32)) & 1:
                    program.tile_queue.post(calls, schedule.packed_tile(last))
                    calls += 1
                last = gl.load(before_ptr + last, mask=is_line, other=-1)
        program.tile_queue.post(calls, tile)
