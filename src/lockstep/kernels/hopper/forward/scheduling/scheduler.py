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
from lockstep.kernels.hopper.forward.scheduling.tile_parts import has_slot_each, part_of


@gluon.jit
def end_beside_others():
    """The end of a program whose kernel runs beside the one before it: who waits for this one,
    waits for both."""
    gdc_launch_dependents()
    gdc_wait()


@gluon.jit
def schedule_tiles(program):
    if program.schedule.LAYOUT == "varlen":
        schedule_by_ticket(program)
        if program.pages.ROWS:
            end_beside_others()
    else:
        schedule_by_program(program)


@gluon.jit
def post_parts(program, calls, tile, has_slot_each):
    """Post the parts of a tile that are this program's: its own, or all of them. Returns how many
    tiles have been posted."""
    if program.schedule.PARTS:
        keys = tile.keys
        end = gl.where(has_slot_each, keys.part + 1, keys.n_parts)
        for part in range(keys.part, end):
            if program.schedule.LAYOUT == "varlen":  # noqa: SIM102, Gluon would evaluate both
                if part > keys.part:
                    program.tile_queue.await_wish(calls)
            program.tile_queue.post(calls, part_of(program.schedule, tile, part))
            calls += 1
        return calls
    else:  # noqa: RET505, Gluon would go on and return both
        program.tile_queue.post(calls, tile)
        return calls + 1


@gluon.jit
def has_slots(schedule):
    """Whether parts have slots of their own (`tile_parts.has_slot_each`), if there are any."""
    if schedule.PARTS:
        return has_slot_each(schedule)
    else:  # noqa: RET505, as above
        return False


@gluon.jit
def n_posted(program, tile, has_slot_each):
    """How many parts of a tile were posted."""
    if program.schedule.PARTS:
        return gl.where(has_slot_each, 1, tile.keys.n_parts)
    else:  # noqa: RET505, as above
        return 1


@gluon.jit
def schedule_by_program(program):
    schedule = program.schedule
    has_slot_each = has_slots(schedule)
    calls = 0
    step = 0
    step, tile = schedule.next(step)
    while tile.exists:
        calls = post_parts(program, calls, tile, has_slot_each)
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
                # The last part of a tile has the bit of all.
                place += n_posted(program, tile, has_slot_each)
                if (wrong >> ((place - 1) % 32)) & 1:
                    program.tile_queue.post(calls, tile)
                    calls += 1
                step, tile = schedule.next(step + 1)
        # This one does not exist.
        program.tile_queue.post(calls, tile)


@gluon.jit
def schedule_by_ticket(program):
    schedule = program.schedule
    before_ptr = schedule.sequence_order_ptr + ORDER_HEAD + ORDER_NUMBERS * (schedule.B + 1)
    is_line = schedule.order == LONGEST_FIRST
    has_slot_each = has_slots(schedule)
    calls = 0
    last = -1
    # The first ticket of a program is its number.
    ticket = gl.program_id(0)
    tile = schedule.packed_tile(ticket)
    while tile.exists:
        calls = post_parts(program, calls, tile, has_slot_each)
        gl.store(before_ptr + ticket, last, mask=is_line)
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
                again = schedule.packed_tile(last)
                # The last part of a tile has the bit of all.
                if (wrong >> ((place - 1) % 32)) & 1:
                    program.tile_queue.post(calls, again)
                    calls += 1
                place -= n_posted(program, again, has_slot_each)
                last = gl.load(before_ptr + last, mask=is_line, other=-1)
        program.tile_queue.post(calls, tile)
