"""Triton kernels compiled for a GPU that is not there, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([^/\s].*?)\s*;")
_BRANCH = re.compile(r"BRA\S* (?:\S+, )?0x([0-9a-f]+)")
_SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class Build:
    """A compiled kernel."""

    kernel: Any

    def _dump(self, what: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            command = [str(CUOBJDUMP), what, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @cached_property
    def stack_bytes(self) -> int:
        return int(re.search(r"STACK:(\d+)", self._dump("-res-usage"))[1])

    @property
    def shared_bytes(self) -> int:
        return self.kernel.metadata.shared

    @cached_property
    def instructions(self) -> list[tuple[int, str]]:
        return [(int(at, 16), text) for at, text in _INSTRUCTION.findall(self._dump("-sass"))]

    def loops(self, contains: str) -> list[list[str]]:
        """Bodies of the innermost loops that have an instruction which starts like this."""
        found: list[tuple[int, int]] = []
        for end, text in self.instructions:
            back = _BRANCH.search(text)
            if back and int(back[1], 16) < end:
                found.append((int(back[1], 16), end))
        innermost = [
            (lo, hi)
            for lo, hi in found
            if not any(lo <= a and b <= hi and (a, b) != (lo, hi) for a, b in found)
        ]
        bodies = (
            [text for at, text in self.instructions if lo <= at <= hi] for lo, hi in innermost
        )
        return [body for body in bodies if any(text.startswith(contains) for text in body)]


def spills(body: list[str]) -> list[str]:
    """What a loop keeps in local memory."""
    return [text for text in body if text.startswith(_SPILLS)]


def build(
    function: Any, capability: int, dtype: str, options: dict[str, int], **constants: Any
) -> Build:
    """Compiles a kernel; parameters that `constants` does not name are tensors and numbers.

    Tensors are aligned and of `dtype`, statistics fp32, offsets and lengths int32.
    """
    signature, constexprs, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            constexprs[name] = constants[name]
        elif name.endswith("_ptr"):
            kind = "fp32" if name.startswith(("lse", "delta", "dlse")) else dtype
            kind = "i32" if "lens" in name else kind
            signature[name] = f"*{kind}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.endswith("scale") else "i32"
    source = ASTSource(function, signature, constexprs, attributes)
    return Build(triton.compile(source, GPUTarget("cuda", capability, 32), options))
