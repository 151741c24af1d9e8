"""Operands of x86_64 instructions, as LLVM writes them: registers, places on the stack, secrets.

A vector register holds a secret, words, or neither. Words are what was loaded from memory and not
looked at yet: as addresses and counts have 64 bits in the CPU kernels, operations on lanes of 64
bits leave words what they are, while those on floats and on narrower lanes make secrets of them.
"""

from __future__ import annotations

import re

from lockstep.audit.timing.state import State

_LEGACY = {part: f"r{name}x" for name in "abcd" for part in (f"r{name}x", f"e{name}x", f"{name}x")}
_LEGACY |= {f"{name}{half}": f"r{name}x" for name in "abcd" for half in "lh"}
for _name in ("si", "di", "bp", "sp"):
    _LEGACY |= dict.fromkeys((f"r{_name}", f"e{_name}", _name, f"{_name}l"), f"r{_name}")
_NUMBERED = re.compile(r"(r\d+)[bwd]?$")
_REGISTER = re.compile(r"%(\w+)")
_VECTOR = re.compile(r"^%(?:([xyz])mm|(k))(\d+)")
_WIDTH = {"x": 16, "y": 32, "z": 64}
# Lanes of 64 bits, or none: moves and bitwise logic.
_WIDE = re.compile(
    r"v(p\w*q|p\w*qdq|pmuludq|inserti?f?\w+|extracti?f?\w+|perm2\w+|pshufd|shufps|permilps|\w*pd|pblendd|"
    r"p?andn?(ps|d)?|p?xor(ps|d)?|p?or(ps|d)?|mov(aps|ups|dq\w+|q|sd|ddup|lhps|hlps)|palignr)$"
)
# Arithmetic that takes words for integers of 64 bits.
_ON_WORDS = re.compile(r"vp(add|sub|cmp\w*|mulu?d|mull|s?u?max\w?|s?u?min\w?)q$")
_NARROW_LOADS = re.compile(r"vpmov[sz]x(?!..q)|vmov(ss|d)$|vbroadcastss")


def split(text: str) -> list[str]:
    """Operands, at the commas that are not inside an address."""
    return [x.strip() for x in re.split(r",(?![^(]*\))", text) if x.strip()]


def names(operand: str) -> list[str]:
    """The general registers in an operand, each by one name whatever its width."""
    found = []
    for name in _REGISTER.findall(operand):
        numbered = _NUMBERED.match(name)
        whole = numbered[1] if numbered else _LEGACY.get(name)
        if whole is not None:
            found.append(whole)
    return found


def indices(operand: str) -> list[str]:
    """The vector registers in an address, as gathers have them."""
    return [f"v{n}" for n in re.findall(r"%[xyz]mm(\d+)", operand)]


def is_memory(operand: str) -> bool:
    return "(" in operand


def vector(operand: str) -> str | None:
    """The name of a vector or mask register; None for other operands."""
    found = _VECTOR.match(operand)
    return None if found is None else f"{'k' if found[2] else 'v'}{found[3]}"


def masks(mnemonic: str, operands: list[str]) -> list[str]:
    """The registers that say on which lanes an instruction works."""
    found = [f"k{n}" for x in operands for n in re.findall(r"\{%k(\d+)\}", x)]
    if re.match(r"vp?maskmov", mnemonic):
        found += [x for x in map(vector, operands[1:2]) if x]
    elif re.match(r"vp?gather", mnemonic):
        found += [x for x in map(vector, operands[:1]) if x]
    return found


def slots(state: State, operand: str, size: int = 8) -> list[str]:
    """The words of the stack that an operand of some bytes names; none for other memory.

    Frames are addressed by the stack pointer: LLVM has the other register for other things.
    """
    found = re.match(r"(-?(?:0x)?[0-9a-f]*)\(%rsp\)$", operand)
    if found is None:
        return []
    first = (int(found[1] or "0", 0) - state.depth) // 8
    return [f"slot {first + i}" for i in range(size // 8)]


def is_constant(state: State, operand: str) -> bool:
    """Whether an address is that of a constant or of the stack."""
    is_known = any(f"{name} constant" in state.registers for name in names(operand))
    return is_known or bool(slots(state, operand))


def is_secret(state: State, mnemonic: str, operand: str) -> bool:
    """Whether what a general register gets from an operand is one."""
    if operand.startswith("$"):
        return False
    register = vector(operand)
    if register is not None:
        is_word = bool(re.match(r"vmovq|vpextrq", mnemonic))
        return level(state, mnemonic, operand) > (1 if is_word else 0)
    if is_memory(operand) and not mnemonic.startswith("lea"):
        where = slots(state, operand)
        return where[0] in state.registers if where else _is_short(mnemonic)
    return any(name in state.registers for name in names(operand))


def _is_short(mnemonic: str) -> bool:
    """Whether an instruction of general registers reads 32 bits or less from memory."""
    return mnemonic.startswith(("movz", "movs", "v")) or not mnemonic.endswith("q")


def level(state: State, mnemonic: str, operand: str, beside: str = "") -> int:
    """The level of a vector register that gets an operand: 2 for a secret, 1 for words, 0 for
    neither.

    `beside` is a register of the same instruction, which says how wide memory is read.
    """
    register = vector(operand)
    if register is not None:
        return 2 if register in state.registers else int(f"{register} words" in state.registers)
    if is_memory(operand):
        where = slots(state, operand, _size(mnemonic, beside))
        if where:
            # A mask that was kept on the stack is what it was.
            otherwise = 0 if mnemonic.startswith("k") else 1
            return 2 if any(x in state.registers for x in where) else otherwise
        if any(f"{name} constant" in state.registers for name in names(operand)):
            return 0
        return 2 if _NARROW_LOADS.match(mnemonic) else 1
    if operand.startswith("$"):
        return 0
    return 2 * any(name in state.registers for name in names(operand))


def lanes(mnemonic: str, levels: list[int]) -> int:
    """The level of the result of a vector operation."""
    highest = max(levels, default=0)
    if highest < 2 and _ON_WORDS.match(mnemonic):
        return 0
    return highest if highest == 0 or _WIDE.match(mnemonic) else 2


def write(state: State, operand: str, secret: bool) -> None:
    """A general register, or memory."""
    if is_memory(operand):
        for where in slots(state, operand):
            state.put(where, secret)
        return
    for name in names(operand):
        state.put(name, secret)
        state.put(f"{name} constant", False)


def write_vector(state: State, mnemonic: str, operand: str, value: int, source: str) -> None:
    """A vector register, or memory from the vector register `source`."""
    register = vector(operand)
    if register is not None:
        state.put(register, value == 2)
        state.put(f"{register} words", value == 1)
        return
    for where in slots(state, operand, _size(mnemonic, source)):
        state.put(where, value == 2)


def _size(mnemonic: str, register: str) -> int:
    """Bytes of memory that an instruction with a vector register moves, in whole words."""
    found = _VECTOR.match(register)
    if found is None or re.match(r"vmov(ss|sd|d|q)$|vpextr|v\w+s[sd]$", mnemonic):
        return 8
    return _WIDTH.get(found[1] or "", 8)
