"""A rung's output is checked by the error rule of the library (`lockstep.error_rule`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
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

    What rounding costs at least, which the rule allows in addition, takes longer to work out than
    the rest: it is left out of `allowed` where the rule is kept without it.

    >>> errors(problem, tensors).ok                                    # doctest: +SKIP
    True
    """
    from lockstep.error_rule import error, expect

    found = _without_floor(problem, tensors)
    if found.ok:
        return found
    expected = expect(*_posed(problem, tensors))["out"]
    return Errors(error(tensors.out, expected.exact), expected.math, expected.allowed)


def _without_floor(problem: Problem, tensors: Tensors) -> Errors:
    """The errors against a rule without its floor, head by head: the scores of one fit a cache."""
    from lockstep import math_attention, reference
    from lockstep.error_rule import error, judge

    worst = Errors(0.0, 0.0, 0.0)
    one_head = replace(problem, B=1, H=1, kv_heads=None)
    for b, h in product(range(problem.B), range(problem.H)):
        of = {"q": h, "k": h // problem.group, "v": h // problem.group, "out": h}
        parts = tensors._asdict().items()
        head = Tensors(**{name: x[b : b + 1, of[name] : of[name] + 1] for name, x in parts})
        exact, _ = reference.evaluate(*_posed(one_head, head))
        math, _ = math_attention.evaluate(*_posed(one_head, head))
        expected = judge("out", exact, math, 0.0)
        found = (error(head.out, exact), expected.math, expected.allowed)
        worst = Errors(*map(max, worst, found))
    return worst


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
