"""The rows of a survey and the plan of a rung, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lockstep.output.console import BAD, OURS, QUIET, table
from lockstep.output.formats import duration, kilobytes, megabytes, number

from .plan import Plan
from .survey import Counted, Row

if TYPE_CHECKING:
    from lockstep.simt.machine import Trace
    from lockstep.simt.occupancy import Occupancy

# fields of `Counted`, as a table names them
COUNTED = {
    "depth": "depth",
    "instructions": "warp instructions",
    "active_lanes": "active lanes of 32",
    "global_bytes": "bytes moved, global",
    "shared_wavefronts": "wavefronts, shared",
    "bank_conflicts": "of them bank conflicts",
    "barriers_per_block": "barriers of a block",
    "warp_barriers_per_warp": "barriers of a warp",
    "mma": "matrix products",
    "hazards": "hazards",
}


FIT_LEGEND = (
    "grid: blocks in x, y and z; thr: threads of a block; KB: shared memory of a block; regs: "
    "registers of a thread; occ%: warps that a multiprocessor holds, of those it could; waves: how "
    "often all multiprocessors are filled with blocks; limit: what keeps it from holding more."
)
WORK_LEGEND = (
    "tiles: of keys, that the longest block walks over; depth: steps one after the other in it; "
    "par.: operations over depth, those that could be under way together; MB: asked of global "
    "memory; ×: over q, k, v and out moved once; extra: MB of workspace; roof: the least time, "
    "in µs, that arithmetic or memory would take."
)
FIT_ON_EACH_LEGEND = (
    "grid: blocks in x, y and z; occ%: warps that a multiprocessor holds, of those it could, and "
    "what keeps it from holding more (r: registers, s: shared memory, t: threads, b: blocks); "
    "waves: how often all multiprocessors are filled with blocks."
)
PHASE_LEGEND = (
    "items: independent pieces of work in one visit of a block; each: items per thread of the "
    "block; busy: threads that have one, over the rounds of a visit; depth: steps one after the "
    "other, over all visits; share: of the depth of all phases."
)


def _narrow(*columns: str, right: Iterable[str]) -> Table:
    """A table that fits 80 columns: figures close together, and titles broken before figures."""
    made = table(*columns, right=right)
    made.padding = (0, 0, 0, 0)
    made.columns[0].no_wrap = False
    return made


def fit_table(rows: Iterable[Row]) -> Table:
    """The launches of each rung on a GPU, and how many blocks a multiprocessor holds."""
    columns = ("grid", "thr", "KB", "regs", "occ%", "waves")
    made = _narrow("", *columns, "limit", right=columns)
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
                "×".join(map(str, launch.grid)),
                str(launch.block),
                kilobytes(launch.shared_bytes),
                str(fits.registers) if step.registers_known else "?",
                f"{100 * fits.share:.3g}",
                f"{step.waves:.3g}",
                fits.limited_by[-1],
            )
    return made


def work_table(rows: Iterable[Row]) -> Table:
    """The bytes and barriers of each rung, and the least time these could take."""
    columns = (*_WORK, "roof µs")
    made = _narrow("", *columns, right=columns)
    for row in rows:
        if row.plan is not None:
            made.add_row(row.rung.title, *_work_cells(row.plan), _roof(row.plan))
    return made


def fit_on_each(rungs: list[list[Row]], gpus: list[str]) -> Table:
    """`fit_table` for several GPUs side by side: of each rung, its rows on all of them."""
    columns = ["grid", *(name for gpu in gpus for name in (f"{gpu}\nocc%", "\nwaves"))]
    made = _narrow("", *columns, right=columns)
    for rows in rungs:
        steps = next(row.plan.steps for row in rows if row.plan)
        title = rows[0].rung.title
        if len(steps) > 1:
            made.add_row(title)
        for at, step in enumerate(steps):
            cells = []
            for row in rows:
                fits = row.plan.steps[at] if row.plan else None
                cells += [_share(fits.occupancy), f"{fits.waves:.3g}"] if fits else ["–", "–"]
            name = f"  {step.launch.kernel}" if len(steps) > 1 else title
            made.add_row(name, "×".join(map(str, step.launch.grid)), *cells)
    return made


def work_on_each(rungs: list[list[Row]], gpus: list[str]) -> Table:
    """`work_table` for several GPUs, which have a column each for the least time."""
    columns = [*_WORK, *(f"{gpu}\nroof" for gpu in gpus)]
    made = _narrow("", *columns, right=columns)
    for rows in rungs:
        anywhere = next(row.plan for row in rows if row.plan)
        roofs = (_roof(row.plan) if row.plan else "–" for row in rows)
        made.add_row(rows[0].rung.title, *_work_cells(anywhere), *roofs)
    return made


_WORK = ("tiles", "depth", "par.", "MB", "×", "extra")


def _work_cells(plan: Plan) -> tuple[str, ...]:
    times = plan.amplification
    return (
        str(max(step.launch.iterations for step in plan.steps)),
        number(plan.depth),
        number(plan.parallelism),
        megabytes(plan.traffic),
        f"{times:.3g}" if times < 1000 else number(times),
        megabytes(4 * plan.workspace) if plan.workspace else "–",
    )


def _roof(plan: Plan) -> str:
    seconds, _ = plan.roofline
    return f"{seconds * 1e6:.3g}"


def _share(fits: Occupancy) -> str:
    """Occupancy in percent, and the initial of what limits it."""
    return f"{100 * fits.share:.3g}{fits.limited_by[-1][0]}"


def phase_table(plan: Plan) -> Table:
    """How the work of each phase falls to the threads of a block."""
    columns = ("items", "each", "busy", "depth", "share")
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


def ladder_table(
    rows: Iterable[Row],
    timed: bool,
    title: Callable[[Row], str] = lambda r: r.rung.title + " ct" * r.rung.constant_time,
) -> Table:
    """The three lenses side by side."""
    made = _narrow("", *_LENSES, *(_BENCH if timed else ()), right=_LENSES + _BENCH)
    for row in rows:
        cells = [*_plan_cells(row), *_trace_cells(row)]
        if timed:
            cells += _bench_cells(row)
        made.add_row(title(row), *cells)
    return made


def against_table(titles: tuple[str, str], both: tuple[Counted, Counted]) -> Table:
    """The machine's counts for two rungs, and the second over the first."""
    made = table("", *titles, "ratio", right=(*titles, "ratio"))
    for name, text in COUNTED.items():
        one, other = (float(getattr(counted, name)) for counted in both)
        ratio = f"{other / one:.3g}×" if one else "–"
        cells = (f"{x:.3g}" if 0 < x < 100 and x % 1 else number(x) for x in (one, other))
        made.add_row(text, *cells, ratio if one != other else "=")
    return made


