"""All rungs for one problem, through three lenses: plan, trace, and bench where there is a GPU.

Heads do not know of each other, and what the machine counts for one it counts for every other, so
one head is traced and its counts are multiplied. Where a block may work for several heads, all of
them are traced and the counts divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.simt.machine import Trace

from .check import run_and_check
from .plan import Plan, plan
from .rung import Launch, Problem, Rung, Tensors, launches_of


@dataclass(frozen=True)
class Counted:
    """Counts of the machine for one head, over all launches of a call: the mean where several were
    traced together."""

    depth: int  # warp instructions on the critical path of the longest block of each launch
    instructions: int  # of warps, as are all counts
    active_lanes: float
    global_bytes: int  # moved, in whole sectors
    shared_wavefronts: int
    bank_conflicts: int
    barriers_per_block: float  # of the launch with most of them
    warp_barriers_per_warp: float  # likewise
    mma: int
    hazards: int
    right: bool  # by the library's error rule
    seconds: float  # the machine's own time


@dataclass(frozen=True)
class Row:
    """One rung. `why_not` says what keeps it from running where there is no plan."""

    rung: Rung
    problem: Problem
    plan: Plan | None
    why_not: str = ""
    counted: Counted | None = None
    microseconds: float | None = None

    def with_counted(self, counted: Counted | None) -> Row:
        """The row with what the machine counted, here or in another run of the same launches."""
        return replace(self, counted=counted)

    def as_json(self) -> dict[str, Any]:
        return {
            "rung": self.rung.name,
            "options": self.rung.settings,
            "title": self.rung.title,
            "constant_time": self.rung.constant_time,
            "plan": self.plan.as_json() if self.plan else None,
            "why_not": self.why_not,
            "trace_of_one_head": asdict(self.counted) if self.counted else None,
            "microseconds": self.microseconds,
        }


def one_head(problem: Problem) -> Problem:
    """The problem of a single head."""
    return replace(problem, B=1, H=1, kv_heads=None)


def to_trace(rung: Rung, problem: Problem) -> Problem:
    """One head of `problem`, or all where a block of the rung may work for several."""
    return problem if rung.across_heads else one_head(problem)


def count(rung: Rung, problem: Problem) -> Counted:
    """Trace `problem` on the machine, or one head of it that stands for all."""
    traced = to_trace(rung, problem)
    traces, found = run_and_check(rung, traced)
    return summary(traces, found.ok, traced.heads)


def summary(traces: list[Trace], right: bool, heads: int = 1) -> Counted:
    """The traces of one call in a few numbers; sums are those of one of `heads`."""
    totals = [trace.totals for trace in traces]
    instructions = sum(t.instructions for t in totals)
    return Counted(
        depth=sum(int(trace.depth.max()) for trace in traces),
        instructions=instructions // heads,
        active_lanes=sum(t.lane_instructions for t in totals) / instructions,
        global_bytes=sum(t.sector_bytes for t in totals) // heads,
        shared_wavefronts=sum(t.shared_wavefronts for t in totals) // heads,
        bank_conflicts=sum(t.bank_conflicts for t in totals) // heads,
        barriers_per_block=max(t.totals.barriers / _warps(t) for t in traces),
        warp_barriers_per_warp=max(t.totals.warp_barriers / _warps(t) for t in traces),
        mma=sum(t.by_kind["mma"] for t in totals) // heads,
        hazards=sum(len(trace.hazards) for trace in traces),
        right=right,
        seconds=sum(trace.seconds for trace in traces),
    )


def _warps(trace: Trace) -> int:
    """Warps of the whole grid."""
    blocks = trace.grid[0] * trace.grid[1] * trace.grid[2]
    return blocks * -(-trace.block[0] // 32)


def survey(
    problem: Problem, gpu: str, steps: list[Rung], tracing: bool = True, timing: bool = False
) -> Iterator[Row]:
    """One row per step, as they are ready. `timing` needs a CUDA device.

    Raises ValueError for a GPU that is not known.
    """
    for rung in steps:
        refusal = rung.refusal(problem)
        if refusal:
            yield Row(rung, problem, None, refusal)
            continue
        row = Row(rung, problem, None)
        try:
            row = replace(row, plan=plan(rung, problem, gpu))
        except ValueError as error:  # a block that this GPU cannot run, others can
            row = replace(row, why_not=str(error))
        if tracing:
            row = replace(row, counted=count(rung, problem))
        if timing and row.plan:
            row = replace(row, microseconds=microseconds(rung, problem))
        yield row


def microseconds(rung: Rung, problem: Problem, tensors: Tensors | None = None) -> float:
    """Median time of a call on the CUDA device here, all its launches together.

    Tensors are drawn where none are given. Raises ValueError where the rung refuses the problem.
    """
    tensors = tensors or problem.draw(device="cuda")
    return time_launches(launches_of(rung, problem, tensors))


def time_launches(launches: list[Launch]) -> float:
    """Median microseconds of launches in a row on the CUDA device here, with a cold L2.

    They are recorded in a CUDA graph, so that the device does not wait for the host between them.
    """
    import torch
    from triton.testing import do_bench

    def call() -> None:
        for launch in launches:
            launch.kernel[launch.grid, launch.block, launch.dynamic_bytes](**launch.arguments)

    call()  # compiles, which a graph cannot record
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return 1e3 * float(do_bench(graph.replay, warmup=10, rep=50, return_mode="median"))
