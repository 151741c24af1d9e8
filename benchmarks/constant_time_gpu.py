"""Constant time on a GPU: counters of Nsight Compute and times, over many classes of secrets.

    PYTHONPATH=src python benchmarks/constant_time_gpu.py counters --jobs 7
    PYTHONPATH=src python benchmarks/constant_time_gpu.py times --samples 1000000

Needs a CUDA GPU, the extra `gpu` and, for counters, `ncu` on the path. Writes
constant-time-counters-<group>-<gpu>.json or constant-time-times-<group>-<gpu>.json for each group
of what is audited: kernels, rungs of the ladder, planted leaks. Exit status 1 if a class of
secrets shows in a kernel, or a planted leak does not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from lockstep.audit.timing import counters, gpu_clock
from lockstep.audit.timing.clock import Times
from lockstep.audit.timing.cpu_layers import timed
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("kernels", "rungs", "leaks")
# What is timed side by side. Of the leaks, each sees the others.
TOGETHER = (("kernels", "rungs"), ("leaks",))


def count(group: str, only: list[str], jobs: int) -> tuple[list[dict[str, Any]], bool]:
    """Counters of each call, and whether they are what they should be; of so many subjects at
    once, each in a process of its own."""
    names = [subject.name for subject in counters.chosen((group,), only)]
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        for report in pool.map(lambda name: counters.count(group, [name]), names):
            rows += counted(report)
            print(f"{time.perf_counter() - began:.1f} s", flush=True)
    shown = {row["subject"] for row in rows if row["differs"]}
    return rows, shown == (set(names) if group == "leaks" else set())


def counted(report: counters.Report) -> list[dict[str, Any]]:
    """What was counted in each call, and where it differs from the first of its subject."""
    rows: list[dict[str, Any]] = []
    base: dict[str, counters.Counts] = {}
    for call in report.calls:
        first = base.setdefault(call.subject, call)
        rows.append(
            {
                "subject": call.subject,
                "secrets": call.secrets,
                "launches": [summary(report, launch) for launch in call.launches],
                "differs": list(counters.differences(report, first, call)),
            }
        )
        print(call.subject, call.secrets, rows[-1]["differs"][:4] or "equal", flush=True)
    return rows


def summary(report: counters.Report, launch: counters.Launch) -> dict[str, Any]:
    """What was executed and accessed, apart from loops that wait."""
    waits = report.waits_of(launch)
    return {
        "kernel": launch.kernel,
        "instructions": len(launch.executed["warps"]),
        "executed": {kind: launch.total(kind, waits) for kind in launch.executed},
        "in_wait_loops": len(waits),
        "executed_with_waiting": {kind: launch.total(kind) for kind in launch.executed},
        **launch.counters,
    }


def measure(
    groups: tuple[str, ...], samples: int, seconds: float
) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """By group: t of each class of secrets, of all of them over the samples; and whether all is
    well."""
    subjects = {group: counters.chosen((group,)) for group in groups}
    group_of = {subject.name: group for group, mine in subjects.items() for subject in mine}

    def judge(compared: tuple[str, dict[str, Times]]) -> tuple[str, list[dict[str, Any]]]:
        group = group_of[compared[0]]
        return group, [asdict(outcome) for outcome in timed(*compared, group == "leaks")]

    began = time.perf_counter()
    rows: dict[str, list[dict[str, Any]]] = {group: [] for group in groups}
    with ThreadPoolExecutor(8) as pool:
        compared = gpu_clock.compare(chain(*subjects.values()), samples, seconds)
        waiting = [pool.submit(judge, one) for one in compared]
        print(f"{' and '.join(groups)}: {time.perf_counter() - began:.1f} s", flush=True)
        for future in waiting:
            group, found = future.result()
            rows[group] += found
            for row in found:
                medians = row["figures"]["median_ns"]
                print("ok" if row["ok"] else "FAILS", row["name"], row["detail"], medians)
    return rows, all(row["ok"] for mine in rows.values() for row in mine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("counters", "times"))
    parser.add_argument("--samples", type=int, default=1_000_000, help="of each subject")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which times end")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--only", nargs="+", default=[], help="names of what is counted")
    parser.add_argument("--jobs", type=int, default=1, help="of them that are counted at once")
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    # A queue for each stream. CUDA looks when it is first used.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    ok = True
    wanted = (tuple(x for x in together if x in options.groups) for together in TOGETHER)
    for groups in filter(None, wanted):
        if options.what == "times":
            rows, is_well = measure(groups, options.samples, options.seconds)
        else:
            counted = {group: count(group, options.only, options.jobs) for group in groups}
            rows = {group: mine for group, (mine, _) in counted.items()}
            is_well = all(well for _, well in counted.values())
        for group in groups:
            run = results.collect(f"constant-time-{options.what}-{group}", rows[group])
            print(results.save_for_gpu(run, run["suite"], options.out), flush=True)
        ok &= is_well
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
