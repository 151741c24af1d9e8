"""The `lockstep` command. What is heavy to import is imported inside the commands that need it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lockstep.audit import cli as audit_cli
from lockstep.command import Commands
from lockstep.ladder import cli as ladder_cli
from lockstep.ladder import sweep as ladder_sweep
from lockstep.ladder.claims import cli as claims_cli
from lockstep.report import cli as report_cli
from lockstep.simt import cli as simt_cli

app = typer.Typer(
    name="lockstep",
    cls=Commands,
    help="Exact attention for PyTorch: fast, bitwise reproducible, see-through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Time the kernels against PyTorch.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(audit_cli.app, name="audit")

DISTRIBUTION = "lockstep-attention"
ROUNDS, QUICK_ROUNDS = 15, 3

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def demo() -> None:
    """Show on this machine that attention is exact, bitwise reproducible and fast.

    Takes less than a minute. Exit status 1 if a check fails.
    """
    from lockstep import demo

    raise typer.Exit(0 if demo.run(Console()) else 1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what hardware, versions and kernels are here, and why a kernel cannot run."""
    from lockstep import doctor

    facts = doctor.examine()
    if as_json:
        _print_json(facts)
    else:
        doctor.report(facts, Console())


@bench.command("cpu")
def bench_cpu(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: rougher, sooner.")] = False,
    as_json: Json = False,
    save: Annotated[
        bool, typer.Option("--save", help="Write the result under benchmarks/results.")
    ] = False,
) -> None:
    """Time the CPU path against PyTorch's scaled_dot_product_attention.

    Every case is checked before it is timed, and all contenders take turns within one run. Speed
    is how many times as fast as what a case is held against. Exit status 1 if a result is wrong.
    """
    from lockstep import results
    from lockstep.bench import cpu, show, timing
    from lockstep.console import BAD, QUIET, progress

    rounds = QUICK_ROUNDS if quick else ROUNDS
    # What is printed on the way goes to stderr: stdout is for the table, or for JSON alone.
    aside = Console(stderr=True)
    rows = []
    try:
        with progress(aside, len(cpu.CASES)) as steps:
            for case in cpu.CASES:
                steps.say(f"{case.name}, {case.shape}")
                rows.append(cpu.run(case, rounds).as_json())
                steps.done()
    except timing.WrongResult as error:
        aside.print(f"wrong result: {error}", style=BAD)
        raise typer.Exit(1) from None
    run = results.collect("cpu", rows)
    if as_json:
        _print_json(run)
    else:
        console = Console()
        console.print(show.cpu_table(rows))
        console.print("\ngoal: the speed it must reach / the speed it aims at", style=QUIET)
        console.print(results.where(run), style=QUIET)
    if save:
        root = results.checkout() or Path()
        path = results.save(run, root / results.RESULTS)
        aside.print(f"saved {path}", soft_wrap=True)


@bench.command("gpu")
def bench_gpu(
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="forward, small, backward, decode, varlen, host or host_decode; all, if not given."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: rougher, sooner.")] = False,
    as_json: Json = False,
    save: Annotated[
        bool,
        typer.Option("--save", help="Write the result under benchmarks/results, case by case."),
    ] = False,
) -> None:
    """Time the GPU kernels beside FlashAttention, cuDNN and flex_attention, all in one run.

    Every result is checked by the error rule before it is timed, and all contenders take turns.
    Each kernel of Lockstep has a column of its own; `chosen` names the one that a call without
    `kernel=` runs. The first run compiles for some minutes. Exit status 1 if one of ours fails or
    is wrong, 2 without a CUDA device.
    """
    from lockstep.bench import gpu_run

    raise typer.Exit(gpu_run.main(table or [], quick=quick, as_json=as_json, save=save))


app.command()(ladder_cli.ladder)
app.command()(ladder_cli.plan)
app.command()(ladder_sweep.sweep)
app.command()(claims_cli.claims)
app.command()(ladder_cli.trace)
app.command()(ladder_cli.show)
app.command()(report_cli.report)
simt_cli.write_page = report_cli.write_kernels


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


if __name__ == "__main__":
    app()
