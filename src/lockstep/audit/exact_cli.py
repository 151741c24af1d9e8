"""The command `lockstep audit exact`. What is heavy to import is imported inside it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from lockstep.audit.cli_options import check_device
from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import BAD, GOOD, OURS, QUIET, table

if TYPE_CHECKING:
    from lockstep.audit.exact import Failure, Summary
    from lockstep.kernels.kernel import Kernel

MINUTES = 1.0


def exact(
    minutes: Annotated[
        float | None,
        typer.Option(help="How long to go on; 1, if neither this nor --problems is given."),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(help="How many problems to draw: the same ones for a seed.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda where there is one, if not given.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="One kernel by name; all that run here, if not given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the same problems again; another each time if not.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw problems of all kinds and check error rule, leaks, bits, memory and bad metadata.

    Goes on until the time is up, until Ctrl-C, or until a check fails: then it prints a program
    that shows the failure. Exit status 1 at a failure, 2 if nothing can run.
    """
    # PyTorch's profiler counts what a call allocates, and would log a line.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with ends_with_status_2(ValueError):
        where, kernels = _prepare(device, kernel, minutes, problems)
    if minutes is None and problems is None:
        minutes = MINUTES
    if seed is None:
        seed = time.time_ns() % 2**31
    summary = _run(kernels, where, seed, minutes, problems, Console(stderr=True))
    if as_json:
        print_json({"device": where, "seed": seed, **summary.as_json()})
    else:
        _report(summary, where, seed, Console())
    raise typer.Exit(0 if summary.ok else 1)


def _prepare(
    device: str | None, name: str | None, minutes: float | None, problems: int | None
) -> tuple[str, list[Kernel]]:
    """The device, and the kernels for it. Raises ValueError for what the options do not take."""
    import torch

    from lockstep.dispatch import KERNELS
    from lockstep.kernels import oracle

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device, indexed=False)
    for option, number in (("--minutes", minutes), ("--problems", problems)):
        if number is not None and not number > 0:
            raise ValueError(f"{option} takes a number above 0, got {number}")
    # The oracle is what the others are compared with.
    names = [k.name for k in KERNELS if k is not oracle.KERNEL]
    if name is not None and name not in names:
        raise ValueError(f"--kernel takes one of {', '.join(names)}, got {name!r}")
    return device, [k for k in KERNELS if k.name in ([name] if name else names)]


def _run(
    kernels: list[Kernel],
    device: str,
    seed: int,
    minutes: float | None,
    problems: int | None,
    aside: Console,
) -> Summary:
    """Run the audit with a counter on the terminal; Ctrl-C ends it early."""
    from lockstep.audit.exact import Summary, audit

    summary = Summary()
    columns = (
        SpinnerColumn(style=OURS),
        TextColumn("{task.completed} problems, seed {task.fields[seed]}", style=QUIET),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=aside, transient=True) as bar:
        task = bar.add_task("", total=problems, seed=seed)
        steps = audit(kernels, device=device, seed=seed, problems=problems, minutes=minutes)
        try:
            for summary in steps:
                bar.update(task, completed=summary.problems)
        except KeyboardInterrupt:
            aside.print("stopped", style=QUIET)
    return summary


def _report(summary: Summary, device: str, seed: int, console: Console) -> None:
    console.print(Text(f"{summary.problems} problems on {device}, seed {seed}", style=QUIET))
    kinds = table("kind", "problems", right=("problems",))
    for kind, n in sorted(summary.kinds.items()):
        kinds.add_row(kind, str(n))
    console.print(kinds)
    checks = table("kernel", "check", "problems", right=("problems",))
    for (kernel, check), n in sorted(summary.checks.items()):
        checks.add_row(kernel, check, str(n))
    console.print(checks)
    shares = table("kernel", "result", "of the error rule", right=("of the error rule",))
    for (kernel, result), share in sorted(summary.shares.items()):
        shares.add_row(kernel, result, f"{share:.0%}")
    console.print(shares)
    if summary.failure is not None:
        _report_failure(summary.failure, console)
    elif summary.checks:
        console.print(Text("Every check holds.", style=GOOD))
    else:
        console.print(Text("No kernel took any of these problems.", style=QUIET))


def _report_failure(failure: Failure, console: Console) -> None:
    console.print(Text(f"{failure.kernel}: {failure.check}: {failure.what}", style=BAD))
    console.print(Text(f"{failure.problem}; this program shows it:\n", style=QUIET))
    # Not wrapped, so that it can be copied.
    console.print(failure.snippet, soft_wrap=True, highlight=False, markup=False)
