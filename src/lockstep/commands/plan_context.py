"""The command `lockstep plan context`. What is heavy to import is imported inside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.output.command import USAGE
from lockstep.output.console import BAD, OURS, QUIET, table
from lockstep.output.formats import duration, megabytes

if TYPE_CHECKING:
    from lockstep.distributed.plan import Kernels, Row

UNITS = {"K": 1 << 10, "M": 1 << 20}


def context(
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, as in 8,64,512.")] = "8,64,512",
    seq: Annotated[str, typer.Option(help="Tokens of the sequence: 131072, 128K, 1M.")] = "1M",
    heads: Annotated[str, typer.Option(help="Query heads / key heads.")] = "32/8",
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    gpu: Annotated[str, typer.Option(help="Whose measured rates to take.")] = "h200",
    link: Annotated[
        str, typer.Option(help="GB/s per GPU, within a node of 8 and between nodes.")
    ] = "900,50",
    causal: Annotated[bool, typer.Option("--causal/--full", help="The mask.")] = True,
    balanced: Annotated[
        bool, typer.Option("--balanced/--contiguous", help="How tokens are sharded.")
    ] = True,
    tflops: Annotated[
        str | None,
        typer.Option(
            help="Rates of forward and backward, as in 600,500, instead of measured ones."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a script to read.")
    ] = False,
) -> None:
    """Say what context-parallel attention would take on many GPUs, per method: on paper.

    Memory and bytes are exact, compute goes at the rates measured on one GPU, links are as given,
    and elements have 2 bytes. Times are those of a forward and its backward. Exit status 2 for
    options that do not fit.
    """
    from lockstep.distributed.plan import Links, plan
    from lockstep.distributed.traffic import Shape

    try:
        Hq, Hkv = _numbers("--heads", heads, "/")
        if Hq % Hkv:
            raise ValueError(f"--heads takes a multiple of the key heads, got {heads}")
        S, links = _tokens(seq), Links(*_numbers("--link", link, ","))
        kernels = _rates(gpu, head_dim, causal, tflops)
        counts = [int(n) for n in _numbers("--gpus", gpus, ",", None)]
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", style=BAD, soft_wrap=True)
        raise typer.Exit(USAGE) from None
    rows = []
    for P in counts:
        shape = Shape(batch, int(Hq), int(Hkv), S, head_dim, head_dim, 2, P, balanced)
        rows += plan(shape, causal, kernels, links)
    if as_json:
        rates = {name: x._asdict() for name, x in kernels._asdict().items()}
        found = {"rates": rates, "links": links._asdict()}
        typer.echo(json.dumps(found | {"rows": [row.as_json() for row in rows]}, indent=1))
    else:
        _report(rows, kernels)


def _report(rows: list[Row], kernels: Kernels) -> None:
    console = Console()
    names = ("memory MB", "received MB", "compute", "exposed", "efficiency")
    made = table("GPUs", "method", *names, "", right=("GPUs", *names))
    for row in rows:
        if row.refusal is None:
            made.add_row(
                *(str(row.gpus), row.method, megabytes(row.memory), megabytes(row.received)),
                *(duration(row.compute), duration(row.exposed), f"{row.efficiency:.0%}"),
                "recommended" if row.recommended else "",
                style=OURS if row.recommended else "",
            )
    console.print(made)
    chosen, ring = (f"{x.forward / 1e12:.0f} and {x.backward / 1e12:.0f}" for x in kernels)
    notes = [f"per GPU, forward and backward together, at {chosen} TFLOP/s, a ring at {ring}"]
    notes += [f"{row.gpus} GPUs: {row.method} {row.refusal}" for row in rows if row.refusal]
    for note in notes:
        console.print(note, style=QUIET, highlight=False)


def _rates(gpu: str, D: int, causal: bool, tflops: str | None) -> Kernels:
    from lockstep.distributed.plan import Kernels, Rates, rates_of
    from lockstep.output import results

    if tflops is not None:
        rates = Rates(*(1e12 * x for x in _numbers("--tflops", tflops, ",")))
        return Kernels(rates, rates)
    root = results.checkout()
    every = [] if root is None else results.by_processor("gpu", root / results.RESULTS)
    for runs in every:
        kernels = rates_of(runs, D, causal)
        if gpu.lower() in results.processor(runs[0]).lower() and kernels is not None:
            return kernels
    raise ValueError(
        f"--gpu takes a GPU with results in benchmarks/results for a head dim of {D}, got {gpu!r}: "
        "give rates by --tflops"
    )


def _tokens(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"--seq takes a number of tokens such as 131072, 128K or 1M, got {text!r}")
    return int(digits) * unit


def _numbers(option: str, text: str, between: str, count: int | None = 2) -> list[float]:
    try:
        found = [float(x) for x in text.split(between)]
    except ValueError:
        found = []
    whole = option in ("--heads", "--gpus")
    if (
        not found
        or (count and len(found) != count)
        or any(x <= 0 or (whole and x != int(x)) for x in found)
    ):
        many = "numbers" if count is None else f"{count} numbers"
        raise ValueError(f"{option} takes {many} above 0 with {between!r} between, got {text!r}")
    return found
