# mypy: ignore-errors
# Annotations and names of kernels are those of the kernel language.
"""Small GPU kernels with a leak each, in the language of the ladder: what audits have to find.

A block of N threads reads N secret floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.simt import Kernel, cuda, float32, int32, kernel

N, ROUNDS, TABLE = 64, 8, 1 << 22


@kernel
def early_exit(x: float32[:], table: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    if x[i] != 0.0:
        total = float32(0.0)
        for j in range(N):
            total += cuda.exp2(-x[j] * x[i])
        out[i] = total


@kernel
def skipped_rescale(x: float32[:], table: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    m = float32(0.0)
    total = float32(0.0)
    for j in range(N):
        value = x[j]
        if value > m:
            for _ in range(ROUNDS):
                total = cuda.exp2(total * (m - value))
            m = value
        total += value
    out[i] = total


@kernel
def look_up(x: float32[:], table: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    total = float32(0.0)
    for n in range(ROUNDS):
        # Look-ups that wait for each other: the table is full of zeros.
        at = (int32(x[i] * 1e6 + total) * (n + 1)) & (TABLE - 1)
        total += table[at]
    out[i] = total


@kernel
def trip_count(x: float32[:], table: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    total = float32(0.0)
    for j in range(N):
        for _ in range(int32(x[j] * 8.0) & 0xF):
            total += cuda.exp2(-total)
    out[i] = total


@kernel
def subnormal(x: float32[:], table: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    total = float32(0.0)
    for _ in range(N):
        # A division that follows IEEE 754 calls a function where a number is subnormal.
        total = (x[i] + total * 0.0) / 3.0
    out[i] = total


@kernel
def marker(x: float32[:]):
    """No leak: it stands between calls where kernels are counted."""
    x[0] = 0.0


@dataclass(frozen=True)
class GpuLeak:
    """A kernel, and a class of secrets that it treats in another way than random ones."""

    kernel: Kernel
    fixed: Callable[[Tensor], Tensor]

    def run(self, tensors: dict[str, Tensor]) -> Tensor:
        x = tensors["x"]
        out = torch.empty_like(x)
        self.kernel[1, N](x, _table(x.device), out)
        return out

    def fix(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.fixed(tensors["x"])}

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(N, generator=generator)}


_TABLES: dict[torch.device, Tensor] = {}


def _table(device: torch.device) -> Tensor:
    if device not in _TABLES:
        _TABLES[device] = torch.zeros(TABLE, device=device)
    return _TABLES[device]


GPU_LEAKS = {
    "early exit on a zero row": GpuLeak(early_exit, torch.zeros_like),
    "skipped rescale": GpuLeak(skipped_rescale, torch.zeros_like),
    "table look-up by value": GpuLeak(look_up, torch.zeros_like),
    "trip count by value": GpuLeak(trip_count, torch.zeros_like),
    "subnormal slow path": GpuLeak(subnormal, lambda x: torch.full_like(x, 1e-40)),
}
