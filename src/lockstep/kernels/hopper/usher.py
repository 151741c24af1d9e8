"""The usher: one warp that says which tile is next, so that no one else has to work it out.

Where sequences are packed, programs draw tickets: whoever is through with a tile takes the next
one, so none is left with a long tile when the others are done. (A ticket decides who computes a
tile, and never what comes out.) Else a program's tiles follow from its number.

After the first lap the usher calls the tiles once more in which rows went wrong (`second_lap.py`).
For that it has to know them: with a ticket goes the ticket that its program drew before.
"""

from __future__ import annotations

from lockstep.kernels.hopper.gluon_shim import gl, gluon
from lockstep.kernels.hopper.schedule import LINE_HEAD, LINE_NUMBERS, LONGEST_FIRST


@gluon.jit
def usher(team):
    if team.schedule.LAYOUT == "varlen":
        call_by_ticket(team)
    else:
        call_by_number(team)


@gluon.jit
def call_by_number(team):
    schedule = team.schedule
    calls = 0
    step = 0
    step, tile = schedule.next(step)
    while tile.exists:
        team.board.post(calls, tile)
        calls += 1
        step, tile = schedule.next(step + 1)
    team.board.post(calls, tile)
    if team.build.SECOND_LAP:
        wrong = team.lap.wrong_tiles()
        calls += 1
        if wrong != 0:
            place = 0
            step = 0
            step, tile = schedule.next(step)
            while tile.exists:
                if (wrong >> (place % 32)) & 1:
                    team.board.post(calls, tile)
                    calls += 1
                place += 1
                step, tile = schedule.next(step + 1)
        # This one does not exist.
        team.board.post(calls, tile)


@gluon.jit
def call_by_ticket(team):
    schedule = team.schedule
    before_ptr = schedule.line_ptr + LINE_HEAD + LINE_NUMBERS * (schedule.B + 1)
    is_line = schedule.order == LONGEST_FIRST
    calls = 0
    last = -1
    # Everyone's first ticket is its number.
    ticket = gl.program_id(0)
    tile = schedule.packed_tile(ticket)
    while tile.exists:
        team.board.post(calls, tile)
        gl.store(before_ptr + ticket, last, mask=is_line)
        calls += 1
        last = ticket
        # As they come, there are no further ones.
        ticket = gl.num_programs(0)
        if is_line:
            ticket += gl.atomic_add(schedule.line_ptr, 1, sem="relaxed", scope="gpu")
        tile = schedule.packed_tile(ticket)
    team.board.post(calls, tile)
    if team.build.SECOND_LAP:
        wrong = team.lap.wrong_tiles()
        place = calls
        calls += 1
        if wrong != 0:
            while last >= 0:
                place -= 1
                if (wrong >> (place % 32)) & 1:
                    team.board.post(calls, schedule.packed_tile(last))
                    calls += 1
                last = gl.load(before_ptr + last, mask=is_line, other=-1)
        team.board.post(calls, tile)
