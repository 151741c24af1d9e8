"""The ladder as the lockstep machine counts it, with its plan for an H200: docs/ladder.md shows it.

    PYTHONPATH=src python benchmarks/ladder_machine.py

Needs no GPU, but the compiler of the extra `gpu`. Writes benchmarks/results/ladder-machine.json.
Exit status 1 if a rung is wrong or has a hazard.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep import results
from lockstep.console import progress
from lockstep.ladder import RUNGS, Problem, Rung, find, launches_of
from lockstep.ladder.survey import survey
from lockstep.ladder.tables import ladder_table
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.nvrtc import compile_source
from lockstep.simt.occupancy import GPUS

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = Problem(B=2, H=16, S=1024, D=32)
GPU = "H200"
# what claims about registers are held against
COMPILED = tuple(
    (step, Problem(4, 16, 1024, 64, causal=True)) for step in find("block_tile").steps()
)


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


def main() -> int:
    """Survey, print, save."""
    steps = [step for rung in RUNGS for step in rung.steps()]
    rows = []
    with progress(Console(stderr=True), len(steps)) as bar:
        for row in survey(PROBLEM, GPU, steps):
            rows.append(row)
            bar.done()
    Console().print(ladder_table(rows, timed=False))
    run = results.collect("ladder-machine", [row.as_json() for row in rows])
    run |= {"problem": str(PROBLEM), "heads": PROBLEM.heads, "gpu": GPU}
    run["compiled"] = [compiled(rung, problem) for rung, problem in COMPILED]
    results.write(run, ROOT / results.RESULTS / "ladder-machine.json")
    counted = [row.counted for row in rows if row.counted]
    return int(any(c.hazards or not c.right for c in counted))


if __name__ == "__main__":
    sys.exit(main())
