"""One rung: planned, traced on the machine with a record of its first block, checked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lockstep.ladder import Problem, find
from lockstep.ladder.check import run_and_check
from lockstep.ladder.plan import plan
from lockstep.ladder.survey import summary, to_trace

from . import GPU
from .kernel_view import kernel_view

# five tiles of 64 keys, so that blocks of four and of all of them are not the same
PROBLEM = Problem(B=2, H=16, S=320, D=32)


def rung_view(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The data of the page for a rung with these options: `PROBLEM` planned, one head of it traced.

    `sources` of the result are those of its launches.
    """
    rung = find(name).choose(**options)
    found: dict[str, Any] = {
        "rung": name,
        "title": rung.title,
        "summary": rung.what_is_new,
        "constant_time": rung.constant_time,
        "why_not": rung.refusal(PROBLEM) or "",
    }
    if found["why_not"]:
        return found
    traced = to_trace(rung, PROBLEM)
    traces, checked = run_and_check(rung, traced, record=0)
    found["counted"] = asdict(summary(traces, checked.ok, traced.heads))
    fits: list[Any] = [None] * len(traces)
    try:
        planned = plan(rung, PROBLEM, GPU)
    except ValueError as error:  # a block that this GPU cannot run
        found["why_not"] = str(error)
    else:
        found["plan"] = planned.as_json()
        fits = [step.occupancy for step in planned.steps]
    sources: dict[str, Any] = {}
    found["launches"] = [
        kernel_view(trace, sources, fit) for trace, fit in zip(traces, fits, strict=True)
    ]
    return found | {"sources": sources}
