"""What single instructions mean to the analysis: operands, conditions, places in local memory."""

from __future__ import annotations

import re

from .code import Code, Instruction, Operand
from .parameters import Parameter
from .values import ALL_BITS, NOTHING, SECRET, State, Value, address_base, clear_bits, origin

_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_INDEXED_CONSTANT = re.compile(r"c\[0x0\]\[[^0\]]|cx\[")
# Kinds of memory, as states name them.
SHARED, LOCAL = "shared", "local"


def chosen(each: Instruction, new: Value, state: State) -> Value:
    """What a register may hold that is written under a secret condition: the bits that are the
    same in both cases tell nothing."""
    if each.name not in ("LOP3", "ULOP3") or each.read[0].text != each.written[0].text:
        return new._replace(clear=0)
    changed = each.read[1].constant
    if changed is None or each.read[3].constant not in (0xC0, 0xFC):
        return new._replace(clear=0)
    if each.read[3].constant == 0xC0:
        changed = ~changed & ALL_BITS
    return new._replace(clear=clear_bits(state.get(each.read[0].text, NOTHING)) & ~changed)


def memory_operand(operands: tuple[Operand, ...]) -> Operand:
    """The operand that is an address."""
    return next(x for x in operands if "[" in x.text)


def access_bytes(each: Instruction) -> int:
    """How many bytes of memory each thread accesses."""
    return 16 if "128" in each.kinds else 8 if "64" in each.kinds else 4


def local_key(memory: Operand, state: State) -> int | None:
    """Where an access to local memory goes, if it is to a constant place."""
    return address_base(memory, state) if set(memory.registers) <= {"R1"} else None


def constant_labels(each: Instruction, parameters: tuple[Parameter, ...]) -> int:
    """Labels of the parameters that an instruction reads from the constant bank."""
    found = 0
    for operand in each.read:
        if _INDEXED_CONSTANT.search(operand.text):
            found |= SECRET
        for offset in _CONSTANT.findall(operand.text):
            at = int(offset, 16)
            for i, parameter in enumerate(parameters):
                if parameter.begin <= at < parameter.end and parameter.end - parameter.begin == 8:
                    found |= origin(i)
    return found


def leaders(code: Code) -> set[int]:
    """Instructions that may follow on others than the one before, or on a choice."""
    found = {0}
    for i, follow in enumerate(code.successors):
        if follow != (i + 1,):
            found.update(follow)
            found.add(i + 1)
    return found
