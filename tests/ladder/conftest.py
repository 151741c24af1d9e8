"""Runs on the machine, each made once and looked at by several tests."""

from __future__ import annotations

import functools

import pytest

from lockstep.ladder import RUNGS, Problem, Rung, run_on_machine
from lockstep.ladder.check import Errors, errors
from lockstep.simt import Trace

STEPS = tuple(step for rung in RUNGS for step in rung.steps())
# Lengths that tiles divide and do not; a token alone, in several heads of several sequences; every
# head dim; both dtypes; both masks. The first gives a first answer.
PROBLEMS = (
    Problem(B=2, H=1, S=64, D=32, causal=True),
    Problem(B=2, H=2, S=1, D=32),
    Problem(B=1, H=1, S=79, D=64, dtype="bfloat16"),
    Problem(B=1, H=1, S=19, D=128, causal=True, dtype="bfloat16"),
)


@functools.cache
def _run(title: str, problem: Problem) -> tuple[Errors, list[Trace]]:
    (step,) = (step for step in STEPS if step.title == title)
    tensors = problem.draw()
    _, traces = run_on_machine(step, problem, tensors)
    return errors(problem, tensors), traces


@pytest.fixture
def traced():
    """`traced(step, problem)`: errors of the output, and the traces."""

    def run(step: Rung, problem: Problem) -> tuple[Errors, list[Trace]]:
        return _run(step.title, problem)

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`step` stands for every row of every rung, `oblivious` for those that are constant-time,
    `problem` for each of PROBLEMS."""
    oblivious = [step for step in STEPS if step.constant_time]
    first, *others = PROBLEMS
    problems = [first, *(pytest.param(x, marks=pytest.mark.slow) for x in others)]
    for name, values in (("step", STEPS), ("oblivious", oblivious), ("problem", problems)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=lambda v: getattr(v, "title", None) or str(v))
