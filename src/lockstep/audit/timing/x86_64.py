"""One instruction of x86_64, as LLVM writes it: what it makes of secrets."""

from __future__ import annotations

import re

from lockstep.audit.timing.state import ADDRESS, BRANCH, DIVISION, MASK, State
from lockstep.audit.timing.x86_operands import (
    indices,
    is_constant,
    is_memory,
    is_secret,
    lanes,
    level,
    masks,
    names,
    split,
    vector,
    write,
    write_vector,
)

COMMENT, RESULT = "#", "rax"
ENTRY = frozenset(f"v{n}" for n in range(8))
"""What is secret where a function begins: vectors that may be arguments, or results of a call."""
# What a function may change: the other general registers are as before when it returns.
_CHANGED_BY_CALLS = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")
_COMPARES = re.compile(r"cmp[bwlq]$|test|bt[bwlq]$|v?u?comis|vptest$|vtestp|k(or)?test")
_KEEPS_FLAGS = re.compile(
    r"(c?mov|lea|set|not|push|pop|bswap|xchg|rorx|mulx|s[ha][lr]x|pdep|pext|prefetch)"
)
# Sources are all operands but the last, which is only written.
_MOVES = re.compile(r"(mov|lea|set|andn|s[ha][lr]x|rorx|mulx|pdep|pext|bextr|bls|lzcnt|tzcnt|popc)")


def ends(code: str) -> str | None:
    """How an instruction ends a way through a function, or None: "jump", "table" or "return"."""
    if re.match(r"ret[ql]?\b", code):
        return "return"
    if code.startswith("jmp"):
        return "table" if "*" in code else "jump"
    return "jump" if code.startswith("ud2") else None


def step(state: State, code: str, call_returns_secret: bool) -> str | None:
    """Follows one instruction; returns what is wrong with it."""
    code = re.sub(r"^(lock|rep\w*)\s+", "", code)
    mnemonic, _, text = code.replace("\t", " ", 1).partition(" ")
    operands = split(text)
    secret = state.registers
    addresses = [] if mnemonic.startswith(("lea", "nop")) else filter(is_memory, operands)
    if any(name in secret for x in addresses for name in (*names(x), *indices(x))):
        return ADDRESS
    if _is_masked_access(state, mnemonic, operands):
        return MASK
    if mnemonic.startswith("j") and not mnemonic.startswith("jmp"):
        return BRANCH if state.flags else None
    if mnemonic.startswith(("jmp", "call")):
        if "*" in text and any(name in secret for name in names(text)):
            return BRANCH
        if mnemonic.startswith("call"):
            _call(state, call_returns_secret)
        return None
    if re.match(r"(movs|stos)[bwlq]$", mnemonic) and "rcx" in secret:
        return BRANCH
    if re.match(r"i?div[bwlq]$", mnemonic):
        found = any(is_secret(state, mnemonic, x) for x in (*operands, "%rax", "%rdx"))
        return DIVISION if found else None
    if any(vector(x) for x in operands):
        _compute_vectors(state, mnemonic, operands)
    else:
        _compute(state, mnemonic, operands)
    return None


def _is_masked_access(state: State, mnemonic: str, operands: list[str]) -> bool:
    """Whether a secret says which lanes of memory are accessed. Constants and the stack may be read
    by the lanes of a secret: their place in memory is known."""
    if not any(x in state.registers for x in masks(mnemonic, operands)):
        return False
    *sources, destination = operands
    if is_memory(destination):
        return True
    return any(is_memory(x) and not is_constant(state, x) for x in sources)


def _call(state: State, returns_secret: bool) -> None:
    for name in _CHANGED_BY_CALLS:
        state.put(name, False)
        state.put(f"{name} constant", False)
    for name in ENTRY:
        state.put(f"{name} words", False)
        state.put(name, True)
    state.put(RESULT, returns_secret)
    state.flags = False


def _compute_vectors(state: State, mnemonic: str, operands: list[str]) -> None:
    """An instruction with a vector or mask register among its operands."""
    given = masks(mnemonic, operands)
    keeps = bool(given) and not any("{z}" in x for x in operands)
    operands = [re.sub(r"\s*\{[^}]*\}", "", x) for x in operands]
    if _COMPARES.match(mnemonic):
        state.flags = any(level(state, mnemonic, x) for x in operands)
        return
    *sources, destination = operands
    if vector(destination) is None and not is_memory(destination):
        write(state, destination, any(is_secret(state, mnemonic, x) for x in sources))
        return
    registers = [x for x in sources if not x.startswith("$")]
    if mnemonic.startswith("vcvtsi2"):
        registers = registers[:1]
    levels = [level(state, mnemonic, x, destination) for x in registers]
    if re.match(r"vf(n?m)", mnemonic):
        levels.append(level(state, mnemonic, destination))
    is_constant = len(registers) == 2 and len(set(registers)) == 1
    if is_constant and re.match(r"v(p?xor|pcmpeq)|kxn?or", mnemonic):
        levels = []
    levels += [2] * any(x in state.registers for x in given)
    if keeps:
        levels.append(level(state, mnemonic, destination))
    source = next((x for x in registers if vector(x)), "")
    write_vector(state, mnemonic, destination, lanes(mnemonic, levels), source)


def _compute(state: State, mnemonic: str, operands: list[str]) -> None:
    """An instruction of general registers and memory."""
    if _COMPARES.match(mnemonic):
        state.flags = any(is_secret(state, mnemonic, x) for x in operands)
        return
    if mnemonic in ("cqto", "cltd"):
        state.put("rdx", "rax" in state.registers)
    if not operands:
        return
    if mnemonic.startswith(("push", "pop")):
        _push_or_pop(state, mnemonic, operands[0])
        return
    *sources, destination = operands
    found = any(is_secret(state, mnemonic, x) for x in sources)
    if mnemonic[:3] in ("xor", "sub") and len(set(operands)) == 1 < len(operands):
        found = False
    elif not _MOVES.match(mnemonic):
        found = found or is_secret(state, mnemonic, destination)
    if mnemonic.startswith(("set", "cmov", "adc", "sbb")):
        found = found or state.flags
    if not _KEEPS_FLAGS.match(mnemonic):
        state.flags = found
    if re.match(r"i?mul[bwlq]$", mnemonic) and len(operands) == 1:
        found = found or "rax" in state.registers
        operands = ["%rax", "%rdx"]
    elif mnemonic.startswith(("xchg", "xadd")):
        pass
    elif mnemonic.startswith("cmpxchg"):
        operands = ["%rax", destination]
    elif mnemonic.startswith("mulx"):
        operands = operands[1:]
    else:
        operands = [destination]
    if destination == "%rsp" and sources[0].startswith("$"):
        state.depth += int(sources[0][1:], 0) * {"sub": 1, "add": -1}.get(mnemonic[:3], 0)
    is_address = mnemonic.startswith("mov") and _is_address_of_constant(state, sources[0])
    for x in operands:
        write(state, x, found)
    if is_address and not is_memory(destination):
        state.put(f"{names(destination)[0]} constant", True)


def _is_address_of_constant(state: State, source: str) -> bool:
    if source.startswith("%"):
        return any(f"{name} constant" in state.registers for name in names(source))
    return source.startswith(("$.LCPI", ".LCPI"))


def _push_or_pop(state: State, mnemonic: str, operand: str) -> None:
    if mnemonic.startswith("push"):
        found = is_secret(state, mnemonic, operand)
        state.depth += 8
        write(state, "(%rsp)", found)
        return
    found = is_secret(state, mnemonic, "(%rsp)")
    state.depth -= 8
    write(state, operand, found)
