"""Constant time on a GPU: counters of Nsight Compute and times, over many classes of secrets.

    PYTHONPATH=src python benchmarks/constant_time_gpu.py counters
    PYTHONPATH=src python benchmarks/constant_time_gpu.py times --samples 1000000

Needs a CUDA GPU, the extra `gpu` and, for counters, `ncu` on the path. Writes
constant-time-counters-<group>-<gpu>.json or constant-time-times-<group>-<gpu>.json for each group
of what is audited: kernels, rungs of the ladder, planted leaks. Exit status 1 if a class of
secrets shows in a kernel, or a planted leak does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep import results
from lockstep.audit.timing import counters, gpu_clock
from lockstep.audit.timing.clock import Times
from lockstep.audit.timing.cpu_layers import timed

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("kernels", "rungs", "leaks")


def count(group: str, only: list[str]) -> tuple[list[dict[str, Any]], bool]:
    """Counters of each call, and whether they are what they should be."""
    report = counters.count(group, only)
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
    shown = {row["subject"] for row in rows if row["differs"]}
    return rows, shown == ({row["subject"] for row in rows} if group == "leaks" else set())


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


def measure(group: str, samples: int) -> tuple[list[dict[str, Any]], bool]:
    """t of each class of secrets, of all of them over the samples, and whether all is well."""

    def judge(compared: tuple[str, dict[str, Times]]) -> list[dict[str, Any]]:
        return [asdict(outcome) for outcome in timed(*compared, group == "leaks")]

    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(8) as pool:
        compared = gpu_clock.compare(counters.chosen((group,)), samples)
        waiting = [pool.submit(judge, one) for one in compared]
        print(f"{group}: {time.perf_counter() - began:.1f} s", flush=True)
        for future in waiting:
            for row in future.result():
                rows.append(row)
                medians = row["figures"]["median_ns"]
                print("ok" if row["ok"] else "FAILS", row["name"], row["detail"], medians)
    return rows, all(row["ok"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("counters", "times"))
    parser.add_argument("--samples", type=int, default=1_000_000, help="of each subject")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--only", nargs="+", default=[], help="names of what is counted")
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    ok = True
    for group in options.groups:
        if options.what == "counters":
            rows, is_well = count(group, options.only)
        else:
            rows, is_well = measure(group, options.samples)
        run = results.collect(f"constant-time-{options.what}-{group}", rows)
        print(results.save_for_gpu(run, run["suite"], options.out), flush=True)
        ok &= is_well
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
