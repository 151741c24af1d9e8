"""Hopper kernels compiled without a GPU, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([^/\s].*?)\s*;")
_BRANCH = re.compile(r"BRA\S* (?:\S+, )?0x([0-9a-f]+)")


@dataclass(frozen=True)
class Build:
    """A compiled kernel: `kernel` as Triton returns it, `text` its disassembly."""

    kernel: Any
    text: str
    report: str  # of ptxas

    @cached_property
    def instructions(self) -> list[tuple[int, str]]:
        return [(int(at, 16), text) for at, text in _INSTRUCTION.findall(self.text)]

    @cached_property
    def main_loops(self) -> list[list[str]]:
        """The innermost loops with two matrix products: one per consumer."""
        loops: list[tuple[int, int, list[str]]] = []
        for end, text in self.instructions:
            back = _BRANCH.search(text)
            if back and int(back[1], 16) < end:
                begin = int(back[1], 16)
                body = [t for at, t in self.instructions if begin <= at <= end]
                groups = sum(t.startswith("WARPGROUP.ARRIVE") for t in body)
                if groups >= 2 and any(t.startswith("HGMMA") for t in body):
                    loops.append((begin, end, body))
        innermost: list[tuple[int, int, list[str]]] = []
        for begin, end, body in sorted(loops, key=lambda loop: loop[1] - loop[0]):
            if all(end < b or e < begin for b, e, _ in innermost):
                innermost.append((begin, end, body))
        return [body for *_, body in sorted(innermost, key=lambda loop: loop[0])]

    @property
    def registers(self) -> int:
        return int(re.search(r"Used (\d+) registers", self.report)[1])


def count(body: list[str]) -> Counter[str]:
    """Instructions by name, modifiers aside but for MUFU."""
    names = (text.split()[0] for text in body)
    return Counter(name if name.startswith("MUFU") else name.split(".")[0] for name in names)


def compile_for_hopper(function: Any, arguments: tuple[Any, ...], **options: Any) -> Build:
    """Compile a Gluon kernel for sm_90 as a launch with these arguments would."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, launch_options = bind(*arguments, **options)
    launch_options, signature, constants, attributes = function._pack_args(
        backend, dict(options), bound, specialization, launch_options
    )
    source = GluonASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=target, options=launch_options.__dict__)
    return Build(kernel, _disassemble(kernel.asm["cubin"]), _assemble(kernel.asm["ptx"]))


def _disassemble(cubin: bytes) -> str:
    path = _temporary("kernel.cubin")
    path.write_bytes(cubin)
    command = [BINARIES / "cuobjdump", "-sass", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _assemble(ptx: str) -> str:
    path = _temporary("kernel.ptx")
    path.write_text(ptx)
    command = [BINARIES / "ptxas", "-v", "--gpu-name=sm_90a", path, "-o", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _temporary(name: str) -> Path:
    return Path(tempfile.mkdtemp()) / name
