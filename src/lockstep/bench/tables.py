"""Keep the tables in README.md equal to the results files.

Between the markers `<!-- bench:cpu -->` and `<!-- /bench:cpu -->` stands what this module makes of
benchmarks/results, and nothing is typed there by hand:

    python -m lockstep.bench.tables            rewrite README.md
    python -m lockstep.bench.tables --check    exit status 1 if it would change
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.bench import results


def cpu_block(directory: Path) -> str:
    """Markdown for the newest CPU run on each processor."""
    runs = results.latest("cpu", directory)
    return "\n\n".join(f"{cpu_table(run)}\n\n{results.where(run)}." for run in runs)


def cpu_table(run: dict[str, Any]) -> str:
    """One run of `lockstep bench cpu` as a markdown table."""
    lines = [
        "| case | shape | lockstep | SDPA | speed | against |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in run["rows"]:
        ours, sdpa = (milliseconds(row["ms"].get(name)) for name in ("lockstep", "SDPA"))
        lines.append(
            f"| {row['case']} | {row['shape']} | {ours} | {sdpa} "
            f"| {row['speed']:.2f}× | {row['against']} |"
        )
    return "\n".join(lines)


def milliseconds(ms: float | None) -> str:
    """A time with three significant digits, and a dash for one that was not taken."""
    if ms is None:
        return "–"
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms < 100 else f"{ms:.0f} ms"


MARKED = re.compile(r"<!-- bench:(?P<name>\w+) -->.*?<!-- /bench:(?P=name) -->", re.DOTALL)
BLOCKS: dict[str, Callable[[Path], str]] = {"cpu": cpu_block}


def fill(text: str, directory: Path) -> str:
    """`text` with every marked block replaced by what the results in `directory` say."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- bench:{name} -->\n{BLOCKS[name](directory)}\n<!-- /bench:{name} -->"

    return re.sub(
        r"<!-- bench:(?P<name>\w+) -->.*?<!-- /bench:(?P=name) -->", block, text, flags=re.S
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep.bench.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, say if it would")
    check = parser.parse_args(arguments).check
    root = results.checkout()
    if root is None:
        print("no benchmarks/results here: run this from a checkout", file=sys.stderr)
        return 2
    readme = root / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = fill(old, root / results.RESULTS)
    if check:
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
