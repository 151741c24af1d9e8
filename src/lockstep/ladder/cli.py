"""Commands `trace`, `show`, `plan` and `ladder`: rungs by name, kernels of your own by file.

Functions for a Typer application to mount::

    app.command()(trace)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.command import by_option
from lockstep.simt import cli as simt_cli
from lockstep.simt.cli import Arguments, Html, progress_bar, reported, save_page

if TYPE_CHECKING:
    from .rung import Problem, Rung
    from .survey import Row

# By the field of `Problem` that they set.
OPTIONS = {
    "B": "--batch",
    "H": "--heads",
    "S": "--seq",
    "D": "--head-dim",
    "dtype": "--dtype",
    "length": "--length",
}
RUNG_OR_KERNEL = "A rung, FILE:KERNEL, or the name of a built-in sample"
PROBLEM = "For a rung"
Target = Annotated[str, typer.Argument(metavar="KERNEL", help=RUNG_OR_KERNEL)]
Batch = Annotated[int, typer.Option(min=1, help="Sequences.", rich_help_panel=PROBLEM)]
Heads = Annotated[int, typer.Option(min=1, help="Heads.", rich_help_panel=PROBLEM)]
Seq = Annotated[int, typer.Option(min=1, help="Tokens of a sequence.", rich_help_panel=PROBLEM)]
HeadDim = Annotated[int, typer.Option(help="32, 64 or 128.", rich_help_panel=PROBLEM)]
Causal = Annotated[bool, typer.Option("--causal", help="Mask.", rich_help_panel=PROBLEM)]
Dtype = Annotated[str, typer.Option(help="float16 or bfloat16.", rich_help_panel=PROBLEM)]
Length = Annotated[
    int | None,
    typer.Option(help="Keys that count, a secret of constant-time rungs.", rich_help_panel=PROBLEM),
]
Softmax = Annotated[
    str | None, typer.Option(help="small_tile: sequential or tree.", rich_help_panel=PROBLEM)
]
Tile = Annotated[
    str | None, typer.Option(help="warp_mma, split_kv: such as 64x64.", rich_help_panel=PROBLEM)
]
KvTiles = Annotated[
    str | None, typer.Option(help="split_kv: 1 to 16, or all.", rich_help_panel=PROBLEM)
]
Gpu = Annotated[str, typer.Option(help="T4, A100, RTX 4090, L4, L40S, H100, H200 or B200.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]


def trace(
    target: Target,
    arg: Arguments = [],  # noqa: B006 - Typer reads the default
    grid: Annotated[str, typer.Option(help="Blocks: 8, or 8,4 or 8,4,2.")] = "",
    block: Annotated[str, typer.Option(help="Threads of a block, likewise.")] = "",
    shared: Annotated[int, typer.Option(help="Bytes of dynamic shared memory.")] = 0,
    batch: Batch = 1,
    heads: Heads = 1,
    seq: Seq = 256,
    head_dim: HeadDim = 32,
    causal: Causal = False,
    dtype: Dtype = "float16",
    length: Length = None,
    softmax: Softmax = None,
    tile: Tile = None,
    kv_tiles: KvTiles = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Run a rung of the ladder, or any kernel, on the lockstep machine.

    Prints phases, annotated source and hazards. Exit status 1 if there are hazards or a rung's
    output is wrong, 2 if it cannot be run at all.
    """
    rung = _rung(target)
    if rung is None:
        simt_cli.trace(target, arg, grid, block, shared, as_json, html)
        return
    with reported():
        from .check import errors
        from .rung import run_on_machine

        rung = _chosen(rung, softmax=softmax, tile=tile, kv_tiles=kv_tiles)
        problem = _problem(batch, heads, seq, head_dim, causal, dtype, length)
        tensors = problem.draw()
        with progress_bar() as progress:
            task = progress.add_task(rung.title, total=None)
            _, traces = run_on_machine(
                rung,
                problem,
                tensors,
                lambda done, whole: progress.update(task, completed=done, total=whole),
                record=None if html is None else 0,
            )
        if html is not None:
            save_page(html, traces, f"{rung.title}, {problem}")
    found = errors(problem, tensors)
    if as_json:
        about = {"rung": rung.name, "options": rung.settings, "problem": asdict(problem)}
        about["largest_error"] = {"ours": found.ours, "pytorch": found.theirs, "ok": found.ok}
        _print_json(about | {"traces": [t.to_json() for t in traces]})
    else:
        console = Console(soft_wrap=False)
        for one in traces:
            console.print(one)
        verdict = "right" if found.ok else "[bold red]wrong[/]"
        console.print(
            f"{rung.title}, {problem}: {verdict}, largest error {found.ours:.1e} "
            f"(PyTorch in {problem.dtype} {found.theirs:.1e})"
        )
    raise typer.Exit(1 if not found.ok or any(t.hazards for t in traces) else 0)


