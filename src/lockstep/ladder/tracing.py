"""Traces of rungs for commands: one with a progress bar, or two side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from lockstep.simt.cli import progress_bar

if TYPE_CHECKING:
    from lockstep.simt.machine import Trace

    from .check import Errors
    from .rung import Problem, Rung


def traced(rung: Rung, problem: Problem, record: int | None = None) -> tuple[list[Trace], Errors]:
    """The traces of a call, with a progress bar, and how far its output is from exact.

    `record` as in `run_on_machine`.
    """
    from .check import run_and_check

    with progress_bar() as progress:
        task = progress.add_task(rung.title, total=None)
        return run_and_check(
            rung,
            problem,
            lambda done, whole: progress.update(task, completed=done, total=whole),
            record,
        )


def compare(rungs: tuple[Rung, Rung], problem: Problem, as_json: bool) -> NoReturn:
    """Trace both rungs, print what differs, and exit."""
    from .survey import summary
    from .tables import against_phases, against_table

    (one, first), (other, second) = (traced(rung, problem) for rung in rungs)
    both = summary(one, first.ok), summary(other, second.ok)
    titles = rungs[0].title, rungs[1].title
    if as_json:
        counted = [{"title": t, **asdict(c)} for t, c in zip(titles, both, strict=True)]
        typer.echo(json.dumps({"problem": asdict(problem), "rungs": counted}, indent=1))
    else:
        console = Console()
        console.print(f"{problem}\n")
        console.print(against_table(titles, both))
        console.print()
        console.print(against_phases(titles, (one, other)))
        for title, counted in zip(titles, both, strict=True):
            if not counted.right:
                console.print(f"{title} is wrong", style="bold red")
    raise typer.Exit(1 if any(c.hazards or not c.right for c in both) else 0)
