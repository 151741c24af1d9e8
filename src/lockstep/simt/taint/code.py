"""Machine code as the analysis reads it: instructions with what they read and write, and where
control goes from each.

The text is nvdisasm's, for sm_80 to sm_90. An instruction whose operands this module does not know
raises SimtError: what is not known could hide a leak.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property

from lockstep.simt.errors import SimtError
from lockstep.simt.sass import nvdisasm_path

from .opcodes import CONTROL, COPIES, KNOWN, PRODUCTS, SILENT

_MARK = re.compile(r'//## File "([^"]*)", line (\d+)')
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*$")
_LABEL = re.compile(r"^(\.L_x_\w+|\.L_\w+|\$?\w[\w$.]*):\s*$")
_GUARD = re.compile(r"^@(!?)(U?P\w+)\s+")
_TARGET = re.compile(r"`\(([^)]+)\)")
_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"]+)\"")
_REGISTER = re.compile(r"(?<![\w.])(U?R)(\d+)(\.64)?(?!\w)")
_PREDICATE = re.compile(r"(?<![\w.])(U?P\d+)(?!\w)")
_PLAIN_PREDICATE = re.compile(r"^(U?P\d+|U?PT)$")

_GROUPS = {f"{n}D": n + 2 for n in range(1, 6)}


@dataclass(frozen=True)
class Operand:
    """One operand: its text, and the registers and predicates in it, as names."""

    text: str
    registers: tuple[str, ...]

    @property
    def is_memory(self) -> bool:
        return "[" in self.text and not self.text.startswith(("c[", "cx[", "-c[", "|c["))

    @cached_property
    def constant(self) -> int | None:
        """The number that it is, if it is one."""
        try:
            return int(self.text, 0)
        except ValueError:
            return None


@dataclass(frozen=True)
class Instruction:
    """One machine instruction; `file` and `line` are where its source says it comes from."""

    address: int
    text: str
    guard: str | None
    condition: str  # the guard with its sign, "!P1"
    name: str
    kinds: tuple[str, ...]
    written: tuple[Operand, ...]
    read: tuple[Operand, ...]
    file: str
    line: int

    @cached_property
    def numbers(self) -> tuple[Operand, ...]:
        """The operands it reads, without predicates."""
        return tuple(x for x in self.read if not x.text.lstrip("!").startswith(("P", "UP")))

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.kinds))


@dataclass(frozen=True)
class Code:
    """A kernel: its instructions, and the places in it that may follow each of them."""

    instructions: tuple[Instruction, ...]
    successors: tuple[tuple[int, ...], ...]

    @cached_property
    def has_bases(self) -> bool:
        """Whether addresses of shared memory have a base that no index has: that of a cluster."""
        return any("SR_CgaCtaId" in each.text for each in self.instructions)

    @cached_property
    def is_specialized(self) -> bool:
        """Whether warps go different ways, and hand registers to each other."""
        return any(each.name == "USETMAXREG" for each in self.instructions)


def read_code(cubin: bytes) -> Code:
    """The one kernel of a cubin. Raises SimtError for machine code that is not understood."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm_path(), "--print-line-info-inline", "--print-code", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimtError(f"nvdisasm failed:\n{done.stderr}")
    return parse(done.stdout)


