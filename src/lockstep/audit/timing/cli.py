"""The command `lockstep audit timing`. What is heavy to import is imported inside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lockstep.audit.cli_options import check_device
from lockstep.command import Json, ends_with_status_2, print_json
from lockstep.console import BAD, NO, QUIET, YES

LAYERS = ("code", "time")


@dataclass(frozen=True)
class Outcome:
    """What one layer found in one kernel or one kind of call."""

    layer: str
    name: str
    ok: bool
    detail: str = ""
    skipped: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


def timing(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    layer: Annotated[
        str, typer.Option(help="code, time, or all: machine code of CPU kernels, measured times.")
    ] = "all",
    samples: Annotated[int, typer.Option(help="Calls timed for each pair of classes.")] = 10_000,
    planted: Annotated[
        bool, typer.Option("--planted", help="Audit kernels with planted leaks: all must be found.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test that kernels keep constant time where a call asks for it.

    Layer `code` follows secrets through the machine code of the CPU kernels; layer `time` compares
    the times of calls on fixed and on random secrets. Exit status 1 if a secret shows, with the
    place; with --planted, if a leak is not found.
    """
    with ends_with_status_2(ValueError):
        check_device(device)
        if layer not in (*LAYERS, "all"):
            raise ValueError(f"--layer takes {', '.join(LAYERS)} or all, got {layer!r}")
        if samples < 1000:
            raise ValueError(f"--samples takes 1000 or more, got {samples}")
        if planted and device != "cpu":
            raise ValueError("--planted takes --device cpu")
    outcomes = _audit(device, LAYERS if layer == "all" else (layer,), samples, planted)
    ok = all(outcome.ok for outcome in outcomes)
    if as_json:
        print_json({"ok": ok, "device": device, "outcomes": [asdict(x) for x in outcomes]})
    else:
        _report(outcomes, Console())
    raise typer.Exit(0 if ok else 1)


def _audit(device: str, layers: tuple[str, ...], samples: int, planted: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    if "code" in layers:
        outcomes += _audit_code(device, planted)
    if "time" in layers:
        outcomes += _audit_leak_times(samples) if planted else _audit_times(device, samples)
    return outcomes


def _audit_code(device: str, planted: bool) -> list[Outcome]:
    from lockstep.audit.timing import code
    from lockstep.audit.timing.leaks import LEAKS
    from lockstep.kernels.cpu.kernels import constant_time_kernels

    if device != "cpu":
        return [Outcome("code", "GPU kernels", True, "audits the CPU kernels", skipped=True)]
    if not code.is_supported():
        return [Outcome("code", "CPU kernels", True, "reads aarch64 only so far", skipped=True)]
    outcomes = []
    if planted:
        for name, leak in LEAKS.items():
            if leak.steps_differ:
                found = code.audit(leak.kernel)
                detail = str(found[0]) if found else "not found"
                outcomes.append(Outcome("code", name, bool(found), detail))
        return outcomes
    for kernel in constant_time_kernels():
        found = code.audit(kernel)
        detail = "; ".join(map(str, found[:3]))
        outcomes.append(Outcome("code", kernel.name, not found, detail))
    return outcomes


def _audit_times(device: str, samples: int) -> list[Outcome]:
    from functools import partial

    from lockstep.audit.timing import clock
    from lockstep.audit.timing.secrets import CASES, CLASSES, fixed

    outcomes = []
    for case in CASES:
        for name in CLASSES:
            if name == "random":
                continue
            draw = partial(case.draw, device=device)
            times = clock.compare(case.run, draw, partial(fixed, name), samples)
            label = f"{case.name}: {name} against random"
            outcomes.append(_outcome(label, times, found=False))
    return outcomes


def _audit_leak_times(samples: int) -> list[Outcome]:
    from lockstep.audit.timing import clock
    from lockstep.audit.timing.leaks import LEAKS

    return [
        _outcome(name, clock.compare(leak.run, leak.draw, leak.fix, samples), found=True)
        for name, leak in LEAKS.items()
    ]


def _outcome(label: str, times: Any, *, found: bool) -> Outcome:
    """`found`: whether the classes should differ, and clearly so."""
    from lockstep.audit.timing.clock import CLEAR, LIMIT

    t = times.t()
    ok = abs(t) > CLEAR if found else abs(t) < LIMIT
    figures = {"t": t, "samples": len(times.ns), "course": times.course()}
    return Outcome("time", label, ok, f"t = {t:.1f} after {len(times.ns)} samples", False, figures)


def _report(outcomes: list[Outcome], console: Console) -> None:
    for outcome in outcomes:
        sign = Text("–", QUIET) if outcome.skipped else YES if outcome.ok else NO
        style = QUIET if outcome.ok else BAD
        line = Text.assemble(sign, f" {outcome.layer}  {outcome.name}  ", (outcome.detail, style))
        console.print(line, soft_wrap=True)
