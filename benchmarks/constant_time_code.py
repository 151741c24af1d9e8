"""Constant time in the machine code of GPU kernels: what the taint analysis finds. Needs no GPU.

    PYTHONPATH=src python benchmarks/constant_time_code.py --jobs 8

Cross-compiles every kind of constant-time build, every constant-time rung of the ladder and every
planted leak, for sm_80 and sm_90; minutes, with one process. Writes constant-time-code-gpu.json.
Exit status 1 if a build has a finding, or a planted leak has none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path

from lockstep.audit.timing import gpu_code
from lockstep.audit.timing.outcome import Outcome, judged
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]


@cache
def subjects(planted: bool) -> list[tuple[str, gpu_code.Find]]:
    """All builds, or all planted leaks."""
    return list(gpu_code.leaks() if planted else gpu_code.builds())


def audit(planted: bool, i: int) -> Outcome:
    """The i-th build, or planted leak."""
    name, find = subjects(planted)[i]
    return judged("code", name, list(find()), planted)


def takes_long(planted: bool, i: int) -> bool:
    """The Hopper kernels: whichever of them is the last, other processes would wait for it."""
    return subjects(planted)[i][0].startswith("hopper")


def main() -> int:
    missing = gpu_code.missing()
    if missing:
        sys.exit(missing)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    todo = [(planted, i) for planted in (True, False) for i in range(len(subjects(planted)))]
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        first = sorted(todo, key=lambda item: not takes_long(*item))
        waiting = {item: pool.submit(audit, *item) for item in first}
        outcomes = {item: waiting[item].result() for item in todo}
    rows = []
    for (planted, _), outcome in outcomes.items():
        # Without the folders that sources lie in.
        detail = re.sub(r"\(/\S*/", "(", outcome.detail)
        rows.append({"planted": planted, **asdict(outcome), "detail": detail})
        print("ok" if outcome.ok else "FAILS", outcome.name, detail, flush=True)
    run = results.collect("constant-time-code", rows)
    print(results.write(run, options.out / "constant-time-code-gpu.json"))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
