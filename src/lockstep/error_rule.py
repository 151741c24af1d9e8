"""The error rule: how far a result may be from the float64 oracle.

    largest error  ≤  factor · largest error of PyTorch's math attention  +  floor

The factor is 2, for gradients 3. PyTorch's math attention may happen to be exact, or nearly so:
with one key, say, or in a tensor of few elements. So the floor is what rounding has to cost:
three times the root mean square error of attention that rounds everything once (`rounding`).
`docs/numerics.md` says why each is what it is. Tests, audits, benches, the ladder and the demo all
go by this module.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import math_attention, reference, rounding
from lockstep.problem import AttentionProblem, Tensors

FORWARD, GRADIENT = 2.0, 3.0
DEVIATIONS = 3.0
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


class Expected(NamedTuple):
    """The expected value of a result, and how far off it may be."""

    exact: Tensor  # float64
    math: float  # the largest error of PyTorch's math attention
    factor: float
    floor: float

    @property
    def allowed(self) -> float:
        return self.factor * self.math + self.floor

    def share(self, result: Tensor) -> float:
        """The largest error as a share of what is allowed: above 1 it breaks the rule.

        Infinite where NaN or an infinity stands in one of the two alone.
        """
        found = error(result, self.exact)
        return found / self.allowed if found else 0.0


def expect(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> dict[str, Expected]:
    """The bounds of the results of one call: out and lse; with `dout` or `dlse` the gradients, too.

    The tensors are those of the call, `dout` and `dlse` the gradients of out and lse.

    Example:
        >>> tensors = Tensors(q, k, v)  # doctest: +SKIP
        >>> expect(describe(tensors, Options()), tensors)["out"].share(out) <= 1  # doctest: +SKIP
        True
    """
    # Gradients have the dtype of what they belong to: the oracle's are not to be rounded.
    double = tensors._replace(
        **{
            name: x.double()
            for name, x in tensors._asdict().items()
            if name in DIFFERENTIABLE and x is not None
        }
    )
    exact = results(reference.evaluate, problem, double, dout, dlse)
    math = results(math_attention.evaluate, problem, tensors, dout, dlse)
    spread = rounding.spread(problem, tensors, dout, dlse)
    return {name: judge(name, exact[name], math[name], spread.get(name, 0.0)) for name in exact}


def judge(name: str, exact: Tensor, math: Tensor, spread: float) -> Expected:
    """The rule for one result, from what math attention and the oracle make of it."""
    factor = FORWARD if name in ("out", "lse") else GRADIENT
    # What overflows in PyTorch's hands is no measure.
    theirs = error(torch.where(math.isfinite(), math.double(), exact), exact)
    return Expected(exact, theirs, factor, DEVIATIONS * spread)


def error(result: Tensor, exact: Tensor) -> float:
    """The largest absolute difference. NaN and infinities have to stand in both alike.

    An exact number beyond the range of the result's dtype is infinite there.
    """
    if not result.numel():
        return 0.0
    exact = exact.double()
    exact = torch.where(exact.abs() > torch.finfo(result.dtype).max, exact * math.inf, exact)
    result = result.double()
    same = (result == exact) | (result.isnan() & exact.isnan())
    difference = (result - exact).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def results(
    evaluate: reference.Attend,
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> dict[str, Tensor]:
    """out and lse by name, and the gradients of all that has one where some are given.

    `evaluate` takes a problem and its tensors: the oracle's, or math attention's.
    """
    gradients = dout is not None or dlse is not None
    given = {name: getattr(tensors, name) for name in DIFFERENTIABLE}
    leaves = {
        name: x.detach().requires_grad_(gradients) for name, x in given.items() if x is not None
    }
    with torch.set_grad_enabled(gradients):
        out, lse = evaluate(problem, tensors._replace(**leaves))
    found = {"out": out.detach(), "lse": lse.detach()}
    if gradients:
        douts = [
            torch.zeros_like(x) if seed is None else seed.to(x.dtype)
            for x, seed in ((out, dout), (lse, dlse))
        ]
        grads = torch.autograd.grad(
            (out, lse), list(leaves.values()), douts, materialize_grads=True
        )
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found
