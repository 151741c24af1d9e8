"""`lockstep demo`: exact, the same bits, fast and see-through, on this machine, within a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep import environment
from lockstep.bench import cpu
from lockstep.demo import checks
from lockstep.ladder import RUNGS, Problem, Rung
from lockstep.ladder.survey import Counted, count
from lockstep.output.console import BAD, GOOD, NO, OURS, QUIET, THEIRS, YES, bar, table
from lockstep.output.formats import duration, number

BAR_WIDTH = 30
INDENT = (0, 0, 0, 2)
ROUNDS = 3
LADDER = Problem(B=1, H=1, S=48, D=32)
# One of each kind, out of the cases of `lockstep bench cpu`.
SPEED_CASES = tuple(
    next(case for case in cpu.CASES if case.name == name and case.D == 64)
    for name in (
        "fp32 causal",
        "decode, grouped",
        "window (256, 0)",
        "fp32 fwd + bwd",
    )
)

T = TypeVar("T")


def run(console: Console) -> bool:
    """Print the demonstration; whether every check held."""
    _heading(console)
    exact = _section(
        console,
        "Exact",
        "largest error against float64, beside PyTorch's own math attention",
        table("", "lockstep", "PyTorch", "ratio", "at most", "", right=_NUMBERS),
        checks.exactness(),
        _exactness_row,
    )
    same = _section(
        console,
        "Same bits",
        "one sequence computed once more, while what is around it changes",
        table("", "lockstep", "", "PyTorch"),
        checks.same_bits(),
        _same_bits_row,
    )
    _section(
        console,
        "Fast",
        "one call, median of runs that take turns",
        Table.grid(padding=(0, 3, 0, 0)),
        (cpu.run(case, ROUNDS) for case in SPEED_CASES),
        _speed_row,
    )
    climbed = _section(
        console,
        "See-through",
        "from naive to tensor cores, on a machine that counts and checks it all",
        table("rung", *_COUNTS, "", right=_COUNTS),
        _climb(),
        _rung_row,
    )
    ok = all(check.ok for check in exact) and all(check.ok for check in same)
    ok = ok and all(counted.right and not counted.hazards for _, counted in climbed)
    _closing(console, ok)
    return ok


_NUMBERS = ("lockstep", "PyTorch", "ratio", "at most")
_COUNTS = ("depth", "lanes", "moved", "conflicts", "barriers")


def _heading(console: Console) -> None:
    version, machine = environment.versions(), environment.hardware()
    console.print()
    console.print(Text.assemble(("Lockstep", OURS), "  exact attention for PyTorch"))
    where = f"{machine.cpu}, {machine.cores} cores, {machine.simd}; torch {version['torch']}"
    console.print(Text(where, style=QUIET))


def _closing(console: Console, ok: bool) -> None:
    verdict, style = ("Every check holds.", GOOD) if ok else ("A check failed.", BAD)
    console.print(Text(verdict, style=style))
    hints = (
        *(("lockstep bench cpu", "bold"), " times more, ", ("lockstep ladder", "bold")),
        *(" climbs higher, ", ("lockstep doctor", "bold"), " says what this machine offers."),
    )
    console.print(Text.assemble(*hints))


def _section(
    console: Console,
    title: str,
    subtitle: str,
    table: Table,
    results: Iterable[T],
    add_row: Callable[[Table, T], None],
) -> list[T]:
    """A heading and a table that grows as results come in, under a spinner until the last."""
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {subtitle}", QUIET)))
    console.print()
    done: list[T] = []
    spinner = Spinner("dots", Text("running; what runs for the first time compiles"), style=OURS)
    with Live(spinner, console=console, transient=True) as live:
        for result in results:
            done.append(result)
            add_row(table, result)
            live.update(Group(Padding(table, INDENT), spinner))
    console.print(Padding(table, INDENT))
    return done


def _exactness_row(table: Table, check: checks.Exactness) -> None:
    table.add_row(
        check.what,
        Text(f"{check.ours:.1e}", style=OURS),
        Text(f"{check.theirs:.1e}", style=THEIRS),
        f"{check.ours / check.theirs:.2f}×",
        f"{check.allowed / check.theirs:.2f}×",
        YES if check.ok else NO,
    )


def _same_bits_row(table: Table, check: checks.SameBits) -> None:
    table.add_row(
        check.what,
        Text(_share(check.ours), style=OURS),
        YES if check.ok else NO,
        Text(_share(check.theirs), style=THEIRS),
    )


def _share(equal: float) -> str:
    return "identical" if equal == 1.0 else f"{1 - equal:.1%} of elements differ"


def _speed_row(table: Table, row: cpu.Row) -> None:
    ours, theirs = row.timings.median(cpu.LOCKSTEP), row.timings.median(cpu.SDPA)
    longest = max(ours, theirs)
    # The empty line keeps pairs of bars apart.
    names = Group(Text(row.case.name), Text(row.case.shape, style=QUIET), Text())
    labels = Group(Text("lockstep", style=OURS), Text("SDPA", style=THEIRS))
    bars = Group(
        *(
            Text.assemble(bar(time, longest, BAR_WIDTH, style), " ", duration(time))
            for time, style in ((ours, OURS), (theirs, THEIRS))
        )
    )
    speed = row.timings.speed(cpu.LOCKSTEP, cpu.SDPA)
    table.add_row(names, labels, bars, Text(f"{speed:.1f}×", style="bold"))


def _climb() -> Iterator[tuple[Rung, Counted]]:
    return ((step, count(step, LADDER)) for rung in RUNGS for step in rung.steps())


def _rung_row(table: Table, result: tuple[Rung, Counted]) -> None:
    step, seen = result
    table.add_row(
        step.title,
        Text(number(seen.depth), style=OURS),
        f"{seen.active_lanes:.1f}",
        f"{seen.global_bytes / 1024:.0f} KB",
        number(seen.bank_conflicts),
        f"{seen.barriers_per_block:.0f}",
        YES if seen.right and not seen.hazards else NO,
    )
