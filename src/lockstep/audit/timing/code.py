"""Secrets followed through the machine code of the CPU kernels, on aarch64 and x86_64.

LLVM writes the code it generates as text, for this machine or for another. In it, secrets are what
comes out of floating-point and vector registers, and what general registers load with 32 bits or
less: in these kernels all that steers, addresses and counts, is loaded with 64
(`kernels.cpu.call.record`). Whatever is computed from a secret is one. A secret must not reach a
branch, the address of a load or a store, the mask of one, or a division of integers, which takes
longer for some numbers. A mask may choose lanes of constants and of the stack, whose place is
known.

Over-approximated: every float counts as secret, whatever it is; where one function returns a secret
in a general register, all do. Not seen: secrets that are loaded as 64-bit words, and those that go
through the stack by another address than the stack pointer's or into a function that is not
inlined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from lockstep.audit.timing import aarch64, x86_64
from lockstep.audit.timing.state import State
from lockstep.kernels.cpu.compiler import machine
from lockstep.kernels.cpu.compiler.compile import Kernel
from lockstep.kernels.cpu.compiler.machine import Target

READERS: dict[str, ModuleType] = {"aarch64": aarch64, "arm64": aarch64, "x86_64": x86_64}
TARGETS = {
    "Neoverse N1": Target("aarch64-unknown-linux-gnu", "neoverse-n1"),
    "AVX2": Target("x86_64-unknown-linux-gnu", "haswell"),
    "AVX-512": Target("x86_64-unknown-linux-gnu", "skylake-avx512"),
}
"""Machines that code is also generated for, wherever the audit runs."""
WORDS = ("ptr", "i64", "i32", "i8", "i1")
"""Types of arguments that come in general registers."""


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


def is_supported(target: Target) -> bool:
    return target.architecture in READERS


def audit(kernel: Kernel, target: Target | None = None) -> list[Finding]:
    """Findings in the code of a kernel, as LLVM generates it for `target`, or for this machine."""
    target = target or machine.host()
    module = kernel.module(target.triple)
    text = machine.generate_text(module, kernel.name, target)
    vectors = {
        function.name: sum(str(x.type) not in WORDS for x in function.arguments)
        for function in module.functions
    }
    return findings(kernel.name, text, target.architecture, vectors)


def findings(
    kernel: str, text: str, architecture: str, vectors: Mapping[str, int] | None = None
) -> list[Finding]:
    """Findings in a file of assembly, function by function.

    `vectors` says of functions by name how many arguments come in floating-point and vector
    registers; of others, all that may.
    """
    reader = READERS[architecture]
    functions = list(_functions(text, reader.COMMENT))
    returns_secret = False
    while True:
        walks = [
            _Walk(kernel, name, lines, reader, returns_secret, (vectors or {}).get(name))
            for name, lines in functions
        ]
        found = [finding for walk in walks for finding in walk.run()]
        if returns_secret or not any(walk.returns_secret for walk in walks):
            return found
        returns_secret = True


def _functions(text: str, comment: str) -> Iterable[tuple[str, list[tuple[int, str]]]]:
    """Each function's name, and its labels and instructions by number of line."""
    name = ""
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split(comment)[0].strip()
        if re.match(r'^[\w."$]+:', code) and not code.startswith(".L"):
            yield name, lines
            name, lines = code.rstrip(":"), []
        elif (code and not code.startswith(".")) or code.startswith(".L"):
            lines.append((number, code))
    yield name, lines


class _Walk:
    """One function, followed over all its paths until nothing more becomes secret."""

    def __init__(
        self,
        kernel: str,
        name: str,
        lines: list[tuple[int, str]],
        reader: ModuleType,
        call_returns_secret: bool,
        vectors: int | None,
    ) -> None:
        self.kernel, self.name, self.lines, self.reader = kernel, name, lines, reader
        self.call_returns_secret = call_returns_secret
        # A register that is no argument may hold anything when a function begins. LLVM reads it
        # where a lane of a vector does not matter.
        self.entry = {x for x in reader.ENTRY if vectors is None or int(x[1:]) < vectors}
        self.labels = [code[:-1] for _, code in lines if code.startswith(".L")]
        self.at_label: dict[str, State] = {}
        self.returns_secret = False

    def run(self) -> list[Finding]:
        found: dict[int, Finding] = {}
        while True:
            before = self._known()
            self._pass(found)
            if before == self._known():
                return [found[number] for number in sorted(found)]

    def _known(self) -> object:
        return {k: (set(v.registers), v.flags) for k, v in self.at_label.items()}

    def _pass(self, found: dict[int, Finding]) -> None:
        """Follows the function once, from its first line to its last."""
        state: State | None = State(set(self.entry))
        for number, code in self.lines:
            if code.startswith(".L") and code.endswith(":"):
                state = self._join(code[:-1], state)
            if state is None or code.startswith(".L"):
                continue
            why = self.reader.step(state, code, self.call_returns_secret)
            if why is not None:
                text = " ".join(code.split())
                found[number] = Finding(self.kernel, self.name, number, text, why)
            kind = self.reader.ends(code)
            if kind == "return":
                self.returns_secret |= self.reader.RESULT in state.registers
            targets = self.labels if kind == "table" else re.findall(r"\.L\w+", code)
            for label in targets:
                self._join(label, state)
            if kind is not None:
                state = None

    def _join(self, label: str, state: State | None) -> State | None:
        """The secrets at a label: from all jumps to it, and from the instruction before it.

        None for a label that no way leads to so far.
        """
        known = self.at_label.get(label)
        if known is None and state is not None:
            known = self.at_label[label] = State(depth=state.depth)
        if known is not None and state is not None:
            known.registers |= state.registers
            known.flags |= state.flags
        return None if known is None else known.copy()
