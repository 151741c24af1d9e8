"""Keep the tables and pictures in README.md and docs/ equal to the results files.

Between the markers `<!-- bench:cpu -->` and `<!-- /bench:cpu -->` stands what this module makes of
benchmarks/results, and nothing is typed there by hand:

    python -m lockstep.bench.tables            rewrite them
    python -m lockstep.bench.tables --check    exit status 1 if one would change
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.bench import (
    constant_time_plot,
    constant_time_tables,
    gpu_tables,
    ladder_tables,
    pivot_tables,
    support_table,
)
from lockstep.bench.counter_tables import agreement_block
from lockstep.bench.cpu import share_of_roof
from lockstep.bench.models import summary
from lockstep.output import results
from lockstep.output.formats import duration


def cpu_block(directory: Path) -> str:
    """Markdown for the newest CPU run on each processor."""
    runs = results.latest("cpu", directory)
    return "\n\n".join(f"{cpu_table(run)}\n\n{results.where(run)}." for run in runs)


def cpu_table(run: dict[str, Any]) -> str:
    """One run of `lockstep bench cpu` as a markdown table."""
    roof = run.get("roof_gflops")  # results of earlier versions have none
    share, rule = (" of the roof |", "---:|") if roof else ("", "")
    lines = [
        f"| case | shape | lockstep | SDPA | speed | against |{share}",
        f"|---|---|---:|---:|---:|---|{rule}",
    ]
    for row in run["rows"]:
        ours, sdpa = (_time(row["ms"].get(name)) for name in ("lockstep", "SDPA"))
        reached = f" {share_of_roof(row, roof)} |" if roof else ""
        lines.append(
            f"| {row['case']} | {row['shape']} | {ours} | {sdpa} "
            f"| {row['speed']:.2f}× | {row['against']} |{reached}"
        )
    return "\n".join(lines)


def _time(ms: float | None) -> str:
    return duration(None if ms is None else ms / 1e3)


PAGES = (
    "README.md",
    "docs/ladder.md",
    "docs/simt-cuda.md",
    "docs/hopper.md",
    "docs/hopper-study.md",
    "docs/hopper-backward.md",
    "docs/hopper-backward-study.md",
    "docs/hopper-decode.md",
    "docs/triton.md",
    "docs/gradients.md",
    "docs/numerics.md",
    "docs/audit.md",
    "docs/support.md",
    "docs/models.md",
    "docs/transformers.md",
    "docs/distributed.md",
    "docs/sdpa.md",
    "docs/constant-time.md",
)
PICTURES = {"docs/constant-time.svg": constant_time_plot.picture}
MARKED = re.compile(r"<!-- bench:(?P<name>\w+) -->.*?<!-- /bench:(?P=name) -->", re.DOTALL)
BLOCKS: dict[str, Callable[[Path], str]] = {
    "cpu": cpu_block,
    "simt_counters": agreement_block,
    "support": support_table.block,
    "models": summary.block,
    "drawn_cases": partial(summary.block, suite=summary.DRAWN),
    **gpu_tables.BLOCKS,
    **ladder_tables.BLOCKS,
    **constant_time_tables.BLOCKS,
}


def fill(text: str, directory: Path) -> str:
    """`text` with every marked block replaced by what the results in `directory` say.

    Raises KeyError for a block that neither this module nor a results file knows.
    """
    described = pivot_tables.find(directory)

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        known = name in BLOCKS
        table = BLOCKS[name](directory) if known else pivot_tables.render(*described[name])
        return f"<!-- bench:{name} -->\n{table}\n<!-- /bench:{name} -->"

    return MARKED.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep.bench.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, say if it would")
    check = parser.parse_args(arguments).check
    root = results.checkout()
    if root is None:
        print("no benchmarks/results here: run this from a checkout", file=sys.stderr)
        return 2
    stale = 0
    for name in (*PAGES, *PICTURES):
        page = root / name
        if not page.exists():
            continue
        old = page.read_text(encoding="utf-8")
        directory = root / results.RESULTS
        new = PICTURES[name](directory) if name in PICTURES else fill(old, directory)
        if check and new != old:
            print(f"{page.name} is not what the results say", file=sys.stderr)
        stale |= int(new != old)
        if not check:
            page.write_text(new, encoding="utf-8")
    return stale if check else 0


if __name__ == "__main__":
    raise SystemExit(main())
