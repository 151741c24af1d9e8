"""Runs on the machine, each made once and looked at by several tests."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from lockstep.ladder import RUNGS, Problem, Rung, run_on_machine
from lockstep.ladder.check import Errors, errors
from lockstep.simt import Trace

STEPS = tuple(step for rung in RUNGS for step in rung.steps())
LAST_STEPS = tuple(rung.steps()[-1] for rung in RUNGS)
# Lengths that tiles divide and do not; a token alone, in several heads of several sequences; every
# head dim; both dtypes; both masks. The first gives a first answer, of the last step of a rung;
# steps before it run the first two, with few columns.
PROBLEMS = (
    Problem(B=2, H=1, S=64, D=32, causal=True),
    Problem(B=1, H=1, S=79, D=64, dtype="bfloat16"),
    Problem(B=2, H=2, S=1, D=32),
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
    """`step` stands for every row of every rung, `last_step` for the last of each, `oblivious` for
    those that are constant-time, `problem` for each of PROBLEMS."""
    names = metafunc.fixturenames
    if "step" in names and "problem" in names:
        pairs = [(step, problem) for step in STEPS for problem in problems_of(step)]
        metafunc.parametrize(
            ("step", "problem"), [slow_unless_first(*pair) for pair in pairs], ids=title_of
        )
        return
    oblivious = [step for step in STEPS if step.constant_time]
    problems = [slow_unless_first(x) for x in PROBLEMS]
    every = {"step": STEPS, "last_step": LAST_STEPS, "oblivious": oblivious, "problem": problems}
    for name, values in every.items():
        if name in names:
            metafunc.parametrize(name, values, ids=title_of)


def problems_of(step: Rung) -> tuple[Problem, ...]:
    return PROBLEMS if step in LAST_STEPS else (PROBLEMS[0], replace(PROBLEMS[1], D=32))


def slow_unless_first(*values: Rung | Problem) -> Any:
    """A parameter of a test: the first problem of last steps gives a first answer."""
    first = (*LAST_STEPS, PROBLEMS[0])
    marks = () if all(value in first for value in values) else pytest.mark.slow
    return pytest.param(*values, marks=marks)


def title_of(value: Rung | Problem) -> str:
    return getattr(value, "title", None) or str(value)