def against_phases(titles: tuple[str, str], traces: tuple[list[Trace], list[Trace]]) -> Table:
    """Depth by phase, of both rungs, over all blocks."""
    found: tuple[dict[str, int], dict[str, int]] = {}, {}
    for depths, of in zip(found, traces, strict=True):
        for phase in (phase for trace in of for phase in trace.phases):
            name = phase.name or "(outside)"  # which several launches may have
            depths[name] = depths.get(name, 0) + phase.depth
    made = table("depth by phase, all blocks", *titles, "ratio", right=(*titles, "ratio"))
    for name in dict.fromkeys((*found[0], *found[1])):
        one, other = (depths.get(name) for depths in found)
        cells = ("–" if depth is None else number(depth) for depth in (one, other))
        ratio = f"{other / one:.3g}×" if one and other else "–"
        made.add_row(name, *cells, ratio if one != other else "=")
    return made


_LENSES = ("blocks", "KB", "occ.", "depth", "lanes", "MB", "lost", "bar", "wb")
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
        return [""] * 6
    if seen.hazards or not seen.right:
        return [Text("hazards" if seen.hazards else "wrong", style=BAD), *[""] * 5]
    lost = seen.bank_conflicts / seen.shared_wavefronts if seen.shared_wavefronts else 0.0
    return [
        number(seen.depth),
        f"{seen.active_lanes:.1f}",
        megabytes(seen.global_bytes * row.problem.heads),
        f"{lost:.0%}",
        number(seen.barriers_per_block),
        number(seen.warp_barriers_per_warp),
    ]


def _bench_cells(row: Row) -> list[str | Text]:
    if row.microseconds is None or row.plan is None:
        return ["", ""]
    rate = row.plan.pairs * 4 * row.problem.D / row.microseconds / 1e6
    return [Text(duration(row.microseconds / 1e6), style=OURS), f"{rate:.3g}"]