def parse(text: str) -> Code:
    """The code that nvdisasm printed."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    file, number = "", 0
    for line in text.splitlines():
        if mark := _MARK.search(line):
            file, number = mark[1], int(mark[2])
        elif found := _LINE.match(line):
            instructions.append(_instruction(int(found[1], 16), found[2], file, number))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
    places = range(len(instructions))
    after_calls = tuple(i + 1 for i in places if instructions[i].name == "CALL")
    follow = (_successors(i, instructions[i], labels, after_calls) for i in places)
    return Code(
        tuple(instructions), tuple(tuple(j for j in each if j in places) for each in follow)
    )


def _successors(
    i: int, each: Instruction, labels: dict[str, int], after_calls: tuple[int, ...]
) -> tuple[int, ...]:
    if each.name == "BRX" or each.name == "JMX":
        targets = _TARGETS.search(each.text)
        if targets is None:
            raise SimtError(f"a jump without known targets: {each.text}")
        return tuple(labels[name.strip()] for name in targets[1].split(","))
    if each.name == "RET":
        return after_calls
    falls = (i + 1,)
    if each.name in ("EXIT", "KILL"):
        return falls if each.guard else ()
    target = _TARGET.search(each.text)
    if each.name in ("BRA", "JMP", "CALL", "WARPSYNC") and target:
        is_certain = each.name in ("BRA", "JMP") and not each.guard and not each.read
        # A call of a function outside this kernel never returns into it in another way.
        to = (labels[target[1]],) if target[1] in labels else ()
        return to if is_certain else falls + to
    return falls


def _instruction(address: int, text: str, file: str, line: int) -> Instruction:
    guard = _GUARD.match(text)
    rest = text[guard.end() :] if guard else text
    opcode, _, tail = rest.partition(" ")
    name, *kinds = opcode.split(".")
    if name not in KNOWN:
        raise SimtError(f"an instruction that the analysis does not know: {text}")
    operands = [_operand(name, kinds, part, i) for i, part in enumerate(_split(tail))]
    n = _count_written(name, kinds, operands)
    written = tuple(_widened(x, _width(name, kinds)) for x in operands[:n])
    read = tuple(_widened(x, _read_width(name, kinds, i)) for i, x in enumerate(operands[n:]))
    whole = guard[2] if guard and guard[2] not in ("PT", "UPT") else None
    condition = guard[1] + guard[2] if guard else ""
    return Instruction(
        address, text, whole, condition, name, tuple(kinds), written, read, file, line
    )


def _split(tail: str) -> list[str]:
    """Operands, at commas outside of brackets; without the targets of jumps."""
    tail = re.sub(r"\(\*.*?\*\)", "", tail)
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(tail):
        depth += (c in "[({") - (c in "])}")
        if c == "," and not depth:
            parts.append(tail[begin:i])
            begin = i + 1
    parts.append(tail[begin:])
    stripped = (part.strip() for part in parts)
    return [part for part in stripped if part and not part.startswith("`")]


def _operand(name: str, kinds: list[str], part: str, i: int) -> Operand:
    """The operand in place `i`."""
    part = part.replace(".reuse", "")
    if name in PRODUCTS and part.startswith("gdesc["):
        return _factors(part, i)
    found = []
    for kind, number, is_wide in _REGISTER.findall(part):
        width = 2 if is_wide else 1
        if name in COPIES and "[" in part:
            # The first of a group, two addresses and the coordinates; then where the tensor map
            # lies, in 64 bits.
            group = _GROUPS.get(kinds[0]) if kinds else None
            width = 4 if group is None else group if i == 0 else 2
        elif "desc[" in part and kind == "UR":
            width = 2
        found += [f"{kind}{int(number) + i}" for i in range(width)]
    found += _PREDICATE.findall(part)
    if part == "PR":
        found += [f"P{i}" for i in range(7)]
    return Operand(part, tuple(found))


def _factors(part: str, i: int) -> Operand:
    """`gdesc[UR4]` in place `i`: descriptors of both factors, in two registers each. If the first
    factor is in registers, as in `R24, R152, gdesc[UR4]`, its descriptor is not read."""
    first = int(part[len("gdesc[UR") :].partition("]")[0])
    used = range(first if i == 1 else first + 2, first + 4)
    return Operand(part, tuple(f"UR{n}" for n in used))


def _widened(x: Operand, width: int) -> Operand:
    """The operand with the further registers that an instruction takes of each."""
    if width == 1 or "[" in x.text:
        return x
    more = []
    for kind, number, _ in _REGISTER.findall(x.text):
        more += [f"{kind}{int(number) + i}" for i in range(width)]
    return Operand(x.text, tuple(dict.fromkeys((*x.registers, *more))))


def _count_written(name: str, kinds: list[str], operands: list[Operand]) -> int:
    """How many of the operands, from the first on, are written."""
    if name in ("STG", "ST", "STS", "STSM", "STL", "RED", "REDG", "LDGSTS", "BAR") or (
        name in COPIES | SILENT | CONTROL
    ):
        return 0
    if name in ("ISETP", "UISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "UPLOP3"):
        return 2
    if name in ("VOTE", "VOTEU", "MATCH"):
        return len(operands) - 1
    if name in ("R2P", "FCHK", "UR2UP"):
        return 1
    n = 0
    while n < len(operands) and _PLAIN_PREDICATE.match(operands[n].text):
        n += 1
    if n < len(operands) and re.match(r"^U?R(\d+|Z)$", operands[n].text):
        n += 1
    # Carries.
    while n < len(operands) and n > 0 and _PLAIN_PREDICATE.match(operands[n].text):
        if not name.endswith(("IADD3", "LEA", "IMAD")):
            break
        n += 1
    return n


def _width(name: str, kinds: list[str]) -> int:
    """How many registers an instruction writes from the one it names."""
    if name in PRODUCTS:
        shape = next(kind for kind in kinds if "x" in kind)
        return int(shape.split("x")[1]) // 2
    if name in ("HMMA", "IMMA", "DMMA"):
        return 4
    if name == "LDSM":
        return {"4": 4, "2": 2}.get(kinds[-1], 1)
    if "128" in kinds:
        return 4
    if name == "CS2R":
        return 1 if "32" in kinds else 2
    is_double = name in ("DADD", "DFMA", "DMUL", "DMNMX")
    if name in ("F2F", "I2F", "F2I", "FRND"):
        # The first type is that of the result.
        types = [kind for kind in kinds if re.fullmatch(r"B?[FSU]\d+", kind)]
        is_double = bool(types) and types[0].endswith("64")
        return 2 if is_double else 1
    return 2 if is_double or "64" in kinds or "WIDE" in kinds else 1


def _read_width(name: str, kinds: list[str], i: int) -> int:
    """How many registers it reads from the one in its i-th operand, at most."""
    if "WIDE" in kinds:
        # Factors of 32 bits, and what is added to their product.
        return 2 if i == 2 else 1
    if name in PRODUCTS or name in ("HMMA", "IMMA", "DMMA") or "128" in kinds:
        return 4
    if name == "STSM":
        return {"4": 4, "2": 2}.get(kinds[-1], 1)
    if name.startswith("D") and name != "DEPBAR":
        return 2
    is_double = name in ("F2F", "I2F", "F2I", "FRND") and any("64" in kind for kind in kinds)
    return 2 if is_double or "64" in kinds else 1
