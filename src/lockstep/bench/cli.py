"""`lockstep bench`. What is heavy to import is imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import BAD, QUIET, progress

app = typer.Typer(help="Time the kernels beside PyTorch and other libraries.", no_args_is_help=True)

ROUNDS, QUICK_ROUNDS = 15, 3


@app.command("cpu")
def cpu_command(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: rougher, sooner.")] = False,
    as_json: Json = False,
    save: Annotated[
        bool, typer.Option("--save", help="Write the result under benchmarks/results.")
    ] = False,
) -> None:
    """Time the CPU path against PyTorch's scaled_dot_product_attention.

    Every case is checked before it is timed, and all contenders take turns within one run. Speed
    is how many times as fast as what a case is held against, and the roof what the cores do in
    multiply-adds alone. Exit status 1 if a result is wrong.
    """
    from lockstep.bench import cpu, show, timing
    from lockstep.kernels.cpu import roof as cpu_roof
    from lockstep.output import results

    rounds = QUICK_ROUNDS if quick else ROUNDS
    # What is printed on the way goes to stderr: stdout is for the table, or for JSON alone.
    aside = Console(stderr=True)
    rows = []
    roof = 0.0
    try:
        with progress(aside, len(cpu.CASES)) as steps:
            for case in cpu.CASES:
                # Clocks change on the way, and other work comes and goes.
                roof = max(roof, cpu_roof.measure() / 1e9)
                steps.say(f"{case.name}, {case.shape}")
                rows.append(cpu.run(case, rounds).as_json())
                steps.done()
    except timing.WrongResult as error:
        aside.print(f"wrong result: {error}", style=BAD)
        raise typer.Exit(1) from None
    run = {**results.collect("cpu", rows), "roof_gflops": round(roof, 1)}
    if as_json:
        print_json(run)
    else:
        console = Console()
        console.print(show.cpu_table(rows, roof))
        goal = "goal: the speed to reach; bold: the one aimed at is reached"
        console.print(f"\n{goal}; roof: {roof:,.0f} GFLOP/s", style=QUIET)
        console.print(results.where(run), style=QUIET)
    if save:
        root = results.checkout() or Path()
        path = results.save(run, root / results.RESULTS)
        aside.print(f"saved {path}", soft_wrap=True)


@app.command("gpu")
def gpu_command(
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="forward, small, backward, decode, varlen, host or host_decode; all, if not given."
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option(help="tables, or models: attention as published models call it.")
    ] = "tables",
    only: Annotated[
        str,
        typer.Option(metavar="PATTERN", help="models: cases with such names: Llama, decode."),
    ] = "",
    kinds: Annotated[
        str, typer.Option(help="models: forward, backward, decode, joined by commas.")
    ] = "",
    seed: Annotated[
        int | None,
        typer.Option(help="models: other heads, head dims and lengths, drawn at random."),
    ] = None,
    sustained: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="models: launch back to back for so long each."),
    ] = None,
    query_invariant: Annotated[
        bool, typer.Option("--query-invariant", help="models: a column with this promise, too.")
    ] = False,
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
    `kernel=` runs. With `--suite models`, the cases are layers of published models in prefill,
    decode and training, Lockstep has one column, and a summary has the geometric mean of its speed
    for each kind of work. The first run compiles for some minutes. Exit status 1 if one of ours
    fails or is wrong, 2 without a CUDA device.
    """
    from lockstep.bench import gpu_run

    only_models = bool(
        only or kinds or seed is not None or sustained is not None or query_invariant
    )
    with ends_with_status_2(ValueError):
        _check_suite(suite, bool(table), only_models)
    if suite == "tables":
        raise typer.Exit(gpu_run.main(table or [], quick=quick, as_json=as_json, save=save))
    from lockstep.bench.models import run

    status = run.main(
        only,
        [kind for kind in kinds.split(",") if kind],
        seed=seed,
        quick=quick,
        query_invariant=query_invariant,
        sustained_seconds=sustained,
        as_json=as_json,
        save=save,
    )
    raise typer.Exit(status)


def _check_suite(suite: str, only_tables: bool, only_models: bool) -> None:
    """Raises ValueError for a suite that is none, and for options of the other one."""
    if suite not in ("tables", "models"):
        raise ValueError(f"--suite takes tables or models, got {suite!r}")
    if suite == "models" and only_tables:
        raise ValueError("--table goes with --suite tables")
    if suite == "tables" and only_models:
        options = "--only, --kinds, --seed, --sustained and --query-invariant"
        raise ValueError(f"{options} go with --suite models")
