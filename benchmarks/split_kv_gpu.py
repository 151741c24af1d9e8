"""How far to split: split_kv with 1 to 16 key tiles per block and unsplit, on ordinary and
on tensor cores, each kernel timed.

    PYTHONPATH=src python benchmarks/split_kv_gpu.py

Needs a CUDA GPU and the extra `gpu`. Writes benchmarks/results/split-kv-<gpu>.json.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.ladder import Problem, Rung, Tensors, find, launches_of
from lockstep.ladder.check import errors
from lockstep.ladder.survey import time_launches
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
PROBLEMS = (
    Problem(B=1, H=1, S=8192, D=64, causal=True),
    Problem(B=1, H=1, S=8192, D=64),
    Problem(B=1, H=1, S=1024, D=64),
    Problem(B=4, H=16, S=1024, D=64, causal=True),
    Problem(B=2, H=16, S=1024, D=32),
)
FORMS: tuple[dict[str, str], ...] = (
    {"tile": "8x8"},
    {"tile": "64x64"},
    {"tile": "64x64", "products": "mma"},
)
KV_TILES = ("all", 16, 8, 4, 2, 1)
CHECKED = Problem(B=1, H=2, S=1023, D=64, causal=True)


def measure(rung: Rung, problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """Microseconds of the call and of each of its kernels."""
    launches = launches_of(rung, problem, tensors)
    return {
        "problem": asdict(problem),
        "shape": str(problem),
        "kernel": rung.title,
        "options": rung.settings,
        "microseconds": time_launches(launches),
        "launches": {launch.kernel.__name__: time_launches([launch]) for launch in launches},
    }


def check(rung: Rung) -> None:
    """Raise if the rung is wrong here."""
    tensors = CHECKED.draw(device="cuda")
    for launch in launches_of(rung, CHECKED, tensors):
        launch.kernel[launch.grid, launch.block, launch.dynamic_bytes](**launch.arguments)
    if not errors(CHECKED, tensors).ok:
        raise AssertionError(f"{rung.title} is wrong for {CHECKED}")


def main() -> None:
    console = Console()
    forms = [
        [find("split_kv").choose(**form, kv_tiles=kv_tiles) for kv_tiles in KV_TILES]
        for form in FORMS
    ]
    for rungs in forms:
        for rung in rungs:
            check(rung)
    rows = []
    for problem in PROBLEMS:
        tensors = problem.draw(device="cuda")
        table = Table(title=str(problem), box=None)
        for heading in ("kernel", "µs", "partial", "join", "unsplit / this"):
            table.add_column(heading, justify="left" if heading == "kernel" else "right")
        for rungs in forms:
            unsplit = 0.0
            for rung in rungs:
                row = measure(rung, problem, tensors)
                rows.append(row)
                unsplit = unsplit or row["microseconds"]
                times = (row["microseconds"], *row["launches"].values())
                gain = unsplit / row["microseconds"]
                table.add_row(rung.title, *(f"{t:.1f}" for t in times), f"{gain:.2f}")
        console.print(table)
    run = results.collect("split-kv", rows)
    path = results.save_for_gpu(run, "split-kv", ROOT / results.RESULTS)
    console.print(f"saved {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
