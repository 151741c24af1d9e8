"""Triton kernels compiled for a GPU that is not there, and what their machine code says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
from machine_code import Instructions, between, disassemble, loops, run_tool
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.audit.timing import triton_code
from lockstep.hardware import SHARED_BYTES
from lockstep.kernels.build_key import fix_key
from lockstep.kernels.triton.plan import Device

# By compute capability.
DEVICES = triton_code.DEVICES | {
    86: Device(84, shared_bytes=99 << 10, tma=False),
    100: Device(148, shared_bytes=SHARED_BYTES, tma=True, tensor_memory=True, early=True),
    120: Device(170, shared_bytes=99 << 10, tma=True, tensor_memory=True, early=True),
}
_SPILLS = ("LDL", "STL")
# Beginnings of the names of float32 tensors, whatever the others are.
FP32 = ("lse", "part", "rows", "dlse", "statistics", "dq_sums", "dk_sums", "dv_sums")


@dataclass(frozen=True)
class Build:
    """A compiled kernel."""

    kernel: Any

    @cached_property
    def _usage(self) -> dict[str, int]:
        cubin = self.kernel.asm["cubin"]
        usage = run_tool("cuobjdump", "-res-usage", content=cubin, suffix=".cubin").stdout
        return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}

    @property
    def stack_bytes(self) -> int:
        return self._usage["STACK"]

    @property
    def registers(self) -> int:
        """How many a thread has."""
        return self._usage["REG"]

    @property
    def shared_bytes(self) -> int:
        return self.kernel.metadata.shared

    @cached_property
    def instructions(self) -> Instructions:
        return disassemble(self.kernel.asm["cubin"])

    def loops(self, contains: str) -> list[list[str]]:
        """Bodies of the innermost loops that have an instruction which starts like this."""
        found = loops(self.instructions)
        innermost = [
            (lo, hi)
            for lo, hi in found
            if not any(lo <= a and b <= hi and (a, b) != (lo, hi) for a, b in found)
        ]
        bodies = ([text for _, text in between(self.instructions, lo, hi)] for lo, hi in innermost)
        return [body for body in bodies if any(text.startswith(contains) for text in body)]


def at_once_on_hopper(built: Build) -> int:
    """How many programs share a multiprocessor with 64 Ki registers and 228 KB."""
    threads = 32 * built.kernel.metadata.num_warps
    # A kilobyte per program is not its own.
    return min(
        (64 << 10) // (threads * built.registers), (228 << 10) // (built.shared_bytes + 1024)
    )


def spills(body: list[str]) -> list[str]:
    """What a loop keeps in local memory."""
    return [text for text in body if text.startswith(_SPILLS)]


def build(
    function: Any, capability: int, dtype: str, options: dict[str, int], **constants: Any
) -> Build:
    """Compiles a kernel; parameters that `constants` does not name are tensors and numbers.

    Tensors are aligned and of `dtype`, statistics fp32, offsets and lengths int32.
    """
    fix_key(function)
    signature, constexprs, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            constexprs[name] = constants[name]
        elif name.endswith("_ptr"):
            kind = "fp32" if name.startswith(FP32) else dtype
            kind = "i32" if "lens" in name or name.startswith("page") else kind
            signature[name] = f"*{kind}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.endswith(("scale", "unit", "natural")) else "i32"
    source = ASTSource(function, signature, constexprs, attributes)
    return Build(triton.compile(source, GPUTarget("cuda", capability, 32), options))
