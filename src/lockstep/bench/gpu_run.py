"""Run the cases of `lockstep bench gpu` and show what came of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.bench import gpu, peers, results, show

WRONG, USAGE = 1, 2


def main(
    tables: Sequence[str],
    *,
    quick: bool = False,
    as_json: bool = False,
    save: bool = False,
    more_peers: Sequence[peers.Peer] = (),
    without: Sequence[str] = (),
    directory: Path | None = None,
) -> int:
    """Time `tables` (all, if empty) and print them; the exit status.

    `more_peers` take part besides those that can be imported, in place of any with their name;
    the peers named in `without` do not.
    """
    # What is printed on the way goes to stderr: stdout is for the tables, or for JSON alone.
    aside = Console(stderr=True)
    unknown = [name for name in tables if name not in gpu.UNITS]
    if unknown:
        takes = ", ".join(gpu.UNITS)
        aside.print(f"error: --table takes {takes}, got {unknown[0]!r}", style=show.BAD)
        return USAGE
    try:
        ours = gpu.kernels()
    except gpu.NoGpu as error:
        aside.print(f"error: {error}", style=show.BAD, soft_wrap=True)
        return USAGE
    left_out = {*without, *(peer.name for peer in more_peers)}
    theirs = [peer for peer in peers.find() if peer.name not in left_out]
    cases = [case for case in gpu.CASES if not tables or case.table in tables]
    rows = []
    with show.progress(aside, len(cases)) as steps:
        for case in cases:
            steps.say(f"{case.table}: {case.name}")
            rows.append(gpu.run(case, ours, [*theirs, *more_peers], quick=quick).as_json())
            steps.done()
    run = results.collect("gpu", rows)
    if as_json:
        print(json.dumps(run, indent=1, ensure_ascii=False))
    else:
        _report(run, Console())
    if save or directory is not None:
        root = results.checkout() or Path()
        path = results.save(run, directory or root / results.RESULTS)
        aside.print(f"saved {path}", soft_wrap=True)
    return WRONG if any(name in row["failed"] for row in rows for name in row["ours"]) else 0


def _report(run: dict[str, Any], console: Console) -> None:
    for name in dict.fromkeys(row["table"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["table"] == name]
        console.print(show.gpu_table(f"{name}, {rows[0]['unit']}", rows))
        for row in rows:
            for contender, reason in row["failed"].items():
                console.print(
                    f"{row['case']}: {contender}: {reason}", style=show.QUIET, soft_wrap=True
                )
        console.print()
    console.print(results.where(run), style=show.QUIET)
