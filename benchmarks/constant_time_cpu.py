"""Constant time on a CPU: what `lockstep audit timing` finds, with 100 000 samples of each call.

    PYTHONPATH=src python benchmarks/constant_time_cpu.py

Wants a quiet machine; layers that cannot run on it say so. Writes constant-time_<cpu>_....json.
Exit status 1 if a class of secrets shows in a kernel, or a planted leak does not.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from lockstep.audit.timing import cpu_layers
from lockstep.audit.timing.outcome import Outcome
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]


def audit(samples: int) -> list[tuple[bool, Outcome]]:
    """Every layer, of kernels and of planted leaks."""
    found = []
    for planted in (True, False):
        outcomes = cpu_layers.audit_code(planted) + cpu_layers.audit_memcheck(planted)
        outcomes += cpu_layers.audit_counters(planted)
        outcomes += cpu_layers.audit_time(samples, planted)
        found += [(planted, outcome) for outcome in outcomes]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    rows = []
    for planted, outcome in audit(options.samples):
        rows.append({"planted": planted, **asdict(outcome)})
        print("ok" if outcome.ok else "FAILS", outcome.layer, outcome.name, outcome.detail)
    print(results.save(results.collect("constant-time", rows), options.out))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
