"""The ladder as the lockstep machine counts it, with its plan for an H200: docs/ladder.md shows it.

    PYTHONPATH=src python benchmarks/ladder_machine.py

Needs no GPU, but the compiler of the extra `gpu`. Traces in several processes, one per core up to
eight. Writes benchmarks/results/ladder-machine.json. Exit status 1 if a rung is wrong or has a
hazard.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.ladder import RUNGS, Problem, Rung, find, launches_of
from lockstep.ladder.survey import survey
from lockstep.output import results
from lockstep.output.console import progress
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.nvrtc import compile_source
from lockstep.simt.occupancy import GPUS

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = Problem(B=2, H=16, S=1024, D=32)
GPU = "H200"
# one thread per row against one block per tile, stage by stage, on the problem of that design
ARCHITECTURE = Problem(B=4, H=16, S=1024, D=64, causal=True)
STAGES = (
    find("row_per_thread"),
    *find("block_tile").steps(),
    find("block_tile_mma"),
    find("persistent_mma"),
)
# what claims about registers are held against
COMPILED = tuple((step, ARCHITECTURE) for step in find("block_tile").steps())


def compiled(rung: Rung, problem: Problem) -> dict[str, Any]:
    """Registers of a thread, and bytes spilled by it."""
    one_head = replace(problem, B=1, H=1)
    (launch,) = launches_of(rung, one_head, one_head.draw())
    typed = launch.kernel.typed(**launch.arguments)
    arch = GPUS[GPU].capability.arch
    found = compile_source(emit(typed, threads=launch.block), arch).resources
    return {
        "title": rung.title,
        "shape": str(problem),
        "registers": found.registers,
        "spilled_bytes": found.spill_stores,
    }


def surveyed(point: tuple[str, dict[str, Any], Problem]) -> dict[str, Any]:
    """One rung on one problem, planned and traced, as data: rungs do not go between processes."""
    name, options, problem = point
    (row,) = survey(problem, GPU, [find(name).choose(**options)])
    return row.as_json()


def main() -> int:
    """Survey and save."""
    steps = [step for rung in RUNGS for step in rung.steps()]
    wanted = [(step, PROBLEM) for step in steps] + [(step, ARCHITECTURE) for step in STAGES]
    points = [(rung.name, dict(rung.chosen), problem) for rung, problem in wanted]
    rows = []
    # torch has threads of its own, which a fork would not take along
    context = multiprocessing.get_context("spawn")
    with (
        progress(Console(stderr=True), len(points)) as bar,
        ProcessPoolExecutor(min(8, os.cpu_count() or 1), context) as pool,
    ):
        for row in pool.map(surveyed, points):
            rows.append(row)
            bar.done()
    run = results.collect("ladder-machine", rows[: len(steps)])
    run |= {"problem": str(PROBLEM), "heads": PROBLEM.heads, "gpu": GPU}
    run["architecture"] = {"problem": str(ARCHITECTURE), "rows": rows[len(steps) :]}
    run["compiled"] = [compiled(rung, problem) for rung, problem in COMPILED]
    results.write(run, ROOT / results.RESULTS / "ladder-machine.json")
    counted = [row["trace_of_one_head"] for row in rows if row["trace_of_one_head"]]
    wrong = [c for c in counted if c["hazards"] or not c["right"]]
    Console().print(f"{len(counted)} traces, {len(wrong)} wrong or with hazards")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
