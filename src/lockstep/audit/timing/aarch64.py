"""One instruction of aarch64: what it makes of secrets."""

from __future__ import annotations

import re

from lockstep.audit.timing.state import ADDRESS, BRANCH, DIVISION, State

COMMENT, RESULT = "//", "x0"
ENTRY: frozenset[str] = frozenset()
"""What is secret where a function begins, beside all floats."""
_GENERAL = re.compile(r"\b[wx](\d+|zr)\b")
_FLOATING = re.compile(r"\b[bhsdqv]\d+\b")
_BRANCHES = ("cbz", "cbnz", "tbz", "tbnz", "br")
_SETS_FLAGS = ("subs", "adds", "ands", "bics")
# These have no destination.
_COMPARES = ("cmp", "cmn", "tst", "fcmp", "fcmpe", "ccmp", "ccmn")
_READS_FLAGS = ("csel", "cset", "csetm", "cinc", "csinc", "csinv", "csneg", "cneg", "cinv", "fcsel")
_SHORT_LOADS = ("ldrb", "ldrh", "ldrsb", "ldrsh", "ldrsw", "ldurb", "ldurh", "ldursw", "ldursb")

_SIZES = {"b": 1, "h": 2, "s": 4, "w": 4, "q": 16}


def ends(code: str) -> str | None:
    """How an instruction ends a way through a function, or None: "jump", "table" or "return"."""
    found = re.match(r"(b|br|ret)\s", code + " ")
    return {"b": "jump", "br": "table", "ret": "return"}[found[1]] if found else None


def step(state: State, code: str, call_returns_secret: bool) -> str | None:
    """Follows one instruction; returns what is wrong with it."""
    mnemonic, _, operands = code.replace("\t", " ", 1).partition(" ")
    operands = operands.strip()
    secret = state.registers
    address = re.search(r"\[([^\]]*)\]", operands)
    is_memory = mnemonic.startswith(("ld", "st", "prfm", "swp", "cas")) and address is not None
    if is_memory and any(x in secret for x in _names(address[1])):  # type: ignore[index]
        return ADDRESS
    if mnemonic.startswith("b.") and state.flags:
        return BRANCH
    if mnemonic.startswith((*_BRANCHES, "blr")) and any(x in secret for x in _names(operands)):
        return BRANCH
    if mnemonic in ("bl", "blr"):
        secret -= {f"x{n}" for n in range(19)}
        state.put(RESULT, call_returns_secret)
        return None
    if is_memory:
        _move(state, mnemonic, operands, address[1])  # type: ignore[index]
        return None
    destination, _, sources = operands.partition(",")
    is_secret = _is_secret(secret, sources)
    if mnemonic in ("udiv", "sdiv") and is_secret:
        return DIVISION
    if mnemonic in _READS_FLAGS:
        is_secret = is_secret or state.flags
    if mnemonic in ("movk", "bfi", "bfxil"):
        is_secret = is_secret or _is_secret(secret, destination)
    if mnemonic in _SETS_FLAGS:
        state.flags = is_secret
    if mnemonic in _COMPARES:
        state.flags = is_secret or _is_secret(secret, destination)
        return None
    for register in _names(destination):
        state.put(register, is_secret)
    return None


def _names(text: str) -> list[str]:
    """The general registers in some operands, by number."""
    return [f"x{n}" for n in _GENERAL.findall(text) if n != "zr"]


def _is_secret(secret: set[str], operands: str) -> bool:
    return any(x in secret for x in _names(operands)) or bool(_FLOATING.search(operands))


def _move(state: State, mnemonic: str, operands: str, where: str) -> None:
    """A load into registers or a store from them; words of the stack are followed."""
    registers = [x.strip() for x in operands[: operands.index("[")].split(",") if x.strip()]
    base, _, offset = (x.strip() for x in where.partition(","))
    on_stack = base == "sp" and re.fullmatch(r"(#-?\w+)?", offset) is not None
    at = int(offset[1:] or "0", 0) if on_stack else 0
    for register in registers:
        size = _SIZES.get(register[0], 8)
        slots = [f"slot {i}" for i in range(at // 8, (at + size + 7) // 8)] if on_stack else []
        at += size
        if mnemonic.startswith("st"):
            # Whole vectors also carry words from one record to another.
            is_secret = not register.startswith("q") and _is_secret(state.registers, register)
            for slot in slots:
                state.put(slot, is_secret)
            continue
        is_short = mnemonic in _SHORT_LOADS or register.startswith("w")
        is_secret = any(x in state.registers for x in slots) if slots else is_short
        for name in _names(register):
            state.put(name, is_secret)
