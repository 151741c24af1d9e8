"""Where the numbers come from: plans in closed form, traces of the machine, measured times.

Problems that are traced are small: the figures that claims are held against are ratios, shares and
counts per tile, which do not change with the number of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from lockstep.ladder import (
    LaunchPlan,
    PhasePlan,
    Problem,
    find,
    plans_of,
    run_on_machine,
)
from lockstep.ladder.plan import Plan, Step
from lockstep.output import results
from lockstep.simt.occupancy import fit

from .claim import Readings

if TYPE_CHECKING:
    import torch

    from lockstep.simt.machine import Trace
    from lockstep.simt.machine.records.tally import Phase

# the problems that the documents speak of
SMALL = Problem(B=2, H=16, S=1024, D=32)
LONG = Problem(B=1, H=32, S=8192, D=64)
CAUSAL = Problem(B=4, H=16, S=1024, D=64, causal=True)
TOY = Problem(B=1, H=1, S=256, D=128)
ONE_HEAD = Problem(B=1, H=1, S=1024, D=64)
# one tile of keys for the rungs of 45 × 90, and one for those of 120 and 128
TRACED = Problem(B=1, H=1, S=90, D=32)
TRACED_LARGE = Problem(B=1, H=1, S=120, D=32)
# four tiles of 90 keys: the online softmax has something to correct
SEVERAL_TILES = Problem(B=1, H=1, S=300, D=32)


def planned(rung: str, problem: Problem, gpu: str = "A100", **options: Any) -> Plan:
    """The plan of a rung on a GPU; registers are left out, so that no compiler is needed."""
    chosen = find(rung).choose(**options)
    steps = (
        Step(launch, fit(gpu, launch.block, 0, launch.shared_bytes), registers_known=False)
        for launch in plans_of(chosen, problem)
    )
    return Plan(chosen, problem, gpu, tuple(steps))


def launch_plan(rung: str, problem: Problem, index: int = 0, **options: Any) -> LaunchPlan:
    """The plan of one launch of a rung."""
    return plans_of(find(rung).choose(**options), problem)[index]


def planned_phase(rung: str, problem: Problem, name: str, **options: Any) -> PhasePlan:
    """A phase of a rung's first launch."""
    phases = launch_plan(rung, problem, **options).phases
    return next(phase for phase in phases if phase.name == name)


@cache
def _run(rung: str, problem: Problem, options: tuple) -> tuple[torch.Tensor, list[Trace]]:
    return run_on_machine(find(rung).choose(**dict(options)), problem)


def traced(rung: str, problem: Problem, index: int = 0, **options: Any) -> Trace:
    """The trace of one launch; a run is made once and kept."""
    return _run(rung, problem, tuple(options.items()))[1][index]


def output(rung: str, problem: Problem, **options: Any) -> torch.Tensor:
    """The output of the machine, [B, H, S, D]."""
    return _run(rung, problem, tuple(options.items()))[0]


def traced_phase(rung: str, problem: Problem, name: str, **options: Any) -> Phase:
    """A phase of a rung's first launch."""
    return traced(rung, problem, **options).phase(name)


@cache
def measured(suite: str) -> Mapping[str, Any] | None:
    """The newest run of a suite; None outside a checkout."""
    root = results.checkout()
    if root is None:
        return None
    return results.newest(suite, root / results.RESULTS)


def _rows(suite: str) -> list[Mapping[str, Any]]:
    run = measured(suite)
    return run["rows"] if run else []


def where(suite: str) -> str | None:
    """One line that says on what a suite was measured."""
    run = measured(suite)
    return None if run is None else results.where_on_gpu(run)


def microseconds(title: str, problem: Problem) -> float | None:
    """The measured time of a rung with its options, as `Rung.title` writes it."""
    for row in _rows("ladder"):
        if row["kernel"] == title and row["shape"] == str(problem):
            return row["microseconds"]
    return None


def compiled(title: str, problem: Problem) -> Mapping[str, int] | None:
    """Registers and spilled bytes of a thread, as compiled for Hopper."""
    run = measured("ladder-machine")
    for row in run["compiled"] if run else ():
        if row["title"] == title and row["shape"] == str(problem):
            return row
    return None


def _of_phases(title: str, problem: Problem) -> Mapping[str, Any] | None:
    """The measured phases of a rung."""
    for row in _rows("ladder-phases"):
        if row["kernel"] == title and row["shape"] == str(problem):
            return row
    return None


def time_shares(titles: tuple[str, ...], problem: Problem, *phases: str) -> Readings | None:
    """Percent of the measured time of rungs that these phases take; None where none is measured."""
    rows = {title: _of_phases(title, problem) for title in titles}
    return {
        title: 100 * sum(row["phases"][name] for name in phases)
        for title, row in rows.items()
        if row is not None
    } or None


def phase_time(title: str, problem: Problem, phase: str) -> float | None:
    """Microseconds of a phase: its share of the time of the rung as it is."""
    row = _of_phases(title, problem)
    return None if row is None else row["phases"][phase] * row["microseconds"]


def utilisation(title: str) -> float | None:
    """Percent of the peak of the multiprocessors' busiest unit, as Nsight Compute counts it."""
    run = measured("ladder-phases")
    for row in run["utilisation"] if run else ():
        if row["kernel"] == title:
            return row["utilisation"]
    return None


def per_head(titles: tuple[str, ...], problem: Problem) -> Readings | None:
    """Measured time over the heads of one sequence, and over all heads of the batch."""
    found = {}
    for title in titles:
        time = microseconds(title, problem)
        if time is not None:
            found[f"{title}, over H = {problem.H}"] = time / problem.H
            found[f"{title}, over B·H = {problem.heads}"] = time / problem.heads
    return found or None


def speedups(fast: str, slow: str, *problems: Problem) -> dict[str, float] | None:
    """How many times as fast one rung is as another, for each problem that both were timed on."""
    found = {}
    for problem in problems:
        times = [microseconds(title, problem) for title in (fast, slow)]
        if times[0] is not None and times[1] is not None:
            found[str(problem)] = times[1] / times[0]
    return found or None


def teraflops(titles: tuple[str, ...], problem: Problem) -> Readings | None:
    """Measured, four operations for each query, key and head dim."""
    work = 4 * problem.heads * problem.S**2 * problem.D
    times = {title: microseconds(title, problem) for title in titles}
    return {title: work / time / 1e6 for title, time in times.items() if time} or None


def splits(tile: str, problem: Problem, products: str = "fma") -> dict[str, Mapping[str, Any]]:
    """Measured rows of split_kv by key tiles per block: "all", "16", ... "1"."""
    form = {"tile": tile, "products": products}
    return {
        str(row["options"]["kv_tiles"]): row
        for row in _rows("split-kv")
        if form.items() <= ({"products": "fma"} | row["options"]).items()
        and row["shape"] == str(problem)
    }
