"""Constant time on a CPU: what `lockstep audit timing` finds, with 100 000 samples of each call.

    PYTHONPATH=src python benchmarks/constant_time_cpu.py
    PYTHONPATH=src python benchmarks/constant_time_cpu.py --layers time

Times want a quiet machine; layers that cannot run on it say so. Writes
constant-time_<cpu>_....json. Exit status 1 if a class of secrets shows in a kernel, or a planted
leak does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.audit.timing import cpu_layers
from lockstep.audit.timing.outcome import Outcome
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]


LAYERS: dict[str, Callable[[int, bool], list[Outcome]]] = {
    "code": lambda _, planted: cpu_layers.audit_code(planted),
    "memcheck": lambda _, planted: cpu_layers.audit_memcheck(planted),
    "counters": lambda _, planted: cpu_layers.audit_counters(planted),
    "time": cpu_layers.audit_time,
}


def audit(layers: Sequence[str], samples: int) -> Iterator[tuple[bool, Outcome]]:
    """The layers, on kernels and on planted leaks."""
    for planted in (True, False):
        for layer in layers:
            for outcome in LAYERS[layer](samples, planted):
                yield planted, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    rows = []
    for planted, outcome in audit(options.layers, options.samples):
        rows.append({"planted": planted, **asdict(outcome)})
        print(
            "ok" if outcome.ok else "FAILS", outcome.layer, outcome.name, outcome.detail, flush=True
        )
    print(results.save(results.collect("constant-time", rows), options.out))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
