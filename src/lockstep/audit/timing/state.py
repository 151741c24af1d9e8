"""What is secret at some place of a function of machine code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

BRANCH = "a branch depends on a secret"
ADDRESS = "a secret is part of an address"
DIVISION = "a secret is divided"
MASK = "a secret says which lanes are loaded or stored"


@dataclass
class State:
    """Over all ways there: registers, by name, and words of the stack, by `slot N`."""

    registers: set[str] = field(default_factory=set)
    flags: bool = False
    depth: int = 0  # bytes that the stack has grown by, where that is followed

    def copy(self) -> State:
        return replace(self, registers=set(self.registers))

    def put(self, register: str, is_secret: bool) -> None:
        """Set whether a register, or a word of the stack, holds a secret from now on."""
        (self.registers.add if is_secret else self.registers.discard)(register)
