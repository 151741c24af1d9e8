"""Where the time of a rung goes: clock cycles by phase, from an instrumented build on a GPU.

    PYTHONPATH=src python benchmarks/ladder_phases_gpu.py

Every warp reads the clock where a phase begins and adds up its cycles; a phase lasts until the next
one begins, so that waiting for others is part of it. Its share is its cycles over all cycles of
the warps. Beside it stands the time of the instrumented kernel and of the kernel
as it is: where the two are far apart, the clock reads have changed what they measure. Where `ncu`
is on the path, the utilisation of the multiprocessors is measured too (`--no-utilisation` does
without). Takes less than a minute. Writes benchmarks/results/ladder-phases-<gpu>.json.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from triton.testing import do_bench

from lockstep.ladder import Problem, Rung, Tensors, find, launches_of, run_on_gpu
from lockstep.ladder.survey import microseconds
from lockstep.output import console as screen
from lockstep.output import results
from lockstep.simt.cuda_cpp import phases
from lockstep.simt.gpu import launch as launch_on_gpu
from lockstep.simt.launch import extent

ROOT = Path(__file__).resolve().parents[1]
SMALL = Problem(B=2, H=16, S=1024, D=32)
CAUSAL = Problem(B=4, H=16, S=1024, D=64, causal=True)
LONG = Problem(B=1, H=32, S=8192, D=64)
MEASURED = (
    *((step, problem) for step in find("small_tile").steps() for problem in (SMALL, LONG)),
    (find("warp_mma").choose(tile="45x90"), SMALL),
    *((step, CAUSAL) for step in find("block_tile").steps()),
    (find("block_tile_mma"), CAUSAL),
    (find("persistent_mma"), CAUSAL),
)
USED = (find("row_per_thread"), *find("block_tile").steps())  # utilisation, at CAUSAL
METRIC = "sm__throughput.avg.pct_of_peak_sustained_elapsed"


@cache
def drawn(problem: Problem) -> Tensors:
    """Tensors on the GPU: drawing them takes longer than most kernels do."""
    return problem.draw(device="cuda")


def measure(rung: Rung, problem: Problem) -> dict[str, Any]:
    """Shares by phase of a rung with a single launch, and both times."""
    tensors = drawn(problem)
    (launch,) = launches_of(rung, problem, tensors)
    names = phases(launch.kernel.typed(**launch.arguments))
    cycles = torch.zeros(len(names) + 1, dtype=torch.int64, device="cuda")
    where = extent(launch.grid, "grid"), extent(launch.block, "block"), launch.dynamic_bytes

    def call() -> None:
        arguments = launch.kernel.bind(**launch.arguments)
        launch_on_gpu(launch.kernel, *where, arguments, clocks=cycles)

    call()
    torch.cuda.synchronize()
    cycles.zero_()
    call()
    *spent, total = cycles.tolist()
    shares = {name: value / total for name, value in zip(names, spent, strict=True)}
    return {
        "kernel": rung.title,
        "shape": str(problem),
        "phases": shares,
        "outside": 1 - sum(shares.values()),
        "warp_cycles": total,
        "microseconds": microseconds(rung, problem, tensors),
        "instrumented_microseconds": 1e3 * float(do_bench(call, 5, 20, return_mode="median")),
    }


def utilisation() -> list[dict[str, Any]]:
    """Percent of the peak of the busiest unit of the multiprocessors, by Nsight Compute."""
    command = [
        *("ncu", "--csv", "--clock-control", "none", "--print-units", "base"),
        *("--kernel-name", "regex:^(row_per_thread|block_tile)", "--metrics", METRIC),
        *(sys.executable, __file__, "--launch-only"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    table = csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"ID"') :]))
    found = [float(record["Metric Value"].replace(",", "")) for record in table]
    return [
        {"kernel": rung.title, "shape": str(CAUSAL), "utilisation": value}
        for rung, value in zip(USED, found, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-utilisation", action="store_true", help="do without ncu")
    parser.add_argument("--launch-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console(width=100)
    if not torch.cuda.is_available():
        console.print("no CUDA device here", style="red")
        return 2
    if options.launch_only:
        for rung in USED:
            run_on_gpu(rung, CAUSAL, drawn(CAUSAL))
        torch.cuda.synchronize()
        return 0
    rows = [measure(rung, problem) for rung, problem in MEASURED]
    table = screen.table("kernel", "shape", "µs", "instrumented", "shares", right=("µs",))
    for row in rows:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in row["phases"].items())
        times = (f"{row[key]:.0f}" for key in ("microseconds", "instrumented_microseconds"))
        table.add_row(row["kernel"], row["shape"], *times, shares)
    console.print(table)
    used = [] if options.no_utilisation or shutil.which("ncu") is None else utilisation()
    for row in used:
        console.print(f"{row['kernel']}: {row['utilisation']:.1f} % of peak")
    run = results.collect("ladder-phases", rows) | {"utilisation": used}
    path = results.save_for_gpu(run, "ladder-phases", ROOT / results.RESULTS)
    console.print(f"saved {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
