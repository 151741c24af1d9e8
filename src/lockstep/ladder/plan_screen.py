"""The screen of `lockstep plan`: tables with a legend for each, for one GPU or several."""

from __future__ import annotations

from rich.console import Console

from .rung import Problem
from .survey import Row
from .tables import FIT_LEGEND, PHASE_LEGEND, WORK_LEGEND, fit_table, phase_table, work_table


def print_plans(problem: Problem, gpus: list[str], rows: list[Row], phases: bool) -> None:
    """Print how rungs fit, what they move and, with `phases`, how phases fall to threads.

    Refusals stand at the end; a table that would be empty is left out.
    """
    console = Console()
    planned = [row for row in rows if row.plan]

    def title(row: Row) -> str:
        assert row.plan is not None
        return row.rung.title if len(gpus) == 1 else f"{row.rung.title} on {row.plan.gpu}"

    if planned:
        console.print(f"{problem} on {', '.join(gpus)}")
        tables = [
            (fit_table(planned, title), FIT_LEGEND),
            (work_table(planned, title), WORK_LEGEND),
        ]
        first = planned[0].plan
        if phases and first:  # the same on every GPU
            tables.append((phase_table(first), PHASE_LEGEND))
        for made, legend in tables:
            console.print()
            console.print(made)
            console.print(legend, style="dim")
    for refusal in dict.fromkeys(row.why_not for row in rows if row.why_not):
        console.print(refusal, style="yellow")
