"""Small kernels with a leak each: what an audit of constant time has to find.

Each reads 64 secret floats, compiled as the CPU kernels are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu.call.arguments import argument
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import Kernel, compiled, kernel
from lockstep.kernels.cpu.compiler.simd import Emit, emitter
from lockstep.kernels.cpu.compiler.vectors import LLVM_I64, WIDTH, f32, i64

N, ROUNDS, TABLE = 64, 8, 1 << 22


@emitter(f32, returns=i64)
def _whole(e: Emit, x: Any) -> Any:
    return e.ir.fptosi(x, LLVM_I64)


@emitter(i64, i64)
def _keep_if_positive(e: Emit, x: Any, out: Any) -> None:
    """Keeps `out` where x is positive. LLVM makes a masked store of it, where there is one."""
    zero = e.constant(0.0)
    e.store(e.select(e.ir.fcmp_ordered(">", e.load(x), zero), e.load(out), zero), out)


@compiled
def _sum(x: int, factor: Any) -> Any:
    total = f32(0.0)
    for _ in range(ROUNDS):
        for i in range(N):
            total += scalar.exp(-scalar.load(x + 4 * i) * scalar.load(x + 4 * i)) * factor
    return total


@kernel
def _early_exit(arguments: int) -> None:
    x, out = argument(arguments, 0), argument(arguments, 1)
    for i in range(N):
        if scalar.load(x + 4 * i) != f32(0.0):
            scalar.store(_sum(x, f32(1.0)), out)
            return
    scalar.store(f32(0.0), out)


@kernel
def _skipped_rescale(arguments: int) -> None:
    x, out = argument(arguments, 0), argument(arguments, 1)
    m, total = f32(-np.inf), f32(0.0)
    for i in range(N):
        value = scalar.load(x + 4 * i)
        if value > m:
            total *= _sum(x, value - m)
            m = value
        total += value
    scalar.store(total, out)


@kernel
def _table(arguments: int) -> None:
    x, out, table = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    total = f32(0.0)
    for n in range(ROUNDS):
        for i in range(N):
            at = _whole(scalar.load(x + 4 * i) * f32(1e6)) * (n + 1) & TABLE - 1
            total += scalar.load(table + 4 * at)
    scalar.store(total, out)


@kernel
def _trip_count(arguments: int) -> None:
    x, out = argument(arguments, 0), argument(arguments, 1)
    total = f32(0.0)
    for i in range(N):
        for _ in range(_whole(scalar.load(x + 4 * i) * f32(8.0)) & 0xFF):
            total += scalar.exp(-total)
    scalar.store(total, out)


@kernel
def _subnormal(arguments: int) -> None:
    x, out = argument(arguments, 0), argument(arguments, 1)
    total = f32(0.0)
    for _ in range(ROUNDS):
        for i in range(N):
            value = scalar.load(x + 4 * i)
            # Divisions that wait for each other.
            total = (value + total * f32(0.0)) / f32(3.0)
    scalar.store(total, out)


@kernel
def _masked_store(arguments: int) -> None:
    x, out = argument(arguments, 0), argument(arguments, 2)
    for i in range(N // WIDTH):
        _keep_if_positive(x + 4 * WIDTH * i, out + 4 * WIDTH * i)


@dataclass(frozen=True)
class Leak:
    """A kernel, and a class of secrets that it treats in another way than random ones. In the
    steps of most, instructions or addresses differ; the others only take longer."""

    kernel: Kernel
    fixed: Callable[[Tensor], Tensor]
    steps_differ: bool = True

    def run(self, tensors: dict[str, Tensor]) -> Tensor:
        out = torch.empty(1)
        arguments = (tensors["x"].data_ptr(), out.data_ptr(), _TABLE.data_ptr())
        parallel(self.kernel, arguments)
        return out

    def fix(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.fixed(tensors["x"])}

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(N, generator=generator)}


_TABLE = torch.zeros(TABLE)
LEAKS = {
    "early exit on a zero row": Leak(_early_exit, torch.zeros_like),
    "skipped rescale": Leak(_skipped_rescale, torch.zeros_like),
    "table look-up by value": Leak(_table, torch.zeros_like),
    "trip count by value": Leak(_trip_count, torch.zeros_like),
    "subnormal slow path": Leak(
        _subnormal,
        lambda x: torch.full_like(x, 1e-40),
        steps_differ=False,
    ),
}
MASKED = {"store by a mask of values": Leak(_masked_store, torch.zeros_like)}
"""Leaks of x86_64 alone: code for Arm has no such stores. Times do not show them, nor do counts."""
