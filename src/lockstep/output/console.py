"""Styles, tables and progress bars for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

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
        """Show `what` as the step that is running."""
        self.bar.update(self.task, description=what)

    def done(self, of: int | None = None) -> None:
        """Advance by one step, of so many if that has not been said before."""
        self.bar.update(self.task, advance=1, total=of)


@contextmanager
def progress(console: Console, steps: int | None = None) -> Iterator[Steps]:
    """A progress bar that is erased when it is done; `steps` is None if their number
    is not known yet."""
    columns = (
        SpinnerColumn(style=OURS),
        BarColumn(bar_width=24, complete_style="cyan"),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Steps(bar, bar.add_task("", total=steps))


def bar(value: float, longest: float, width: int, style: str) -> Text:
    """A horizontal bar of `width` cells at `longest`, exact to an eighth of a cell."""
    eighths = max(1, round(8 * width * value / longest))
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=style)
