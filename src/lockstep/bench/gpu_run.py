"""Run the cases of `lockstep bench gpu`, print the results and save them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from lockstep.bench import gpu, gpu_cases, gpu_timing, ours, peers, show
from lockstep.bench.contender import Contender
from lockstep.bench.row import DeviceLost
from lockstep.output import results
from lockstep.output.command import USAGE, print_json
from lockstep.output.console import BAD, QUIET, progress

WRONG = 1


def main(
    tables: Sequence[str],
    *,
    quick: bool = False,
    as_json: bool = False,
    save: bool = False,
    more_peers: Sequence[Contender] = (),
    without: Sequence[str] = (),
    cases: Sequence[str] = (),
    deadline: float | None = None,
    directory: Path | None = None,
) -> int:
    """Time `tables` (all, if empty) and print them; the exit status.

    `more_peers` take part besides those that can be imported, in place of any with their name;
    those named in `without` do not. Where the run is kept, it is written after every case, with
    the cases that are still missing: a run that is cut off is a run of fewer cases. `cases` leaves
    out those in whose names none of these words occurs. No case is begun after `deadline`, by
    `time.perf_counter`.
    """
    # What is printed on the way goes to stderr: stdout is for the tables, or for JSON alone.
    aside = Console(stderr=True)
    unknown = [name for name in tables if name not in gpu_cases.UNITS]
    if unknown:
        takes = ", ".join(gpu_cases.UNITS)
        aside.print(f"error: --table takes {takes}, got {unknown[0]!r}", style=BAD)
        return USAGE
    try:
        chosen = contenders(more_peers, without)
    except gpu.NoGpu as error:
        aside.print(f"error: {error}", style=BAD, soft_wrap=True)
        return USAGE
    if save:
        directory = directory or (results.checkout() or Path()) / results.RESULTS
    run = results.collect("gpu", [])
    run["peers"] = {e.name: e.version for e in chosen if e.kind == "peer"}
    run["rounds"] = gpu_timing.QUICK_ROUNDS if quick else gpu_timing.ROUNDS

    def run_case(case: gpu_cases.Case) -> dict[str, Any]:
        return gpu.run(case, chosen, rounds=run["rounds"]).as_json()

    wanted = {
        f"{case.table}: {case.name}": partial(run_case, case) for case in choose(tables, cases)
    }
    stopped = fill(run, wanted, deadline, directory, aside)
    if as_json:
        print_json(run)
    else:
        _report(run, Console())
    if directory is not None:
        aside.print(f"saved {results.path_of(run, directory)}", soft_wrap=True)
    return WRONG if stopped or one_of_ours_failed(run) else 0


def one_of_ours_failed(run: dict[str, Any]) -> bool:
    """Whether a kernel of Lockstep failed in a row, or was wrong."""
    return any(name in row["failed"] for row in run["rows"] for name in row["ours"])


def choose(tables: Sequence[str] = (), words: Sequence[str] = ()) -> list[gpu_cases.Case]:
    """The cases of these tables in whose names one of these words occurs; empty means any."""
    return [
        case
        for case in gpu_cases.CASES
        if (not tables or case.table in tables)
        and (not words or any(word in case.name for word in words))
    ]


def contenders(more: Sequence[Contender], without: Sequence[str]) -> list[Contender]:
    """Ours first, then the peers.

    Raises:
        NoGpu: As `gpu.kernels`.
    """
    mine = ours.contenders(gpu.kernels())
    replaced = {peer.name for peer in more}
    theirs = [peer for peer in peers.find() if peer.name not in replaced]
    return [contender for contender in (*mine, *theirs, *more) if contender.name not in without]


def fill(
    run: dict[str, Any],
    cases: Mapping[str, Callable[[], dict[str, Any]]],
    deadline: float | None,
    directory: Path | None,
    aside: Console,
) -> bool:
    """Fill the rows of `run` and keep it up to date on disk; whether the device broke.

    `cases` maps the name of each case to what runs it and returns its row.
    """
    run["missing"] = list(cases)
    if directory is not None:
        results.save(run, directory)
    with progress(aside, len(cases)) as steps:
        for name, run_case in cases.items():
            if deadline is not None and perf_counter() > deadline:
                aside.print(f"out of time, left out: {'; '.join(run['missing'])}", soft_wrap=True)
                break
            steps.say(name)
            try:
                run["rows"].append(run_case())
            except DeviceLost as error:
                aside.print(f"stopped: {error}", style=BAD, soft_wrap=True)
                return True
            run["missing"].pop(0)
            if directory is not None:
                results.save(run, directory)
            steps.done()
    return False


def _report(run: dict[str, Any], console: Console) -> None:
    for name in dict.fromkeys(row["table"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["table"] == name]
        table = show.gpu_table(f"{name}, {rows[0]['unit']}", rows)
        # Lines too long for a terminal or a pipe are still better than figures cut short.
        unbounded = console.options.update_width(1000)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
        console.print(table)
        for row in rows:
            for contender, reason in row["failed"].items():
                console.print(f"{row['case']}: {contender}: {reason}", style=QUIET, soft_wrap=True)
        console.print()
    console.print(results.where(run), style=QUIET)
