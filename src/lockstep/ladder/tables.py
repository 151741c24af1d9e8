"""The rows of a survey and the plan of a rung, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from lockstep.console import BAD, OURS, QUIET, table
from lockstep.formats import duration, kilobytes, megabytes, number

from .plan import Plan
from .survey import Row


def fit_table(rows: Iterable[Row]) -> Table:
    """What each rung launches on a GPU, and how many blocks a multiprocessor holds."""
    columns = ("blocks", "thr", "KB", "regs", "occ%", "waves")
    made = table("rung", *columns, "limit", right=columns)
    for row in rows:
        if row.plan is None:
            continue
        several = len(row.plan.steps) > 1
        if several:
            made.add_row(row.rung.title)
        for step in row.plan.steps:
            launch, fits = step.launch, step.occupancy
            made.add_row(
                f"  {launch.kernel}" if several else row.rung.title,
                number(launch.blocks),
                str(launch.block),
                kilobytes(launch.shared_bytes),
                str(fits.registers) if step.registers_known else "?",
                f"{100 * fits.share:.3g}",
                f"{step.waves:.3g}",
                fits.limited_by[-1],
            )
    return made


def work_table(rows: Iterable[Row]) -> Table:
    """What each rung moves and waits for, and the least time that could take."""
    columns = ("tiles", "depth", "par.", "MB", "×", "extra", "roof µs")
    made = table("rung", *columns, right=columns)
    for row in rows:
        if row.plan is None:
            continue
        plan, (seconds, _) = row.plan, row.plan.roofline
        made.add_row(
            row.rung.title,
            str(max(step.launch.iterations for step in plan.steps)),
            number(plan.depth),
            number(plan.parallelism),
            megabytes(plan.traffic),
            f"{plan.amplification:.3g}"
            if plan.amplification < 1000
            else number(plan.amplification),
            megabytes(4 * plan.workspace) if plan.workspace else "–",
            f"{seconds * 1e6:.3g}",
        )
    return made


def phase_table(plan: Plan) -> Table:
    """How the work of each phase falls to the threads of a block."""
    columns = ("items", "per thread", "busy threads", "depth", "share of depth")
    made = table("kernel", "phase", *columns, right=columns)
    for step in plan.steps:
        launch = step.launch
        for phase in launch.phases:
            made.add_row(
                launch.kernel,
                phase.name,
                number(phase.items),
                f"{phase.items / launch.block:.3g}",
                f"{phase.utilisation(launch.block):.1%}",
                number(phase.depth),
                f"{phase.depth / plan.depth:.0%}",
            )
    return made


def ladder_table(rows: Iterable[Row], timed: bool) -> Table:
    """The three lenses side by side."""
    made = table("rung", *_LENSES, *(_BENCH if timed else ()), right=_LENSES + _BENCH)
    for row in rows:
        cells = [*_plan_cells(row), *_trace_cells(row)]
        if timed:
            cells += _bench_cells(row)
        made.add_row(row.rung.title + " ct" * row.rung.constant_time, *cells)
    return made


_LENSES = ("blocks", "KB", "occ.", "depth", "lanes", "MB", "lost", "bar")
_BENCH = ("time", "TFLOP/s")


def _plan_cells(row: Row) -> list[str | Text]:
    if row.plan is None:
        return [Text("–", style=QUIET)] * 3
    steps = row.plan.steps
    return [
        number(row.plan.blocks),
        kilobytes(max(step.launch.shared_bytes for step in steps)),
        f"{min(step.occupancy.share for step in steps):.0%}",
    ]


def _trace_cells(row: Row) -> list[str | Text]:
    seen = row.counted
    if seen is None:
        return [""] * 5
    if seen.hazards or not seen.right:
        return [Text("hazards" if seen.hazards else "wrong", style=BAD), *[""] * 4]
    lost = seen.bank_conflicts / seen.shared_wavefronts if seen.shared_wavefronts else 0.0
    return [
        number(seen.depth),
        f"{seen.active_lanes:.1f}",
        megabytes(seen.global_bytes * row.problem.heads),
        f"{lost:.0%}",
        f"{seen.barriers_per_block:.0f}",
    ]


def _bench_cells(row: Row) -> list[str | Text]:
    if row.microseconds is None or row.plan is None:
        return ["", ""]
    rate = row.plan.pairs * 4 * row.problem.D / row.microseconds / 1e6
    return [Text(duration(row.microseconds / 1e6), style=OURS), f"{rate:.3g}"]
