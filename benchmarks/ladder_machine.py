"""The ladder as the lockstep machine counts it, with its plan for an H200: docs/ladder.md shows it.

    PYTHONPATH=src python benchmarks/ladder_machine.py

Needs no GPU. Writes benchmarks/results/ladder-machine.json. Exit status 1 if a rung is wrong or has
a hazard.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from lockstep import results
from lockstep.console import progress
from lockstep.ladder import RUNGS, Problem
from lockstep.ladder.survey import survey
from lockstep.ladder.tables import ladder_table

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = Problem(B=2, H=16, S=256, D=32)
GPU = "H200"


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
    results.write(run, ROOT / results.RESULTS / "ladder-machine.json")
    counted = [row.counted for row in rows if row.counted]
    return int(any(c.hazards or not c.right for c in counted))


if __name__ == "__main__":
    sys.exit(main())