def show(
    target: Target,
    arg: Arguments = [],  # noqa: B006 - Typer reads the default
    cuda: Annotated[bool, typer.Option("--cuda", help="The CUDA C++ it stands for.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Machine code by source line.")] = False,
    head_dim: HeadDim = 32,
    causal: Causal = False,
    dtype: Dtype = "float16",
    softmax: Softmax = None,
    tile: Tile = None,
    kv_tiles: KvTiles = None,
) -> None:
    """Print what a rung, or any kernel, becomes: CUDA C++ (the default), or SASS.

    No GPU is needed. Exit status 2 if the kernel cannot be compiled.
    """
    rung = _rung(target)
    if rung is None:
        simt_cli.show(target, arg, cuda, sass)
        return
    with reported():
        from lockstep.simt.sass import show as render

        from .rung import launches_of

        problem = _problem(1, 1, 128, head_dim, causal, dtype)
        wanted = [what for what, on in (("cuda", cuda), ("sass", sass)) if on] or ["cuda"]
        for launch in launches_of(
            _chosen(rung, softmax=softmax, tile=tile, kv_tiles=kv_tiles), problem, problem.draw()
        ):
            for what in wanted:
                typer.echo(render(launch.kernel, what, **launch.arguments))


def plan(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUNG]", help="With its phases; all rungs if left out.")
    ] = None,
    gpu: Gpu = "H200",
    batch: Batch = 2,
    heads: Heads = 16,
    seq: Seq = 1024,
    head_dim: HeadDim = 32,
    causal: Causal = False,
    dtype: Dtype = "float16",
    softmax: Softmax = None,
    tile: Tile = None,
    kv_tiles: KvTiles = None,
    as_json: Json = False,
) -> None:
    """Say in closed form what rungs launch on a GPU, how they fit, and what bounds them.

    Needs no GPU. Exit status 2 if there is no such rung or GPU.
    """
    with reported():
        from . import find
        from .survey import survey

        problem = _problem(batch, heads, seq, head_dim, causal, dtype)
        steps = (
            [_chosen(find(target), softmax=softmax, tile=tile, kv_tiles=kv_tiles)]
            if target
            else _all_steps()
        )
        rows = list(survey(problem, _known(gpu), steps, tracing=False))
    if as_json:
        _print_json(_about(problem, gpu) | {"rows": [row.as_json() for row in rows]})
        return
    from .tables import fit_table, phase_table, work_table

    console = Console()
    console.print(f"{problem} on {_known(gpu)}\n")
    console.print(fit_table(rows))
    console.print()
    console.print(work_table(rows))
    _print_refusals(rows, console)
    if target and rows[0].plan:
        console.print()
        console.print(phase_table(rows[0].plan))


def ladder(
    gpu: Gpu = "H200",
    batch: Batch = 2,
    heads: Heads = 16,
    seq: Seq = 512,
    head_dim: HeadDim = 32,
    causal: Causal = False,
    dtype: Dtype = "float16",
    bench: Annotated[bool, typer.Option(help="Time the rungs if there is a GPU.")] = True,
    as_json: Json = False,
) -> None:
    """Climb the ladder: every rung on one problem, planned, traced, and timed if there is a GPU.

    Exit status 1 if a rung is wrong or has a hazard.
    """
    with reported():
        from lockstep.console import progress

        from .survey import survey

        problem, name = _problem(batch, heads, seq, head_dim, causal, dtype), _known(gpu)
        steps = _all_steps()
        timing = bench and _has_gpu()
        rows = []
        with progress(Console(stderr=True), len(steps)) as bar:
            bar.say(steps[0].title)
            for row in survey(problem, name, steps, timing=timing):
                rows.append(row)
                bar.done()
                bar.say(steps[len(rows)].title if len(rows) < len(steps) else "")
    if as_json:
        _print_json(_about(problem, gpu) | {"rows": [row.as_json() for row in rows]})
    else:
        from .tables import ladder_table

        console = Console()
        console.print(f"{problem}, planned for {name}\n")
        console.print(ladder_table(rows, timing))
        _print_refusals(rows, console)
        console.print(f"\n{LEGEND}", style="dim")
    counted = [row.counted for row in rows if row.counted]
    raise typer.Exit(1 if any(c.hazards or not c.right for c in counted) else 0)


LEGEND = (
    "Plan: blocks, KB of shared memory of a block, occupancy. Trace, of one head: depth, the warp "
    "instructions one after the other in the longest block; lanes active of 32; wavefronts lost to "
    "bank conflicts; barriers that a block passes. MB moved to and from global memory are those of "
    "one head times the number of heads. ct: constant-time."
)


def _problem(*sizes: Any) -> Problem:
    from .rung import Problem

    try:
        return Problem(*sizes)
    except (ValueError, TypeError) as error:
        raise type(error)(by_option(error, OPTIONS)) from None


def _rung(name: str) -> Rung | None:
    from . import RUNGS

    return next((rung for rung in RUNGS if rung.name == name), None)


def _all_steps() -> list[Rung]:
    from . import RUNGS

    return [step for rung in RUNGS for step in rung.steps()]


def _chosen(rung: Rung, **options: str | None) -> Rung:
    """The rung with the options that were given. Raises ValueError for those it does not take."""
    chosen: dict[str, Any] = {}
    for name, text in options.items():
        if text is not None:
            by_text = {str(value): value for value in rung.options.get(name, ())}
            chosen[name] = by_text.get(text, text)
    return rung.choose(**chosen)


def _print_refusals(rows: list[Row], console: Console) -> None:
    for row in rows:
        if row.why_not:
            console.print(f"\n{row.why_not}", style="yellow")


def _known(gpu: str) -> str:
    from .plan import gpu_named

    return gpu_named(gpu)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _about(problem: Problem, gpu: str) -> dict[str, Any]:
    return {"problem": asdict(problem), "gpu": _known(gpu)}


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))
