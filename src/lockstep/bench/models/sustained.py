"""Seconds of launches back to back: what a rate comes to when the GPU is warm and its power capped.

Nothing is flushed or waited for between calls. Clocks and power are what `nvidia-smi` says
meanwhile.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from lockstep.bench.models.cases import Case
from lockstep.bench.models.contender import Contender
from lockstep.bench.models.measure import admitted
from lockstep.bench.timing import Timings

# Launches in the stream at once.
LAUNCHES = 50
QUERY = "clocks.sm,power.draw,temperature.gpu"
EVERY_MS = 100


def run(case: Case, contenders: Sequence[Contender], seconds: float) -> dict[str, Any]:
    """The row of one case, each contender launched for `seconds`; `sustained` has the mean clock
    (MHz), power (W) and temperature (°C) of each.

    Raises:
        DeviceLost: A contender broke the CUDA context.
    """
    row, calls = admitted(case, contenders)
    found, times = {}, {}
    for name, call in calls.items():
        with torch.no_grad(), _watched() as samples:
            times[name] = [_seconds_per_call(call, seconds)]
        found[name] = averages(samples)
    row.timings = Timings(times)
    return {**row.as_json(), "seconds": seconds, "sustained": found}


def _seconds_per_call(call: Callable[[], Any], seconds: float) -> float:
    torch.cuda.synchronize()
    start, calls = perf_counter(), 0
    while perf_counter() - start < seconds:
        for _ in range(LAUNCHES):
            call()
        calls += LAUNCHES
        torch.cuda.synchronize()
    return (perf_counter() - start) / calls


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Lines of `nvidia-smi` while the block runs; none where there is no such command."""
    lines: list[str] = []
    index = str(torch.cuda.current_device())
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        watcher = subprocess.Popen(
            [*command, "-i", index, "-lms", str(EVERY_MS)], stdout=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        yield lines
        return
    try:
        yield lines
    finally:
        watcher.terminate()
        said, _ = watcher.communicate()
        lines += said.splitlines()


def averages(lines: list[str]) -> dict[str, float]:
    """Mean clock, power and temperature over the second half of the lines, when they are steady."""
    rows = [[float(x) for x in line.split(",")] for line in lines if line.count(",") == 2]
    if not rows:
        return {}
    steady = rows[len(rows) // 2 :]
    names = ("clock_mhz", "power_w", "temperature_c")
    return {
        name: round(fmean(column), 1)
        for name, column in zip(names, zip(*steady, strict=True), strict=True)
    }
