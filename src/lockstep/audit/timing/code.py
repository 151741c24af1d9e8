"""Secrets followed through the machine code of the CPU kernels, on aarch64.

LLVM writes the code it generates as text. In it, secrets are what comes out of floating-point
registers and what general registers load with 32 bits or less: in these kernels all that steers,
addresses and counts, is loaded with 64 (`kernels.cpu.call`). Whatever is computed from a secret is
one. A secret must not reach a branch, nor the address of a load or a store.

Over-approximated: every float counts as secret, whatever it is, and a stack slot that has held a
secret anywhere in a function always does. Not seen: secrets that are loaded as 64-bit words, and
what a function that is not inlined returns in a general register.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.kernels.cpu import machine
from lockstep.kernels.cpu.compile import Kernel

_GENERAL = re.compile(r"\b[wx](\d+|zr)\b")
_FLOATING = re.compile(r"\b[bhsdqv]\d+\b")
_BRANCHES = ("b.", "cbz", "cbnz", "tbz", "tbnz", "br")
_SETS_FLAGS = ("subs", "adds", "ands", "bics")
# These have no destination.
_COMPARES = ("cmp", "cmn", "tst", "fcmp", "fcmpe", "ccmp", "ccmn")
_READS_FLAGS = ("csel", "cset", "csetm", "cinc", "csinc", "csinv", "csneg", "cneg", "cinv", "fcsel")
_SHORT_LOADS = ("ldrb", "ldrh", "ldrsb", "ldrsh", "ldrsw", "ldurb", "ldurh", "ldursw", "ldursb")


@dataclass(frozen=True)
class Finding:
    """Where a secret reaches a branch or an address."""

    kernel: str
    function: str
    line: int
    text: str
    why: str

    def __str__(self) -> str:
        return f"{self.kernel}, line {self.line} of its assembly: {self.why}: {self.text}"


def is_supported() -> bool:
    return machine.triple().split("-")[0] in ("aarch64", "arm64")


def audit(kernel: Kernel) -> list[Finding]:
    """What is found in the code of a kernel, as this machine's LLVM generates it."""
    text = machine.generate_text(kernel.module(machine.triple()), kernel.name)
    return findings(kernel.name, text)


def findings(kernel: str, text: str) -> list[Finding]:
    """What is found in a file of assembly, function by function."""
    found: list[Finding] = []
    name = ""
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].strip()
        if re.match(r'^[\w."$]+:', code) and not code.startswith(".L"):
            found += _function(kernel, name, lines)
            name, lines = code.rstrip(":"), []
        elif (code and not code.startswith(".")) or code.startswith(".L"):
            lines.append((number, code))
    return found + _function(kernel, name, lines)


@dataclass
class _State:
    """What is secret at some place of a function, over all ways there."""

    registers: set[str]
    slots: set[str]
    flags: bool


def _function(kernel: str, name: str, lines: Iterable[tuple[int, str]]) -> list[Finding]:
    lines = list(lines)
    at_label: dict[str, _State] = {}
    found: dict[int, Finding] = {}
    slots: set[str] = set()
    while True:
        before = {k: (set(v.registers), v.flags) for k, v in at_label.items()}, set(slots)
        state: _State | None = _State(set(), slots, False)
        for number, code in lines:
            if code.startswith(".L") and code.endswith(":"):
                state = _join(at_label, code[:-1], state)
                continue
            if state is None:
                continue
            why = _step(state, code)
            if why is not None:
                found[number] = Finding(kernel, name, number, " ".join(code.split()), why)
            for label in re.findall(r"\.L\w+", code):
                _join(at_label, label, state)
            if re.match(r"(b|br|ret)\s", code + " "):
                state = None
        if before == ({k: (v.registers, v.flags) for k, v in at_label.items()}, slots):
            return [found[number] for number in sorted(found)]


def _join(at_label: dict[str, _State], label: str, state: _State | None) -> _State:
    """What is secret at a label: from all jumps to it, and from the instruction before it."""
    known = at_label.get(label)
    if known is None:
        known = at_label[label] = _State(set(), set() if state is None else state.slots, False)
    if state is not None:
        known.registers |= state.registers
        known.flags |= state.flags
        known.slots = state.slots
    return _State(set(known.registers), known.slots, known.flags)


def _names(text: str) -> list[str]:
    """The general registers in some operands, by number."""
    return [f"x{n}" for n in _GENERAL.findall(text) if n != "zr"]


def _is_secret(secret: set[str], operands: str) -> bool:
    return any(x in secret for x in _names(operands)) or bool(_FLOATING.search(operands))


def _step(state: _State, code: str) -> str | None:
    """Follows one instruction; returns what is wrong with it."""
    mnemonic, _, operands = code.partition("\t")
    mnemonic, operands = mnemonic.strip(), operands.strip()
    if not operands:
        mnemonic, _, operands = code.partition(" ")
    secret = state.registers
    address = re.search(r"\[([^\]]*)\]", operands)
    is_memory = mnemonic.startswith(("ld", "st", "prfm", "swp", "cas")) and address is not None
    if is_memory and any(x in secret for x in _names(address[1])):  # type: ignore[index]
        return "a secret is part of an address"
    if mnemonic.startswith("b.") and state.flags:
        return "a branch depends on a secret"
    if mnemonic.startswith(_BRANCHES[1:]) and any(x in secret for x in _names(operands)):
        return "a branch depends on a secret"
    if mnemonic in ("bl", "blr"):
        secret -= {f"x{n}" for n in range(19)}
        return None
    if is_memory:
        _move(state, mnemonic, operands, address[1])  # type: ignore[index]
        return None
    destination, _, sources = operands.partition(",")
    is_secret = _is_secret(secret, sources)
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
        (secret.add if is_secret else secret.discard)(register)
    return None


def _move(state: _State, mnemonic: str, operands: str, where: str) -> None:
    """A load into registers or a store from them; slots of the stack are followed."""
    registers = operands[: operands.index("[")]
    names = _names(registers)
    on_stack = where.split(",")[0].strip() in ("sp", "x29")
    slot = where.replace(" ", "")
    if mnemonic.startswith("st"):
        if on_stack and any(x in state.registers for x in names):
            state.slots.add(slot)
        return
    is_short = mnemonic in _SHORT_LOADS or bool(re.search(r"\bw\d+", registers))
    is_secret = slot in state.slots if on_stack else is_short
    for register in names:
        (state.registers.add if is_secret else state.registers.discard)(register)
