"""The plan of a rung on a GPU, in closed form: what it launches, fits, moves and has to wait for.

    work         floating-point operations that attention needs: 4 D for every query and key that
                 see each other, and one exponential
    depth        steps that follow one another in the block with most of them, over its phases
    parallelism  work / depth: how many could be under way at a time
    traffic      bytes asked of global memory; amplification: times what must be moved at least,
                 q, k and v in, out back
    waves        how often the multiprocessors are filled with blocks; the last time not fully
    roofline     no kernel of this kind is faster: peak arithmetic (tensor cores where the rung uses
                 them) or peak bandwidth, whichever takes longer

>>> from lockstep.ladder import Problem, find
>>> plan(find("small_tile"), Problem(B=2, H=16, S=1024, D=32), "A100").blocks
736
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.simt.occupancy import GPUS, Occupancy, fit

from .rung import BYTES, LaunchPlan, Problem, Rung, Tensors, launches_of, plans_of


@dataclass(frozen=True)
class Peak:
    """Peak rates of a GPU by its datasheet: tensor cores at 16 bit, dense, fp32 sums."""

    bandwidth: float  # GB/s
    fp32: float  # TFLOP/s
    tensor: float  # TFLOP/s


PEAKS = {
    "T4": Peak(320, 8.1, 65),
    "A100": Peak(2039, 19.5, 312),  # 80 GB, SXM
    "RTX 4090": Peak(1008, 82.6, 165.2),
    "L4": Peak(300, 30.3, 121),
    "L40S": Peak(864, 91.6, 362),
    "H100": Peak(3350, 67, 989),  # SXM
    "H200": Peak(4800, 67, 989),
    "B200": Peak(8000, 75, 2250),
}


@dataclass(frozen=True)
class Step:
    """One launch on one GPU."""

    launch: LaunchPlan
    occupancy: Occupancy
    registers_known: bool  # without a compiler, registers are left out of the occupancy

    @property
    def waves(self) -> float:
        """Blocks, in units of what the whole GPU holds at a time."""
        at_once = self.occupancy.blocks * GPUS[self.occupancy.gpu].multiprocessors
        return self.launch.blocks / at_once

    @property
    def tail(self) -> float:
        """The share of the last wave that is full, 0 to 1."""
        rest = self.waves % 1.0
        return rest or 1.0

    def as_json(self) -> dict[str, Any]:
        launch, fits = self.launch, self.occupancy
        return {
            "kernel": launch.kernel,
            "grid": list(launch.grid),
            "blocks": launch.blocks,
            "threads": launch.block,
            "shared_bytes": launch.shared_bytes,
            "registers": fits.registers if self.registers_known else None,
            "blocks_per_multiprocessor": fits.blocks,
            "occupancy": fits.share,
            "limited_by": list(fits.limited_by),
            "waves": self.waves,
            "tail": self.tail,
            "iterations": launch.iterations,
            "barriers": launch.barriers,
            "mma": launch.mma,
            "load_bytes": launch.load_bytes,
            "store_bytes": launch.store_bytes,
            "phases": [
                {
                    "name": phase.name,
                    "work_per_thread": phase.items / launch.block,
                    "utilisation": phase.utilisation(launch.block),
                    "depth": phase.depth,
                }
                for phase in launch.phases
            ],
        }


@dataclass(frozen=True)
class Plan:
    """A rung, a problem and a GPU."""

    rung: Rung
    problem: Problem
    gpu: str
    steps: tuple[Step, ...]

    @property
    def blocks(self) -> int:
        return sum(step.launch.blocks for step in self.steps)

    @property
    def pairs(self) -> int:
        """Queries and keys that see each other, over all heads."""
        S = self.problem.S
        return self.problem.heads * (S * (S + 1) // 2 if self.problem.causal else S * S)

    @property
    def work(self) -> int:
        return self.pairs * (4 * self.problem.D + 1)

    @property
    def depth(self) -> int:
        return sum(phase.depth for step in self.steps for phase in step.launch.phases)

    @property
    def parallelism(self) -> float:
        return self.work / self.depth

    @property
    def traffic(self) -> int:
        return sum(step.launch.load_bytes + step.launch.store_bytes for step in self.steps)

    @property
    def least_traffic(self) -> int:
        rows = self.problem.rows
        return (2 * rows + 2 * rows // self.problem.group) * self.problem.D * BYTES

    @property
    def amplification(self) -> float:
        return self.traffic / self.least_traffic

    @property
    def workspace(self) -> int:
        """Elements of float32 in global memory, beside the tensors."""
        return sum(step.launch.workspace for step in self.steps)

    @property
    def uses_tensor_cores(self) -> bool:
        return any(step.launch.mma for step in self.steps)

    @property
    def roofline(self) -> tuple[float, str]:
        """Seconds, and what takes them: "arithmetic" or "memory"."""
        peak = PEAKS[self.gpu]
        rate = (peak.tensor if self.uses_tensor_cores else peak.fp32) * 1e12
        arithmetic = self.pairs * 4 * self.problem.D / rate
        memory = self.least_traffic / (peak.bandwidth * 1e9)
        return max((arithmetic, "arithmetic"), (memory, "memory"))

    def as_json(self) -> dict[str, Any]:
        seconds, bound = self.roofline
        return {
            "rung": self.rung.name,
            "options": self.rung.settings,
            "gpu": self.gpu,
            "launches": [step.as_json() for step in self.steps],
            "work": self.work,
            "depth": self.depth,
            "parallelism": self.parallelism,
            "traffic_bytes": self.traffic,
            "amplification": self.amplification,
            "workspace_elements": self.workspace,
            "roofline_microseconds": seconds * 1e6,
            "roofline_bound": bound,
        }


def plan(rung: Rung, problem: Problem, gpu: str) -> Plan:
    """The plan of `rung` for `problem` on `gpu`, a name as `gpu_named` takes it.

    Registers come from the compiler where the extra `gpu` is installed; no GPU is needed.

    Raises ValueError for a GPU that is not known, a problem that the rung refuses, or a block that
    the GPU cannot run.
    """
    name = gpu_named(gpu)
    plans = plans_of(rung, problem)
    registers = _registers(rung, problem, name)
    steps = []
    for index, launch in enumerate(plans):
        found = registers[index] if registers else 0
        try:
            fits = fit(name, launch.block, found, launch.shared_bytes)
        except ValueError as error:
            raise ValueError(f"{rung.title} on {name}: {error}") from None
        steps.append(Step(launch, fits, bool(registers)))
    return Plan(rung, problem, name, tuple(steps))


def gpu_named(name: str) -> str:
    """The key of `GPUS` that `name` means, whatever its case and spaces.

    >>> gpu_named("rtx4090")
    'RTX 4090'
    """
    for known in GPUS:
        if known.replace(" ", "").lower() == name.replace(" ", "").lower():
            return known
    raise ValueError(f"gpu is '{name}', takes one of {', '.join(GPUS)}")


def _registers(rung: Rung, problem: Problem, gpu: str) -> list[int]:
    """Registers per thread of each launch; empty without a compiler."""
    try:
        import cuda.core  # noqa: F401 - only whether it is there
    except ImportError:
        return []
    arch = GPUS[gpu].capability.arch
    found = []
    for launch in launches_of(rung, problem, _no_tensors(problem)):
        typed = launch.kernel.typed(**launch.arguments)
        found.append(_compiled_registers(typed, launch.block, arch))
    return found


@lru_cache(maxsize=256)
def _compiled_registers(typed: Any, threads: int, arch: str) -> int:
    from lockstep.simt.cuda_cpp import emit
    from lockstep.simt.nvrtc import compile_source

    return compile_source(emit(typed, threads=threads), arch).resources.registers


def _no_tensors(problem: Problem) -> Tensors:
    """Tensors of the right type and shape without memory behind them."""
    import torch

    H, dtype = problem.H, getattr(torch, problem.dtype)
    heads = (H, H // problem.group, H // problem.group, H)
    shapes = ((problem.B, n, problem.S, problem.D) for n in heads)
    return Tensors(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
