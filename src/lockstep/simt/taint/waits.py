"""Loops of machine code that wait: for a barrier in shared memory, for registers, or for a number
in global memory that another program writes.

How often they go round depends on when others arrive, and differs from one run to the next.
"""

from __future__ import annotations

from .code import Code, Instruction

# A loop that waits has few instructions, and one of these.
_LONGEST = 6
_POLL = ("LDG", "STRONG")
_TRIES = (("SYNCS", "TRYWAIT"), ("USETMAXREG", "TRY_ALLOC"), _POLL)


def wait_loops(code: Code) -> set[int]:
    """The instructions of such loops, by number, with the jump after a loop that was moved out of
    the way."""
    found: set[int] = set()
    for end, follow in enumerate(code.successors):
        is_choice = code.instructions[end].guard is not None
        begins = [begin for begin in follow if is_choice and end - _LONGEST < begin <= end]
        for begin in begins:
            if any(_tries(each) for each in code.instructions[begin : end + 1]):
                found.update(range(begin, end + 1))
                behind = code.instructions[end + 1 : end + 2]
                found.update(end + 1 for each in behind if each.name == "BRA" and not each.guard)
    return found


def polls_memory(code: Code) -> bool:
    """Whether any of these loops reads global memory: then how many sectors a kernel reads depends
    on time."""
    return any(_is(code.instructions[i], *_POLL) for i in wait_loops(code))


def _tries(each: Instruction) -> bool:
    return any(_is(each, *names) for names in _TRIES)


def _is(each: Instruction, name: str, kind: str) -> bool:
    return each.name == name and kind in each.kinds
