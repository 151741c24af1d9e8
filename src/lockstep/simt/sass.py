"""The compiled form of a kernel: CUDA C++, resources, and SASS beside the Python line it comes
from."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import ir
from .cuda_cpp import emit
from .errors import SimtError
from .kernel import Kernel
from .nvrtc import Compiled, Resources, compile_source

_LINE = re.compile(r'//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)", line (\d+))?')
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction, the line of CUDA C++ it was compiled from, and the Python line."""

    address: int
    text: str
    cuda_line: int | None
    loc: ir.Location | None

    @property
    def opcode(self) -> str:
        """Name with modifiers, without predicate and operands: "LDG.E.128"."""
        return _PREDICATE.sub("", self.text).split()[0]


@dataclass(frozen=True)
class Sass:
    """A disassembled kernel."""

    compiled: Compiled
    instructions: tuple[Instruction, ...]

    @property
    def resources(self) -> Resources:
        return self.compiled.resources

    def count(self, prefix: str) -> int:
        """Instructions whose name starts with `prefix`, a whole word: "LDG", "HMMA", "BAR.SYNC"."""
        return sum(f"{i.opcode}.".startswith(f"{prefix}.") for i in self.instructions)

    def by_line(self) -> dict[tuple[str, int], list[Instruction]]:
        """Instructions by Python file and line, in order of address."""
        found: dict[tuple[str, int], list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.loc is not None:
                key = (instruction.loc.file, instruction.loc.line)
                found.setdefault(key, []).append(instruction)
        return found

    def listing(self) -> str:
        """The Python source, each line followed by what it was compiled to."""
        resources = self.resources
        lines = [
            f"{self.compiled.source.name} for {self.compiled.arch}: {resources.registers} "
            f"registers, {resources.spill_stores + resources.spill_loads} bytes spilled, "
            f"{resources.static_shared} bytes of static shared memory, "
            f"{len(self.instructions)} instructions"
        ]
        for (file, number), instructions in sorted(self.by_line().items()):
            loc = instructions[0].loc
            assert loc is not None
            lines += ["", f"{Path(file).name}:{number}: {loc.text.strip()}"]
            lines += [f"    {i.address:04x}  {i.text}" for i in instructions]
        rest = [i for i in self.instructions if i.loc is None]
        if rest:
            kinds = Counter(i.opcode.split(".")[0] for i in rest)
            counts = ", ".join(f"{n} {name}" for name, n in kinds.most_common())
            lines += ["", f"without a line: {counts}"]
        return "\n".join(lines)


def disassemble(compiled: Compiled) -> Sass:
    """SASS of a compiled kernel. Raises SimtError where no nvdisasm is found or it fails."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        command = [nvdisasm_path(), "--print-line-info-inline", "--print-code", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimtError(f"nvdisasm failed:\n{done.stderr}")
    return Sass(compiled, tuple(_parse(done.stdout, compiled)))


def _parse(text: str, compiled: Compiled) -> list[Instruction]:
    own = f"{compiled.source.name}.cu"
    places = compiled.source.lines
    found: list[Instruction] = []
    cuda_line: int | None = None
    fresh = True  # the next line mark starts a new position
    for line in text.splitlines():
        mark = _LINE.search(line)
        if mark:
            # a position inlined from a header comes as a chain; the kernel's own file ends it
            if fresh:
                cuda_line, fresh = None, False
            for file, number in ((mark[1], mark[2]), (mark[3], mark[4])):
                if file and Path(file).name == own:
                    cuda_line = int(number)
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction:
            fresh = True
            known = cuda_line is not None and cuda_line <= len(places)
            loc = places[cuda_line - 1] if known and cuda_line else None
            found.append(Instruction(int(instruction[1], 16), instruction[2], cuda_line, loc))
    return found


@lru_cache(maxsize=1)
def nvdisasm_path() -> str:
    """The disassembler: on the path, in a toolkit or pip package, or in Triton's wheel."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("nvdisasm")
    except ImportError:
        pass
    if found:
        return str(found)
    try:
        import triton
    except ImportError:
        raise SimtError("no nvdisasm: install Triton or the CUDA toolkit") from None
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not bundled.exists():
        raise SimtError(f"no nvdisasm: neither on the path nor at {bundled}")
    return str(bundled)


def cuda_source(kernel: Kernel, **arguments: Any) -> str:
    """The CUDA C++ a kernel stands for. `arguments` as for `Kernel.typed`.

    >>> print(cuda_source(transpose, PAD=1))                 # doctest: +SKIP
    """
    return emit(kernel.typed(**arguments)).text


def sass_listing(
    kernel: Kernel,
    arch: str = "sm_90",
    threads: int | None = None,
    contract: bool = True,
    **arguments: Any,
) -> str:
    """SASS beside the Python lines, after the resources. `arguments` as for `Kernel.typed`.

    `threads` is the block size to compile for. Needs no GPU.

    >>> print(sass_listing(transpose, "sm_80", PAD=1))       # doctest: +SKIP
    """
    source = emit(kernel.typed(**arguments), threads=threads)
    return disassemble(compile_source(source, arch, contract)).listing()


def show(kernel: Kernel, what: str = "cuda", **arguments: Any) -> str:
    """`cuda_source` or `sass_listing`, by name: "cuda" or "sass"."""
    shown = {"cuda": cuda_source, "sass": sass_listing}
    if what not in shown:
        raise ValueError(f"what is {what!r}, takes 'cuda' or 'sass'")
    return shown[what](kernel, **arguments)
