"""Functions of machine code, once for each call of them: what returns, returns to where it was
called from."""

from __future__ import annotations

from .code import Code, Instruction

# Calls inside of calls: beyond these, a function returns after every call there is.
_DEEPEST = 3


def inlined(code: Code) -> Code:
    """The same code, with a copy of a function after it for each call."""
    instructions: list[Instruction] = list(code.instructions)
    successors = list(code.successors)
    waiting = [(i, 0) for i, each in enumerate(instructions) if each.name == "CALL"]
    while waiting:
        at, depth = waiting.pop()
        original = code.instructions.index(instructions[at])
        entries = [j for j in code.successors[original] if j != original + 1]
        if len(entries) != 1 or depth == _DEEPEST:
            continue
        body = sorted(_body(code, entries[0]))
        copies = {j: len(instructions) + n for n, j in enumerate(body)}
        # A call in a copy is followed by the copy of what follows it.
        behind = successors[at][0]
        for j in body:
            each = code.instructions[j]
            if each.name == "RET":
                successors.append((behind,))
            else:
                successors.append(tuple(copies.get(x, x) for x in code.successors[j]))
            if each.name == "CALL":
                waiting.append((len(instructions), depth + 1))
            instructions.append(each)
        successors[at] = (behind, copies[entries[0]])
    return Code(tuple(instructions), tuple(successors))


def _body(code: Code, entry: int) -> set[int]:
    """The instructions that are reached from an entry without a return, without the bodies of other
    functions."""
    found, waiting = {entry}, [entry]
    while waiting:
        i = waiting.pop()
        name = code.instructions[i].name
        follow = code.successors[i]
        if name == "RET":
            continue
        for j in (i + 1,) if name == "CALL" else follow:
            if j not in found:
                found.add(j)
                waiting.append(j)
    return found
