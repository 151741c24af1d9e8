"""A rung's output is checked by the error rule of the library (`lockstep.error_rule`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .rung import Problem, Tensors

if TYPE_CHECKING:
    import torch

    from lockstep.problem import AttentionProblem
    from lockstep.problem import Tensors as Arguments


class Errors(NamedTuple):
    """Largest errors against the oracle: of a rung, of PyTorch's math attention, and allowed."""

    ours: float
    theirs: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.allowed


def errors(problem: Problem, tensors: Tensors) -> Errors:
    """The errors of `tensors.out`; an element never written has an infinite error.

    >>> errors(problem, tensors).ok                                    # doctest: +SKIP
    True
    """
    from lockstep.error_rule import error, expect

    expected = expect(*_posed(problem, tensors))["out"]
    return Errors(error(tensors.out, expected.exact), expected.math, expected.allowed)


def oracle(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """Exact attention [B, H, S, D] in float64."""
    from lockstep import reference

    return reference.evaluate(*_posed(problem, tensors))[0]


def _posed(problem: Problem, tensors: Tensors) -> tuple[AttentionProblem, Arguments]:
    """The call that a rung stands for; a bias hides the keys that do not count."""
    import torch

    from lockstep.problem import Options, describe
    from lockstep.problem import Tensors as Arguments

    bias = None
    if problem.length is not None:
        bias = torch.zeros(1, 1, problem.S, problem.S, device=tensors.q.device)
        bias[..., problem.length :] = float("-inf")
    arguments = Arguments(*tensors[:3], bias=bias)
    return describe(arguments, Options(causal=problem.causal)), arguments
