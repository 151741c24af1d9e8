"""Run `lockstep bench gpu --suite models`, print the results and save them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.bench import gpu, gpu_run, gpu_timing
from lockstep.bench.gpu_tables import columns, figure
from lockstep.bench.models import cases, drawn, flash_peers, measure, sustained, torch_peers
from lockstep.bench.models.contender import NAME, Contender, ours
from lockstep.bench.models.summary import DRAWN, SUITE, speed, summarize
from lockstep.output import results
from lockstep.output.command import USAGE, print_json
from lockstep.output.console import BAD, GOOD, QUIET, table


def main(
    only: str = "",
    kinds: Sequence[str] = (),
    *,
    seed: int | None = None,
    quick: bool = False,
    query_invariant: bool = False,
    sustained_seconds: float | None = None,
    as_json: bool = False,
    save: bool = False,
    without: Sequence[str] = (),
    deadline: float | None = None,
    directory: Path | None = None,
) -> int:
    """Time the cases in whose names the regular expression `only` occurs; the exit status.

    With a `seed`, cases are drawn at random. Peers are those that can be imported or have been
    loaded, less those named in `without`. Where the run is kept, it is written after every case.
    No case is begun after `deadline`, by `time.perf_counter`.
    """
    aside = Console(stderr=True)
    try:
        wanted = _wanted(only, kinds, sustained_seconds, seed)
        gpu.kernels()
    except (ValueError, gpu.NoGpu) as error:
        aside.print(f"error: {error}", style=BAD, soft_wrap=True)
        return USAGE
    chosen = contenders(query_invariant, without)
    if save:
        directory = directory or (results.checkout() or Path()) / results.RESULTS
    run = results.collect(SUITE if seed is None else DRAWN, [])
    run["seed"] = seed
    run["peers"] = {e.name: e.version for e in chosen if e.kind == "peer"}
    run["rounds"] = gpu_timing.QUICK_ROUNDS if quick else gpu_timing.ROUNDS

    def run_case(case: cases.Case) -> dict[str, Any]:
        if sustained_seconds is not None:
            return sustained.run(case, chosen, sustained_seconds)
        return measure.run(case, chosen, rounds=run["rounds"]).as_json()

    by_name = {case.name: partial(run_case, case) for case in wanted}
    stopped = gpu_run.fill(run, by_name, deadline, directory, aside)
    run["summary"] = summarize(run["rows"])
    if directory is not None:
        aside.print(f"saved {results.save(run, directory)}", soft_wrap=True)
    if as_json:
        print_json(run)
    else:
        _report(run, Console())
    return gpu_run.WRONG if stopped or gpu_run.one_of_ours_failed(run) else 0


def contenders(query_invariant: bool = False, without: Sequence[str] = ()) -> list[Contender]:
    """Lockstep first, then the peers that this process has."""
    found = (*ours(query_invariant), *torch_peers.find(), *flash_peers.find())
    return [contender for contender in found if contender.name not in without]


def _wanted(
    only: str, kinds: Sequence[str], seconds: float | None, seed: int | None
) -> list[cases.Case]:
    unknown = [kind for kind in kinds if kind not in cases.KINDS]
    if unknown:
        raise ValueError(f"--kinds takes {', '.join(cases.KINDS)}, got {unknown[0]!r}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--sustained takes a number of seconds above 0, got {seconds}")
    try:
        found = cases.choose(only, kinds, None if seed is None else drawn.draw(seed))
    except re.error as error:
        raise ValueError(f"--only takes a regular expression, got {only!r}: {error}") from None
    if not found:
        raise ValueError(f"--only takes a part of a case's name, got {only!r}: no case has it")
    return found


def _report(run: dict[str, Any], console: Console) -> None:
    rows = run["rows"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        shown = _table([row for row in rows if row["kind"] == kind])
        # Lines too long for a terminal or a pipe are still better than figures cut short.
        unbounded = console.options.update_width(1000)
        console.width = max(console.width, console.measure(shown, options=unbounded).maximum)
        console.print(shown)
        console.print()
    for row in rows:
        for name, reason in row["failed"].items():
            console.print(f"{row['case']}: {name}: {reason}", style=QUIET, soft_wrap=True)
        for name, found in row.get("sustained", {}).items():
            console.print(f"{row['case']}: {name}: {_conditions(found)}", soft_wrap=True)
    for kind, found in run["summary"]["kinds"].items():
        console.print(
            f"{kind}: {found['mean']:.3f}× the best peer (geometric mean of {found['cases']} "
            f"cases), {found['below']} below 1"
        )
    for worst in run["summary"]["worst"]:
        console.print(f"  {worst['speed']:.2f}× {worst['best_peer']}  {worst['case']}")
    console.print(results.where(run), style=QUIET)


def _table(rows: list[dict[str, Any]]) -> Table:
    names = columns(rows)
    head = f"{rows[0]['kind']}, {rows[0]['unit']}"
    made = table(head, "kernel", *names, "× best peer", right=(*names, "× best peer"))
    for row in rows:
        good = row["speed"].get(NAME, 1.0) >= 1
        cells = [figure(row, name) for name in names]
        made.add_row(
            row["case"], row["chosen"] or "–", *cells, Text(speed(row), GOOD if good else BAD)
        )
    return made


def _conditions(found: dict[str, float]) -> str:
    if not found:
        return "clocks unknown"
    return (
        f"{found['clock_mhz']:.0f} MHz, {found['power_w']:.0f} W, {found['temperature_c']:.0f} °C"
    )
