"""The subjects of audits on a GPU: kernels and rungs that claim constant time, and planted
leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep.audit.timing.gpu_leaks import GPU_LEAKS
from lockstep.audit.timing.secrets import GPU_CASES, LENGTH_CLASSES, Case, fixed
from lockstep.dispatch import KERNELS, refusal
from lockstep.kernels.kernel import Kernel
from lockstep.ladder import RUNGS, Problem, Rung, Tensors, run_on_gpu

Secrets = dict[str, Tensor]
RUNG_PROBLEM = Problem(B=1, H=1, S=64, D=32)
SOME_LENGTH = 40


@dataclass(frozen=True)
class Subject:
    """A call on secrets, what draws random ones, and what makes those of other classes of them."""

    name: str
    run: Callable[[Secrets], Tensor]
    draw: Callable[[torch.Generator], Secrets]
    fixes: Mapping[str, Callable[[Secrets], Secrets]]
    # Classes of what is handed over as a number, not in memory: a graph could not change it.
    number_fixes: Mapping[str, Callable[[Secrets], Secrets]] = field(default_factory=dict)


def kernels() -> Iterator[Subject]:
    """Each kernel that claims constant time, in each case that it takes on this GPU."""
    for kernel in KERNELS:
        for case in GPU_CASES:
            if kernel.constant_time and _takes(kernel, case):
                run = partial(case.run, kernel=kernel.name)
                fixes = {name: partial(fixed, name) for name in case.classes}
                yield Subject(f"{kernel.name}: {case.name}", run, case.draw, fixes)


def _takes(kernel: Kernel, case: Case) -> bool:
    tensors: dict[str, Any] = {
        k: x.cuda() for k, x in case.draw(torch.Generator().manual_seed(0)).items()
    }
    asked: dict[str, Any] = {"constant_time": True, "secret_lengths": case.secret_lengths}
    problem = lockstep.explain(**tensors, **asked, **case.options).problem
    return refusal(kernel, problem, case.backward) is None


def rungs() -> Iterator[Subject]:
    """The constant-time rungs of the ladder, each variant on its own."""
    classes = Case("rung", 1, 1, {}).classes
    fixes = {name: partial(fixed, name) for name in classes}
    lengths = {name: partial(_with_length, name) for name in LENGTH_CLASSES}
    for rung in RUNGS:
        if rung.constant_time:
            for step in rung.steps():
                name = f"ladder: {step.title}"
                yield Subject(name, partial(_run_rung, step), _draw_rung, fixes, lengths)


def _draw_rung(generator: torch.Generator) -> Secrets:
    shape = (RUNG_PROBLEM.B, RUNG_PROBLEM.H, RUNG_PROBLEM.S, RUNG_PROBLEM.D)
    return {name: torch.randn(shape, generator=generator).half() for name in "qkv"}


def _with_length(name: str, secrets: Secrets) -> Secrets:
    return secrets | {"length": torch.tensor(RUNG_PROBLEM.S if name == "long lengths" else 0)}


def _run_rung(rung: Rung, secrets: Secrets) -> Tensor:
    length = int(secrets["length"]) if "length" in secrets else SOME_LENGTH
    problem = Problem(RUNG_PROBLEM.B, RUNG_PROBLEM.H, RUNG_PROBLEM.S, RUNG_PROBLEM.D, length=length)
    q, k, v = (secrets[name] for name in "qkv")
    return run_on_gpu(rung, problem, Tensors(q, k, v, torch.empty_like(q)))


def leaks() -> Iterator[Subject]:
    """The planted ones, each with the class that shows it."""
    for name, leak in GPU_LEAKS.items():
        yield Subject(name, leak.run, leak.draw, {"fixed": leak.fix})
