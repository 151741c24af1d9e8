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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep import results
from lockstep.audit.timing import clock, counters, gpu_clock
from lockstep.audit.timing.subjects import Subject

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("kernels", "rungs", "leaks")


def count(groups: tuple[str, ...]) -> list[dict[str, Any]]:
    """Counters of each call, and those that differ from the ones of random secrets."""
    rows = []
    random: dict[str, counters.Counts] = {}
    for counts in counters.count(groups):
        base = random.setdefault(counts.subject, counts)
        rows.append(
            {
                "subject": counts.subject,
                "secrets": counts.secrets,
                "kernels": counts.kernels,
                "counts": counts.values,
                "differs": counters.differences(base, counts),
            }
        )
        print(rows[-1]["subject"], rows[-1]["secrets"], rows[-1]["differs"] or "equal", flush=True)
    return rows


def measure(groups: tuple[str, ...], samples: int) -> list[dict[str, Any]]:
    """t of each class of secrets, and its course over the samples."""
    waiting: list[tuple[Subject, str, Future[Any]]] = []
    with ThreadPoolExecutor(8) as pool:
        for subject in counters.chosen(groups):
            compared = gpu_clock.compare(subject.run, subject.draw, subject.fixes, samples)
            for name, times in compared.items():
                waiting.append((subject, name, pool.submit(figures, times)))
    rows = []
    for subject, name, future in waiting:
        rows.append({"subject": subject.name, "secrets": name, "leak": subject.is_leak})
        rows[-1] |= future.result()
        print(subject.name, name, {k: v for k, v in rows[-1].items() if k != "course"}, flush=True)
    return rows


def figures(times: clock.Times) -> dict[str, Any]:
    course = times.course()
    return {
        "samples": len(times.ns),
        "t": times.t(),
        "median_ns": times.medians(),
        "course": course,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("counters", "times"))
    parser.add_argument("--samples", type=int, default=1_000_000, help="of each subject")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    return max(audit(options, group) for group in options.groups)


def audit(options: argparse.Namespace, group: str) -> int:
    """One group; 1 if what it shows is not what it should."""
    if options.what == "counters":
        rows = count((group,))
        shown = {row["subject"] for row in rows if row["differs"]}
    else:
        rows = measure((group,), options.samples)
        limit = clock.CLEAR if group == "leaks" else clock.LIMIT
        shown = {row["subject"] for row in rows if abs(row["t"]) >= limit}
    run = results.collect(f"constant-time-{options.what}-{group}", rows)
    print(results.save_for_gpu(run, run["suite"], options.out))
    wanted = {row["subject"] for row in rows} if group == "leaks" else set()
    print(f"{group}: shown {sorted(shown)}, wanted {sorted(wanted)}", flush=True)
    return int(shown != wanted)


if __name__ == "__main__":
    sys.exit(main())
