"""Registers that machine code reads though on some path no instruction has written them.

ptxas has made such code of two loops that share a matrix descriptor: it computed the descriptor
where the first one begins, and jumped over that where the first one has no round.
"""

from __future__ import annotations

import re

from lockstep.simt.taint.code import Code, Instruction

_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")


def unassigned_reads(code: Code) -> list[str]:
    """Instructions that read such a register, each with its address and the register.

    A write under a predicate counts as one. How many registers a copy of the copy engine reads is
    not known here, so these are left out."""
    steps = code.instructions
    written = [_names(x.written) for x in steps]
    # Registers that have been written on every path to an instruction; None if there is no path.
    assigned: list[frozenset[str] | None] = [None] * len(steps)
    assigned[0] = frozenset()
    to_do = [0]
    while to_do:
        i = to_do.pop()
        behind = assigned[i] | written[i]
        for j in code.successors[i]:
            both = behind if assigned[j] is None else behind & assigned[j]
            if both != assigned[j]:
                assigned[j] = both
                to_do.append(j)
    return [
        f"{x.address:#x}: {x.text}: {name}"
        for x, before in zip(steps, assigned, strict=True)
        if before is not None
        for name in sorted(_read(x) - before)
    ]


def _read(x: Instruction) -> frozenset[str]:
    """The registers that an instruction reads."""
    if x.name.startswith("UTMA"):
        return frozenset()
    descriptor = _DESCRIPTOR.search(x.text)
    if not descriptor:
        return _names(x.read)
    # Two descriptors, of which the first is not read where the left operand is in registers.
    first = int(descriptor[1])
    skipped = 2 if x.read[0].text.startswith("R") else 0
    return frozenset(f"UR{first + i}" for i in range(skipped, 4))


def _names(operands: tuple) -> frozenset[str]:
    """Registers, without predicates: some instructions name all of these and read a few."""
    return frozenset(name for x in operands for name in x.registers if "R" in name)
