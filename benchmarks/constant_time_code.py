"""Constant time in the machine code of GPU kernels: what the taint analysis finds. Needs no GPU.

    PYTHONPATH=src python benchmarks/constant_time_code.py

Cross-compiles every constant-time build, every constant-time rung of the ladder and every planted
leak, for sm_80 and sm_90; a matter of minutes. Writes constant-time-code-gpu.json. Exit status 1 if
a build has a finding, or a planted leak has none.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path

from lockstep.audit.timing import gpu_layers
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    rows = []
    for planted in (True, False):
        for outcome in gpu_layers.audit_code(planted):
            # Without the folders that sources lie in.
            detail = re.sub(r"\(/\S*/", "(", outcome.detail)
            rows.append({"planted": planted, **asdict(outcome), "detail": detail})
            print("ok" if outcome.ok else "FAILS", outcome.name, detail, flush=True)
    run = results.collect("constant-time-code", rows)
    print(results.write(run, options.out / "constant-time-code-gpu.json"))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
