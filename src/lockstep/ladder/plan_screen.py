"""The screen of `lockstep plan`: tables with a legend for each, for one GPU or several."""

from __future__ import annotations

from rich.console import Console

from . import tables
from .rung import Problem
from .survey import Row


def print_plans(problem: Problem, gpus: list[str], rows: list[Row], phases: bool) -> None:
    """Print how rungs fit, what they move and, with `phases`, how phases fall to threads.

    `rows` have all rungs on one GPU before those on the next, and one of them has a plan. Refusals
    stand at the end.
    """
    console = Console()
    count = len(rows) // len(gpus)
    of_rung = (rows[i::count] for i in range(count))
    rungs = [on_each for on_each in of_rung if any(row.plan for row in on_each)]
    console.print(f"{problem} on {', '.join(gpus)}")
    if len(gpus) == 1:
        shown = [
            (tables.fit_table(rows), tables.FIT_LEGEND),
            (tables.work_table(rows), tables.WORK_LEGEND),
        ]
    else:
        shown = [
            (tables.fit_on_each(rungs, gpus), tables.FIT_ON_EACH_LEGEND),
            (tables.work_on_each(rungs, gpus), tables.WORK_LEGEND),
        ]
    first = next(row.plan for row in rungs[0] if row.plan)
    if phases:  # the same on every GPU
        shown.append((tables.phase_table(first), tables.PHASE_LEGEND))
    for made, legend in shown:
        console.print()
        console.print(made)
        console.print(legend, style="dim")
    for refusal in dict.fromkeys(row.why_not for row in rows if row.why_not):
        console.print(refusal, style="yellow")
