"""How long the lockstep machine takes for a whole attention grid, all counters and checks on.

    PYTHONPATH=src python benchmarks/simt_speed.py [--save]

The kernel of tests/simt/simt_attention.py: tiles of 45 × 90, 256 threads, B 2, H 16, S 1024,
D 32, 736 blocks. Once as written, and once with every shared address different from block to
block, the machine's worst case. Exit status 1 if an output is off or a hazard is reported.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "simt"))

import simt_attention  # noqa: E402

BATCH, HEADS, SEQ, HEAD_DIM = 2, 16, 1024, 32
# float32 sums of some thousand terms, none above 1
TOLERANCE = 1e-5


def measure(shifted: bool) -> dict[str, Any]:
    """One run of the grid on the machine, checked against float64."""
    q, k, v, out = simt_attention.problem(BATCH, HEADS, SEQ, HEAD_DIM)
    start = time.perf_counter()
    trace = simt_attention.run(q, k, v, out, SEQ, shifted)
    seconds = time.perf_counter() - start
    error = float(np.abs(out - simt_attention.oracle(q, k, v, SEQ)).max())
    return {
        "case": "every shared address differs by block" if shifted else "as written",
        "seconds": round(seconds, 2),
        "largest_error": error,
        "hazards": len(trace.hazards),
    }


def main() -> int:
    """Measure, print, and with --save keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="keep the run in benchmarks/results")
    save = parser.parse_args().save
    console = Console()
    with console.status("running 736 blocks, twice"):
        rows = [measure(shifted) for shifted in (False, True)]
    table = Table("case", "seconds", "largest error", "hazards")
    for row in rows:
        cells = (f"{row['seconds']:.1f}", f"{row['largest_error']:.1e}", str(row["hazards"]))
        table.add_row(row["case"], *cells)
    console.print(table)
    if save:
        console.print(results.save(results.collect("simt-speed", rows), ROOT / results.RESULTS))
    return int(any(row["hazards"] or row["largest_error"] > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
