"""The command `lockstep audit timing`. What is heavy to import is imported inside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from lockstep.audit.cli_options import check_device
from lockstep.audit.timing.outcome import Outcome
from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import BAD, NO, QUIET, YES

LAYERS = ("code", "memcheck", "counters", "time")


def timing(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    layer: Annotated[
        str, typer.Option(help="code, memcheck, counters, time, or all that this machine can run.")
    ] = "all",
    samples: Annotated[int, typer.Option(help="Calls timed for each pair of classes.")] = 10_000,
    planted: Annotated[
        bool, typer.Option("--planted", help="Audit kernels with planted leaks: all must be found.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test that kernels keep constant time where a call asks for it.

    Layer `code` follows secrets through machine code, `memcheck` through CPU kernels that run under
    Valgrind; `counters` compares what is executed and accessed, and `time` how long calls take, on
    fixed and on random secrets. Exit status 1 if a secret shows, with the place; with --planted, if
    a leak is not found.
    """
    with ends_with_status_2(ValueError):
        check_device(device, indexed=False, needed=layer != "code")
        if layer not in (*LAYERS, "all"):
            raise ValueError(f"--layer takes {', '.join(LAYERS)} or all, got {layer!r}")
        if samples < 1000:
            raise ValueError(f"--samples takes 1000 or more, got {samples}")
    outcomes = _audit(device, LAYERS if layer == "all" else (layer,), samples, planted)
    ok = all(outcome.ok for outcome in outcomes)
    if as_json:
        print_json({"ok": ok, "device": device, "outcomes": [asdict(x) for x in outcomes]})
    else:
        _report(outcomes, Console())
    raise typer.Exit(0 if ok else 1)


def _audit(device: str, layers: tuple[str, ...], samples: int, planted: bool) -> list[Outcome]:
    if device == "cpu":
        from lockstep.audit.timing import cpu_layers as of
    else:
        from lockstep.audit.timing import gpu_layers as of  # type: ignore[no-redef]
    outcomes: list[Outcome] = []
    if "code" in layers:
        outcomes += of.audit_code(planted)
    if "memcheck" in layers:
        outcomes += of.audit_memcheck(planted)
    if "counters" in layers:
        outcomes += of.audit_counters(planted)
    if "time" in layers:
        outcomes += of.audit_time(samples, planted)
    return outcomes


def _report(outcomes: list[Outcome], console: Console) -> None:
    for outcome in outcomes:
        sign = Text("–", QUIET) if outcome.skipped else YES if outcome.ok else NO
        style = QUIET if outcome.ok else BAD
        line = Text.assemble(sign, f" {outcome.layer}  {outcome.name}  ", (outcome.detail, style))
        console.print(line, soft_wrap=True)
