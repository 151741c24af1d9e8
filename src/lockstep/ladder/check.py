"""A rung's output is checked by the error rule of the library (`lockstep.error_rule`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product, takewhile
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from .rung import Problem, Rung, Tensors, run_on_machine

if TYPE_CHECKING:
    import torch

    from lockstep.problem import AttentionProblem
    from lockstep.problem import Tensors as Arguments
    from lockstep.simt.machine import Trace


class Errors(NamedTuple):
    """Largest errors against the oracle: of a rung, of PyTorch's math attention, and allowed."""

    ours: float
    theirs: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.allowed


class Standard(NamedTuple):
    """The exact output of one head, and the bound on errors, by q, k and v alone."""

    exact: torch.Tensor  # [1, 1, S, D] float64
    math: float  # largest error of PyTorch's math attention
    allowed: float  # by the error rule without what rounding costs at least


def errors(problem: Problem, tensors: Tensors, standards: list[Standard] | None = None) -> Errors:
    """The errors of `tensors.out`; an element never written has an infinite error.

    `standards` are those of the problem, worked out here where they are not given. What rounding
    costs at least, which the rule allows in addition, takes longer to work out than the rest: it
    is left out of `allowed` where the rule is kept without it.

    >>> errors(problem, tensors).ok                                    # doctest: +SKIP
    True
    """
    from lockstep.error_rule import error, expect

    worst = Errors(0.0, 0.0, 0.0)
    heads = tensors.out.flatten(0, 1)  # [B * H, S, D]
    for out, standard in zip(heads, standards or standards_of(problem, tensors), strict=True):
        found = (error(out[None, None], standard.exact), standard.math, standard.allowed)
        worst = Errors(*map(max, worst, found))
    if worst.ok:
        return worst
    expected = expect(*_posed(problem, tensors))["out"]
    return Errors(error(tensors.out, expected.exact), expected.math, expected.allowed)


def standards_of(problem: Problem, tensors: Tensors) -> Iterator[Standard]:
    """One for each head of each sequence, in order; the scores of one head fit a cache."""
    from lockstep import math_attention, reference
    from lockstep.error_rule import judge

    one_head = replace(problem, B=1, H=1, kv_heads=None)
    for b, h in product(range(problem.B), range(problem.H)):
        of = {"q": h, "k": h // problem.group, "v": h // problem.group, "out": h}
        parts = tensors._asdict().items()
        head = Tensors(**{name: x[b : b + 1, of[name] : of[name] + 1] for name, x in parts})
        exact, _ = reference.evaluate(*_posed(one_head, head))
        math, _ = math_attention.evaluate(*_posed(one_head, head))
        expected = judge("out", exact, math, 0.0)
        yield Standard(exact, expected.math, expected.allowed)


def run_and_check(
    rung: Rung,
    problem: Problem,
    progress: Callable[[int, int], None] | None = None,
    record: int | None = None,
) -> tuple[list[Trace], Errors]:
    """Traces of a call on the lockstep machine, and the errors of its output, with drawn tensors.

    Standards are worked out beside the machine, which leaves a part of two cores idle. `progress`
    and `record` as in `run_on_machine`. Raises ValueError where the rung refuses the problem.
    """
    tensors = problem.draw()
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        standards = pool.submit(_on_one_core, problem, tensors, stop)
        try:
            _, traces = run_on_machine(rung, problem, tensors, progress, record)
        except BaseException:
            stop.set()
            raise
    return traces, errors(problem, tensors, standards.result())


def _on_one_core(problem: Problem, tensors: Tensors, stop: Event) -> list[Standard]:
    """The standards, or those before `stop`, by one thread: others of PyTorch's would wait busily
    for a core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(takewhile(lambda _: not stop.is_set(), standards_of(problem, tensors)))
    finally:
        torch.set_num_threads(before)


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
