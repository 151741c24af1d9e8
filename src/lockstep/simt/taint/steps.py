"""Single instructions in the analysis: operands, conditions, places in local memory."""

from __future__ import annotations

import re
from itertools import pairwise

from .code import Code, Instruction, Operand
from .opcodes import BARRIERS, CONTROL, COPIES, LOADS, PRODUCTS, SILENT, STORES
from .parameters import Parameter
from .values import (
    ALL_BITS,
    NOTHING,
    SECRET,
    State,
    Under,
    Value,
    address_base,
    clear_bits,
    labels_of,
    origin,
)

_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_INDEXED_CONSTANT = re.compile(r"c\[0x0\]\[[^0\]]|cx\[")
# Kinds of memory, as states name them.
SHARED, LOCAL = "shared", "local"


def chosen(each: Instruction, new: Value, state: State) -> Value:
    """The value of a register that is written under a secret condition: bits that are the same in
    both cases tell nothing."""
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


def blocks_of(code: Code) -> dict[int, range]:
    """The instructions of each block by the first one: those that may follow on others than the one
    before, or on a choice, begin a block."""
    n = len(code.instructions)
    begins = {0, n}
    for i, follow in enumerate(code.successors):
        if follow != (i + 1,):
            begins.update(follow)
            begins.add(i + 1)
    return {begin: range(begin, end) for begin, end in pairwise(sorted(begins))}


def kinds_of(each: Instruction, state: State, public: int) -> list[str]:
    """The kinds of leaks that an instruction is; `public` has the labels of public buffers."""
    name = each.name
    guard = bool(each.guard) and state.get(each.guard, NOTHING).is_secret
    state = Under(state, each.condition) if each.guard else state
    if name in CONTROL:
        reaches = guard or labels_of(each.read, state) & SECRET
        return ["branch"] if reaches else []
    touches = LOADS | STORES | COPIES | BARRIERS | SILENT | PRODUCTS
    if name not in touches and name not in ("LDC", "ULDC"):
        return []
    kinds = []
    conditions = tuple(x for x in each.read if x.text.lstrip("!").startswith(("P", "UP")))
    if name not in ("LDC", "ULDC") and (guard or labels_of(conditions, state) & SECRET):
        kinds.append("predicated access")
    addresses = tuple(x for x in each.read if "[" in x.text)
    if name == "BAR":
        addresses = each.read
    if labels_of(addresses, state) & SECRET:
        kinds.append("address")
    if name in ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG"):
        to = labels_of(addresses, state)
        data = labels_of(tuple(x for x in each.read if "[" not in x.text), state)
        if data & SECRET and to & public and not to & ~public:
            kinds.append("public buffer")
    return kinds
