"""Tables and progress bars for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from lockstep.bench import gpu_tables
from lockstep.bench.tables import milliseconds

OURS, THEIRS, GOOD, BAD, QUIET = "bold cyan", "yellow", "green", "bold red", "dim"
YES, NO = Text("✓", style=GOOD), Text("✗", style=BAD)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table in the house style; the columns named in `right` hold numbers."""
    made = Table(
        box=box.SIMPLE_HEAD,
        header_style=QUIET,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    numbers = set(right)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return made


@dataclass(frozen=True)
class Steps:
    """A progress bar under way."""

    bar: Progress
    task: TaskID

    def say(self, what: str) -> None:
        """What is being done right now."""
        self.bar.update(self.task, description=what)

    def done(self) -> None:
        """One step further."""
        self.bar.advance(self.task)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Steps]:
    """A progress bar that leaves no trace when it is done."""
    columns = (
        SpinnerColumn(style=OURS),
        BarColumn(bar_width=24, complete_style="cyan"),
        TextColumn("{task.completed}/{task.total}", style=QUIET),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Steps(bar, bar.add_task("", total=steps))


def cpu_table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `lockstep bench cpu`, with the speed each must reach and the one it aims at."""
    made = table("case", "shape", "lockstep", "SDPA", "speed", "goal", right=_NUMBERS)
    dtype = None
    for row in rows:
        if dtype not in (None, row["dtype"]):
            made.add_section()
        dtype = row["dtype"]
        made.add_row(
            row["case"],
            Text(row["shape"], style=QUIET),
            Text(milliseconds(row["ms"]["lockstep"]), style=OURS),
            Text(milliseconds(row["ms"]["SDPA"]), style=THEIRS),
            Text(f"{row['speed']:.2f}× {row['against']}", style=_verdict_style(row)),
            Text(f"{row['at_least']:.2g}/{row['aim']:.2g}", style=QUIET),
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


_NUMBERS = ("lockstep", "SDPA", "speed")


def _verdict_style(row: dict[str, Any]) -> str:
    if row["speed"] >= row["aim"]:
        return f"bold {GOOD}"
    return GOOD if row["speed"] >= row["at_least"] else BAD


def bar(value: float, longest: float, width: int, style: str) -> Text:
    """A horizontal bar of `width` cells at `longest`, exact to an eighth of a cell."""
    eighths = max(1, round(8 * width * value / longest))
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=style)
