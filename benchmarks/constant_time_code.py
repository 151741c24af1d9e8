"""Constant time in the machine code of GPU kernels: what the taint analysis finds. Needs no GPU.

    PYTHONPATH=src python benchmarks/constant_time_code.py --jobs 8

Cross-compiles every constant-time build, every constant-time rung of the ladder and every planted
leak, for sm_80 and sm_90; minutes, with one process. Writes constant-time-code-gpu.json. Exit
status 1 if a build has a finding, or a planted leak has none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from lockstep.audit.timing import gpu_code
from lockstep.audit.timing.outcome import Outcome, judged
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]


def audit(planted: bool, first: int, step: int) -> list[tuple[int, Outcome]]:
    """Every `step`-th build from the `first` on, or planted leak, with its number."""
    builds = enumerate(gpu_code.leaks() if planted else gpu_code.builds())
    return [
        (i, judged("code", name, list(find()), planted))
        for i, (name, find) in builds
        if i % step == first
    ]


def main() -> int:
    missing = gpu_code.missing()
    if missing:
        sys.exit(missing)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        waiting = {
            planted: [
                pool.submit(audit, planted, first, options.jobs) for first in range(options.jobs)
            ]
            for planted in (True, False)
        }
        found = {
            planted: sorted(
                (x for future in futures for x in future.result()), key=lambda item: item[0]
            )
            for planted, futures in waiting.items()
        }
    for planted, outcomes in found.items():
        for _, outcome in outcomes:
            # Without the folders that sources lie in.
            detail = re.sub(r"\(/\S*/", "(", outcome.detail)
            rows.append({"planted": planted, **asdict(outcome), "detail": detail})
            print("ok" if outcome.ok else "FAILS", outcome.name, detail, flush=True)
    run = results.collect("constant-time-code", rows)
    print(results.write(run, options.out / "constant-time-code-gpu.json"))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
