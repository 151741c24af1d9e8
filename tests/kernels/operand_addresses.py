"""Whether products of sm_90 read their operands from shared memory.

A warpgroup's product finds its operands by descriptors in uniform registers, whose lower word is an
address. ptxas has been seen to use registers for that which it had never set. So this follows
through all paths of a kernel which registers hold something that derives from the base of shared
memory, and tells which products rely on any other.
"""

from __future__ import annotations

import re

from machine_code import sass_of

Instructions = list[tuple[int, str]]

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_PREDICATE = re.compile(r"@!?\S+ ")
_REGISTER = re.compile(r"(?<![\w.])(U?R)(\d+)(?!\w)")
_LOCAL = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")
_BRANCH = re.compile(r"BRA\S* (.*?)0x([0-9a-f]+)")
# What comes from memory or from other threads is no address, nor do these set a register.
_NO_ADDRESS = ("LD", "SHFL", "REDUX", "ATOM")
_NO_RESULT = ("ST", "RED.", "BAR", "BRA", "EXIT", "SYNCS", "UTMA", "WARPGROUP", "LDGSTS")


def lost_operands(cubin: bytes) -> list[str]:
    """Products with an operand at an address that does not derive from the base."""
    return lost_in(sass_of(cubin))


def lost_in(sass: str) -> list[str]:
    """The same of what cuobjdump prints."""
    instructions = [(int(at, 16), line) for at, line in _INSTRUCTION.findall(sass)]
    index = {at: i for i, (at, _) in enumerate(instructions)}
    # Before each instruction: the registers that hold an address whatever the path. None: no path.
    before: list[frozenset[str] | None] = [None] * len(instructions)
    before[0] = frozenset()
    pending, lost = [0], {}
    while pending:
        i = pending.pop()
        known, line = before[i], instructions[i][1]
        missing = [name for name in _operands(line) if name not in known]
        lost[i] = f"{line}: {', '.join(missing)}" if missing else ""
        after = _after(line, known)
        for j in _next(i, line, index):
            merged = after if before[j] is None else before[j] & after
            if merged != before[j]:
                before[j] = merged
                pending.append(j)
    return [line for line in lost.values() if line]


def _next(i: int, line: str, index: dict[int, int]) -> list[int]:
    bare = _PREDICATE.sub("", line, count=1)
    branch = _BRANCH.match(bare)
    conditional = bare != line or (branch is not None and "P" in branch[1])
    successors = [index[int(branch[2], 16)]] if branch else []
    if conditional or not (branch or bare.startswith(("EXIT", "RET"))):
        successors.append(i + 1)
    return [j for j in successors if j < len(index)]


def _operands(line: str) -> list[str]:
    """The registers with the addresses of a product: of b, and of a unless that is in registers."""
    if "HGMMA" not in line:
        return []
    arguments = line.split(", ")
    place = next(n for n, argument in enumerate(arguments) if argument.startswith("gdesc"))
    first = int(_REGISTER.search(arguments[place])[2])
    return [f"UR{first + 2}"] + ([f"UR{first}"] if place == 1 else [])


def _after(line: str, known: frozenset[str]) -> frozenset[str]:
    """The registers, and words of local memory, that hold an address after an instruction."""
    operation, _, rest = _PREDICATE.sub("", line, count=1).partition(" ")
    arguments = rest.split(", ")
    width = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
    local = _LOCAL.search(rest)
    words = [f"local {int(local[1] or '0', 16) + 4 * n}" for n in range(width)] if local else []
    if operation.startswith("STL"):
        registers = _run(arguments[-1], width)
        return (known - set(words)) | {
            word for word, name in zip(words, registers, strict=False) if name in known
        }
    results = next((n for n, argument in enumerate(arguments) if _REGISTER.match(argument)), None)
    if results is None or operation.startswith(_NO_RESULT):
        return known
    registers = _run(arguments[results], width)
    if operation.startswith("LDL"):
        found = {name for name, word in zip(registers, words, strict=False) if word in known}
        return (known - set(registers)) | found
    sources = {
        kind + number for kind, number in _REGISTER.findall(", ".join(arguments[results + 1 :]))
    }
    is_address = "SR_CgaCtaId" in rest or (
        bool(sources & known) and not operation.startswith(_NO_ADDRESS)
    )
    return known | set(registers) if is_address else known - set(registers)


def _run(argument: str, width: int) -> list[str]:
    """The names of `width` registers from the one named on."""
    first = _REGISTER.search(argument)
    return [f"{first[1]}{int(first[2]) + n}" for n in range(width)] if first else []
