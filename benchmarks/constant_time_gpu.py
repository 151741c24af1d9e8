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
from lockstep.audit.timing.outcome import judged

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("kernels", "rungs", "leaks")


def count(group: str) -> tuple[list[dict[str, Any]], bool]:
    """Counters of each call, and whether they are what they should be."""
    counted = counters.count((group,))
    outcomes = [
        judged("counters", name, found, group == "leaks")
        for name, found in counters.differing(counted).items()
    ]
    for outcome in outcomes:
        print("ok" if outcome.ok else "FAILS", outcome.name, outcome.detail, flush=True)
    return [asdict(counts) for counts in counted], all(outcome.ok for outcome in outcomes)


def measure(group: str, samples: int) -> tuple[list[dict[str, Any]], bool]:
    """t of each class of secrets, of all of them over the samples, and whether all is well."""

    def judge(compared: tuple[str, dict[str, Times]]) -> list[dict[str, Any]]:
        return [asdict(outcome) for outcome in timed(*compared, group == "leaks")]

    began = time.perf_counter()
    rows = []
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
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    ok = True
    for group in options.groups:
        if options.what == "counters":
            rows, is_well = count(group)
        else:
            rows, is_well = measure(group, options.samples)
        run = results.collect(f"constant-time-{options.what}-{group}", rows)
        print(results.save_for_gpu(run, run["suite"], options.out), flush=True)
        ok &= is_well
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
