"""The rows of `lockstep bench` as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from lockstep.bench import gpu_tables
from lockstep.bench.cpu import share_of_roof
from lockstep.output.console import BAD, GOOD, OURS, QUIET, THEIRS, table
from lockstep.output.formats import duration


def cpu_table(rows: list[dict[str, Any]], roof: float) -> Table:
    """The rows of `lockstep bench cpu`, with the speed each must reach, and the share of the roof,
    in GFLOP/s, that its matrix products have. It fits into 80 columns."""
    made = table("case", "shape", "lockstep", "SDPA", "speed", "goal", "roof", right=_NUMBERS)
    dtype = None
    for row in rows:
        if dtype not in (None, row["dtype"]):
            made.add_section()
        dtype = row["dtype"]
        made.add_row(
            row["case"],
            Text(row["shape"], style=QUIET),
            Text(duration(row["ms"]["lockstep"] / 1e3), style=OURS),
            Text(duration(row["ms"]["SDPA"] / 1e3), style=THEIRS),
            Text(f"{_times(row['speed'])}× {row['against']}", style=_verdict_style(row)),
            Text(f"{row['at_least']:.2g}", style=QUIET),
            share_of_roof(row, roof),
        )
    return made


def gpu_table(name: str, rows: list[dict[str, Any]]) -> Table:
    """One table of `lockstep bench gpu`: the best of a row in bold, and in the last column how the
    kernel that Lockstep chooses compares with the best peer."""
    contenders = gpu_tables.columns(rows)
    made = table(name, *contenders, "chosen", "× best peer", right=(*contenders, "× best peer"))
    for row in gpu_tables.in_order(rows):
        cells = []
        for contender in contenders:
            style = OURS if contender in row["ours"] else THEIRS
            if contender not in row["ms"]:
                style = BAD if contender in row["failed"] else QUIET
            elif contender == gpu_tables.best(row, contenders):
                style = f"bold {style}"
            cells.append(Text(gpu_tables.figure(row, contender), style=style))
        speed = row["speed"].get(row["chosen"])
        ratio = "–" if speed is None else f"{speed:.2f}× {row['best_peer']}"
        good = speed is None or speed >= 1
        made.add_row(row["case"], *cells, row["chosen"] or "–", Text(ratio, GOOD if good else BAD))
    return made


_NUMBERS = ("lockstep", "SDPA", "speed", "goal", "roof")


def _times(speed: float) -> str:
    return f"{speed:.2f}" if speed < 10 else f"{speed:.1f}"


def _verdict_style(row: dict[str, Any]) -> str:
    if row["speed"] >= row["aim"]:
        return f"bold {GOOD}"
    return GOOD if row["speed"] >= row["at_least"] else BAD
