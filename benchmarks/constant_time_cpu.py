"""Constant time on a CPU: what `lockstep audit timing` finds, with 100 000 samples of each call.

    PYTHONPATH=src python benchmarks/constant_time_cpu.py
    PYTHONPATH=src python benchmarks/constant_time_cpu.py --layers time --jobs 11

Times want a quiet machine; layers that cannot run on it say so. Writes
constant-time_<cpu>_....json. Exit status 1 if a class of secrets shows in a kernel, or a planted
leak does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from lockstep.audit.timing import cpu_layers
from lockstep.audit.timing.outcome import Outcome
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]


LAYERS: dict[str, Callable[[bool], list[Outcome]]] = {
    "code": cpu_layers.audit_code,
    "memcheck": cpu_layers.audit_memcheck,
    "counters": cpu_layers.audit_counters,
}
TIME = "time"


def measure(samples: int, jobs: int) -> Iterator[tuple[bool, Outcome]]:
    """Times of planted leaks and of kernels, each in a process of its own, so many at once."""
    with ProcessPoolExecutor(jobs, max_tasks_per_child=1) as pool:
        waiting = [
            (planted, pool.submit(cpu_layers.time_subject, name, samples, planted))
            for planted in (True, False)
            for name in cpu_layers.timed_subjects(planted)
        ]
        for planted, future in waiting:
            yield from ((planted, outcome) for outcome in future.result())


def audit(layers: Sequence[str], samples: int, jobs: int) -> Iterator[tuple[bool, Outcome]]:
    """The layers, on kernels and on planted leaks."""
    for layer in layers:
        if layer == TIME:
            yield from measure(samples, jobs)
        else:
            for planted in (True, False):
                yield from ((planted, outcome) for outcome in LAYERS[layer](planted))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=[*LAYERS, TIME], default=[*LAYERS, TIME])
    parser.add_argument("--jobs", type=int, default=1, help="calls that are timed at once")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    rows = []
    for planted, outcome in audit(options.layers, options.samples, options.jobs):
        rows.append({"planted": planted, **asdict(outcome)})
        print(
            "ok" if outcome.ok else "FAILS", outcome.layer, outcome.name, outcome.detail, flush=True
        )
    print(results.save(results.collect("constant-time", rows), options.out))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
