"""One call of a kernel, prepared and run; kernels made of plain functions; an empty call cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from lockstep.cache import Cache
from lockstep.call import call_cache
from lockstep.kernels.kernel import BackwardTensors, Gradients, Kernel, Needs, Result
from lockstep.problem import AttentionProblem, Tensors


def forward(kernel: Kernel, problem: AttentionProblem, tensors: Tensors) -> Result:
    return kernel.prepare(problem, tensors)(tensors, tensors.addresses())


def backward(
    kernel: Kernel, problem: AttentionProblem, tensors: BackwardTensors, needs: Needs
) -> Gradients:
    assert kernel.prepare_backward is not None
    return kernel.prepare_backward(problem, tensors, needs)(tensors, tensors.addresses())


def preparing(run: Callable[[AttentionProblem, Tensors], Result]) -> Any:
    """A `Kernel.prepare` whose calls run `run(problem, tensors)`."""
    return lambda problem, _: lambda tensors, addresses: run(problem, tensors)


def preparing_backward(
    run: Callable[[AttentionProblem, BackwardTensors, Needs], Gradients],
) -> Any:
    """A `Kernel.prepare_backward` whose calls run `run(problem, tensors, needs)`."""
    return lambda problem, _, needs: lambda tensors, addresses: run(problem, tensors, needs)


def forget_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared before is not used, and what is prepared now will not be used after."""
    for name in ("_CALLS", "_LOOKUPS"):
        monkeypatch.setattr(call_cache, name, Cache(limit=100))
    again = lru_cache(maxsize=100, typed=True)(call_cache.lookup_of_arguments.__wrapped__)
    monkeypatch.setattr(call_cache, "lookup_of_arguments", again)
