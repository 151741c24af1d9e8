"""The machine code of a kernel, as the tools that come with Triton print it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from bisect import bisect_left, bisect_right
from functools import lru_cache
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([^/\s].*?)\s*;")
_BRANCH = re.compile(r"BRA\S* (?:\S+, )?0x([0-9a-f]+)")

Instructions = list[tuple[int, str]]
"""Addresses and texts, predicates aside."""


def run_tool(
    name: str, *options: str, content: bytes, suffix: str
) -> subprocess.CompletedProcess[str]:
    """Runs one of the tools on a file with this content; `ptxas` is the one for sm_90."""
    tool = get_ptxas(90).path if name == "ptxas" else BINARIES / name
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        command = [str(tool), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True)


@lru_cache(maxsize=16)
def sass_of(cubin: bytes) -> str:
    """What cuobjdump prints: a second of its time for a large kernel, so the last few are kept."""
    return run_tool("cuobjdump", "-sass", content=cubin, suffix=".cubin").stdout


def disassemble(cubin: bytes) -> Instructions:
    return [(int(at, 16), line) for at, line in _INSTRUCTION.findall(sass_of(cubin))]


def target(text: str) -> int | None:
    """Where a branch goes; None for any other instruction."""
    branch = _BRANCH.match(text)
    return int(branch[1], 16) if branch else None


def loops(instructions: Instructions) -> list[tuple[int, int]]:
    """First and last address of everything that a branch jumps back over."""
    jumps = ((target(text), at) for at, text in instructions)
    return [(to, at) for to, at in jumps if to is not None and to < at]


def between(instructions: Instructions, first: int, last: int) -> Instructions:
    """Those from one address to another, both included."""
    begin = bisect_left(instructions, first, key=_address)
    return instructions[begin : bisect_right(instructions, last, key=_address)]


def _address(instruction: tuple[int, str]) -> int:
    return instruction[0]
