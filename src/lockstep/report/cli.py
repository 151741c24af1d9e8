"""`lockstep report`, and the page of `lockstep trace --html`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.output import console, results
from lockstep.output.command import check_writable

from . import GPU

if TYPE_CHECKING:
    from lockstep.simt.machine import Trace
    from lockstep.simt.occupancy import Occupancy


def report(
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path(
        "lockstep-report.html"
    ),
    results_dir: Annotated[
        Path | None,
        typer.Option("--results", help="Measured results; those of this checkout, if not given."),
    ] = None,
    audit: Annotated[
        list[Path] | None,
        typer.Option(help="What `lockstep audit bits --json` printed; may be given again."),
    ] = None,
    data_from: Annotated[
        Path | None, typer.Option("--from", help="Data that --data saved: nothing is traced.")
    ] = None,
    data_to: Annotated[
        Path | None, typer.Option("--data", help="Also save the data of the page as JSON.")
    ] = None,
) -> None:
    """Write one HTML page: the climb, a roofline, every rung line by line, claims, peers.

    Traces every rung on the lockstep machine, which takes a minute or two; times come from results
    files. The page needs no network. Exit status 2 for files that cannot be read or written.
    """
    from .page import page

    aside = Console(stderr=True)
    try:
        for option, path in (("--out", out), ("--data", data_to)):
            if path is not None:
                check_writable(option, path)
        data = _read(data_from) if data_from else _fresh(results_dir, audit or [], aside)
        if data_to:
            data_to.write_text(json.dumps(data), encoding="utf-8")
        out.write_text(page(data, "Lockstep: the ladder"), encoding="utf-8")
    except (OSError, ValueError) as error:
        aside.print(f"error: {error}", style=console.BAD, soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    aside.print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def _fresh(directory: Path | None, audits: Sequence[Path], aside: Console) -> dict:
    from .collect import collect, tasks

    if directory is None:
        root = results.checkout()
        directory = root / results.RESULTS if root else None
    elif not directory.is_dir():
        raise ValueError(f"--results takes a directory, got '{directory}'")
    with console.progress(aside, len(tasks())) as steps:
        steps.say("tracing")

        def told(what: str) -> None:
            steps.done()
            steps.say(what)

        return collect(directory, audits, told)


def _read(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--from takes JSON that --data saved, got '{path}': {error}") from None
    if not isinstance(data, dict) or data.get("kind") != "ladder":
        raise ValueError(f"--from takes JSON that --data saved, got '{path}'")
    return data


def _fit(trace: Trace) -> Occupancy | None:
    """Occupancy on `GPU`, registers left out; None for a block that it cannot run."""
    from lockstep.simt.occupancy import fit

    shared = trace.static_shared_bytes + trace.dynamic_shared_bytes
    try:
        return fit(GPU, math.prod(trace.block), 0, shared)
    except ValueError:
        return None


def write_kernels(path: Path, traces: Sequence[Trace], title: str) -> None:
    """The page of the launches of a call, each traced with a record of a block.

    Raises OSError where the file cannot be written.
    """
    from .collect import about
    from .kernel_view import kernel_view
    from .page import page
    from .tile_steps import kernel_steps

    sources: dict = {}
    launches = [kernel_view(trace, sources, _fit(trace)) for trace in traces]
    rung = {"rung": title, "title": title, "summary": "", "why_not": "", "launches": launches}
    steps = [kernel_steps(trace) for trace in traces]
    data = {
        "kind": "kernel",
        **about(),
        "rungs": [rung],
        "sources": sources,
        "steps": [step for step in steps if step["arrays"]],
    }
    path.write_text(page(data, f"Lockstep: {title}"), encoding="utf-8")
