"""A trace as text for a terminal: phases, annotated source, hazards."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .tally import Counts, Line, Tally

HEADER = ("warps", "lanes", "sectors", "wavefr.", "", "source")
LEAST_SOURCE = 30  # columns for the source, however narrow the screen
POOR = 1.5  # this many times the ideal number of transactions deserves red


def number(value: float) -> str:
    """A count in at most six characters.

    >>> [number(n) for n in (0, 987, 12345, 6_543_210)]
    ['', '987', '12.3k', '6.54M']
    """
    if not value:
        return ""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}"
    return f"{value:.0f}"


def against_ideal(actual: int, ideal: int) -> Text:
    """Transactions, with the factor over the ideal where there is one."""
    if not actual:
        return Text("")
    factor = actual / ideal if ideal else 1.0
    text = Text(number(actual))
    if factor > 1.005:
        text.append(f" {factor:.3g}x", style="bold red" if factor >= POOR else "yellow")
    return text


def render(trace: Tally) -> RenderableType:
    """Everything, top down."""
    parts: list[RenderableType] = [_heading(trace)]
    if len(trace.phases) > 1 or (trace.phases and trace.phases[0].name):
        parts.append(Padding(_phases(trace), (1, 0, 0, 0)))
    parts.append(Padding(_source(trace), (1, 0, 0, 0)))
    parts += [Padding(notes, (1, 0, 0, 0)) for notes in _notes(trace)]
    return Group(*parts)


def _heading(trace: Tally) -> Text:
    totals = trace.totals
    blocks = "x".join(str(n) for n in trace.grid if n > 1) or "1"
    threads = "x".join(str(n) for n in trace.block if n > 1) or "1"
    shared = trace.static_shared_bytes + trace.dynamic_shared_bytes
    text = Text()
    text.append(trace.kernel, style="bold")
    text.append(f"   {blocks} blocks of {threads} threads")
    if shared:
        text.append(f", {shared} bytes of shared memory")
    text.append(
        f"\n{number(totals.instructions)} warp instructions, "
        f"{totals.active_lanes:.1f} of 32 lanes active; "
        f"critical path of a block {number(trace.depth.max())}"
    )
    if totals.global_sectors:
        text.append(
            f"\nglobal memory: {number(totals.bytes['global'])} bytes asked for, "
            f"{number(totals.sector_bytes)} moved in {number(totals.global_requests)} requests"
        )
    if totals.shared_wavefronts:
        text.append(
            f"\nshared memory: {number(totals.shared_wavefronts)} wavefronts, "
            f"{number(totals.bank_conflicts) or 'none'} of them bank conflicts"
        )
    return text


def _phases(trace: Tally) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    for name in ("depth", "threads busy", "warps busy", "instructions", "sectors", "wavefronts"):
        table.add_column(name, justify="right")
    whole = sum(p.depth for p in trace.phases) or 1
    for phase in trace.phases:
        counts = phase.counts
        table.add_row(
            phase.name or "(outside)",
            f"{phase.depth / whole:.0%}",
            f"{phase.thread_utilisation:.0%}",
            f"{phase.warp_utilisation:.0%}",
            number(counts.instructions),
            against_ideal(counts.global_sectors, counts.ideal_sectors),
            against_ideal(counts.shared_wavefronts, counts.ideal_wavefronts),
        )
    return table


def _source(trace: Tally) -> Listing:
    hazards: dict[tuple[str, int], list[str]] = {}
    for hazard in trace.hazards:
        hazards.setdefault((hazard.loc.file, hazard.loc.line), []).append(hazard.kind)
    known = {(line.file, line.number): line for line in trace.lines}
    rows = [[Text(name, style="dim") for name in HEADER]]
    for offset, text in enumerate(trace.source):
        key = (trace.file, trace.first_line + offset)
        rows.append(_row(key[1], text, known.get(key), hazards.get(key, [])))
    inlined = [line for line in trace.lines if not _in_kernel(trace, line)]
    before = ""
    for line in inlined:
        where = _function(trace, line)
        if where != before:
            rows.append([Text("")] * 5 + [Text(where, style="dim italic")])
            before = where
        found = hazards.get((line.file, line.number), [])
        rows.append(_row(line.number, line.text, line, found))
    return Listing(rows)


def _function(trace: Tally, line: Line) -> str:
    """The device function that a line belongs to, and its file."""
    file = PurePath(line.file).name
    for name, source in trace.devices.items():
        last = source.first_line + len(source.lines)
        if source.file == line.file and source.first_line <= line.number < last:
            return f"inlined: {name} ({file})"
    return f"inlined from {file}"


class Listing:
    """Columns of figures, right-aligned and left out where empty, then the source.

    A line of source that is wider than the screen goes on below itself, further in.
    """

    def __init__(self, rows: list[list[Text]]):
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [c for c in range(5) if any(row[c].plain for row in self.rows[1:])]
        widths = {c: max(len(row[c].plain) for row in self.rows) for c in columns}
        before = sum(widths[c] + 1 for c in columns)
        room = max(options.max_width - before, LEAST_SOURCE)
        for row in self.rows:
            head = Text(no_wrap=True)
            for c in columns:
                head.append(" " * (widths[c] - len(row[c].plain)))
                head.append_text(row[c]).append(" ")
            indent = len(row[5].plain) - len(row[5].plain.lstrip())
            hang = min(indent + 2, room // 2)
            first, *others = row[5].wrap(console, room, overflow="fold") or [Text("")]
            # words that do not fit go on with the indentation of what they belong to
            yield head.append_text(first)
            rest = Text(" ").join(others)
            for part in rest.wrap(console, room - hang, overflow="fold") if others else ():
                yield Text(" " * (before + hang), no_wrap=True).append_text(part)


def _in_kernel(trace: Tally, line: Line) -> bool:
    last = trace.first_line + len(trace.source)
    return line.file == trace.file and trace.first_line <= line.number < last


def _row(at: int, text: str, line: Line | None, hazards: list[str]) -> list[Text]:
    """One line of source with its figures in front; what deserves a word stands behind it."""
    source = Text(text, style="" if line else "dim")
    if hazards:
        source.stylize("bold red")
        source.append(f"  <- {', '.join(dict.fromkeys(hazards))}", style="bold red reverse")
    where = Text(str(at), style="dim")
    if line is None:
        return [*([Text("")] * 4), where, source]
    counts = line.counts
    lanes = Text(f"{counts.active_lanes:.3g}" if counts.instructions else "")
    if counts.instructions and counts.active_lanes < 16:
        lanes.stylize("yellow")
    marks = _marks(counts)
    if marks:
        source.append(f"  <- {marks}", style="dim cyan")
    return [
        Text(number(line.executions)),
        lanes,
        against_ideal(counts.global_sectors, counts.ideal_sectors),
        against_ideal(counts.shared_wavefronts, counts.ideal_wavefronts),
        where,
        source,
    ]


def _marks(counts: Counts) -> str:
    marks = []
    if counts.divergent_branches:
        marks.append(f"{number(counts.divergent_branches)} warps diverge")
    if counts.shuffles:
        marks.append(f"{number(counts.shuffles)} shuffles")
    if counts.by_kind["mma"]:
        marks.append(f"{number(counts.by_kind['mma'])} mma")
    return ", ".join(marks)


def _notes(trace: Tally) -> list[RenderableType]:
    notes: list[RenderableType] = []
    for message, file, line in trace.warnings:
        notes.append(Text(f"warning: {file}:{line}: {message}", style="yellow"))
    if not trace.hazards:
        notes.append(Text("no hazards", style="green"))
        return notes
    text = Text(f"{len(trace.hazards)} hazard(s)", style="bold red")
    for hazard in trace.hazards:
        text.append(f"\n  {hazard}", style="not bold red")
    notes.append(text)
    return notes
