"""Commands `trace`, `show`, `plan` and `ladder`: rungs by name, kernels of your own by file.

Functions for a Typer application to mount::

    app.command()(trace)
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.output.command import Json, errors_by_option, print_json
from lockstep.simt import cli as simt_cli
from lockstep.simt.cli import Arguments, Html, UsageError, reported, save_page

from .tracing import compare, traced

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
    "kv_heads": "--kv-heads",
}
PROBLEM = "For a rung"
Target = Annotated[str, typer.Argument(metavar="KERNEL", help="A rung, FILE:KERNEL or a sample")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences.", rich_help_panel=PROBLEM)]
Heads = Annotated[int, typer.Option(min=1, help="Heads.", rich_help_panel=PROBLEM)]
Seq = Annotated[int, typer.Option(min=1, help="Tokens of a sequence.", rich_help_panel=PROBLEM)]
HeadDim = Annotated[int, typer.Option(help="32, 64 or 128.", rich_help_panel=PROBLEM)]
Causal = Annotated[
    bool, typer.Option("--causal", help="With a causal mask.", rich_help_panel=PROBLEM)
]
Dtype = Annotated[str, typer.Option(help="float16 or bfloat16.", rich_help_panel=PROBLEM)]
Length = Annotated[
    int | None,
    typer.Option(help="Keys that count, a secret of constant-time rungs.", rich_help_panel=PROBLEM),
]
Softmax = Annotated[
    str | None,
    typer.Option(
        help="small_tile: sequential, row_shared, row_tree or tree.", rich_help_panel=PROBLEM
    ),
]
Tile = Annotated[
    str | None, typer.Option(help="warp_mma, split_kv: such as 64x64.", rich_help_panel=PROBLEM)
]
KvTiles = Annotated[
    str | None, typer.Option(help="split_kv: 1 to 16, or all.", rich_help_panel=PROBLEM)
]
KvHeads = Annotated[
    int | None,
    typer.Option(help="split_kv: heads of keys, a divisor of --heads.", rich_help_panel=PROBLEM),
]
Join = Annotated[
    str | None, typer.Option(help="split_kv: kernel or last_block.", rich_help_panel=PROBLEM)
]
Products = Annotated[
    str | None, typer.Option(help="split_kv: fma or mma.", rich_help_panel=PROBLEM)
]
Programs = Annotated[
    str | None, typer.Option(help="persistent_mma: how many blocks.", rich_help_panel=PROBLEM)
]
Stage = Annotated[
    str | None,
    typer.Option(
        help="block_tile: one_thread, double_buffer, two_threads or register_tiles.",
        rich_help_panel=PROBLEM,
    ),
]
Gpus = Annotated[
    str, typer.Option(help="T4, A100, RTX4090, L4, L40S, H100, H200 or B200; several by commas.")
]
Gpu = Annotated[str, typer.Option(help="T4, A100, RTX 4090, L4, L40S, H100, H200 or B200.")]


def trace(
    context: typer.Context,
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
    kv_heads: KvHeads = None,
    softmax: Softmax = None,
    tile: Tile = None,
    kv_tiles: KvTiles = None,
    stage: Stage = None,
    join: Join = None,
    products: Products = None,
    programs: Programs = None,
    against: Annotated[
        str,
        typer.Option(
            help="Compare with this rung, such as small_tile:softmax=tree.", rich_help_panel=PROBLEM
        ),
    ] = "",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Run a rung of the ladder, or any kernel, on the lockstep machine.

    Prints phases, annotated source and hazards; with --against, the counts of two rungs side by
    side. Options of a rung may be part of its name: small_tile:softmax=tree. Exit status 1 if there
    are hazards or a rung's output is wrong, 2 if it cannot be run at all.
    """
    with reported():
        rung = rung_named(target)
    if rung is None:
        with reported():
            _check_known(target)
        simt_cli.trace(context, target, arg, grid, block, shared, as_json, html)
        return
    with reported():
        rung = chosen(
            rung,
            softmax=softmax,
            tile=tile,
            kv_tiles=kv_tiles,
            stage=stage,
            join=join,
            products=products,
            programs=programs,
        )
        problem = problem_of(batch, heads, seq, head_dim, causal, dtype, length, kv_heads)
        if against:
            from . import find

            other = rung_named(against) or find(against)
            compare((rung, other), problem, as_json)
        traces, found = traced(rung, problem, record=None if html is None else 0)
        if html is not None:
            save_page(context.obj, html, traces, f"{rung.title}, {problem}")
    if as_json:
        about = {"rung": rung.name, "options": rung.settings, "problem": asdict(problem)}
        about["largest_error"] = {"ours": found.ours, "pytorch": found.theirs, "ok": found.ok}
        print_json(about | {"traces": [t.to_json() for t in traces]})
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
    stage: Stage = None,
    join: Join = None,
    products: Products = None,
    programs: Programs = None,
) -> None:
    """Print what a rung, or any kernel, becomes: CUDA C++ (the default), or SASS.

    No GPU is needed. Exit status 2 if the kernel cannot be compiled.
    """
    with reported():
        rung = rung_named(target)
    if rung is None:
        with reported():
            _check_known(target)
        simt_cli.show(target, arg, cuda, sass)
        return
    with reported():
        from lockstep.simt.sass import show as render

        from .rung import launches_of

        problem = problem_of(1, 1, 128, head_dim, causal, dtype)
        wanted = [what for what, on in (("cuda", cuda), ("sass", sass)) if on] or ["cuda"]
        rung = chosen(
            rung,
            softmax=softmax,
            tile=tile,
            kv_tiles=kv_tiles,
            stage=stage,
            join=join,
            products=products,
            programs=programs,
        )
        for launch in launches_of(rung, problem, problem.draw()):
            for what in wanted:
                typer.echo(render(launch.kernel, what, **launch.arguments))


def plan(
    target: Annotated[
        str | None, typer.Argument(metavar="RUNG", help="With its phases; all rungs if left out.")
    ] = None,
    gpu: Gpus = "H200",
    batch: Batch = 2,
    heads: Heads = 16,
    seq: Seq = 1024,
    head_dim: HeadDim = 32,
    causal: Causal = False,
    dtype: Dtype = "float16",
    kv_heads: KvHeads = None,
    softmax: Softmax = None,
    tile: Tile = None,
    kv_tiles: KvTiles = None,
    stage: Stage = None,
    join: Join = None,
    products: Products = None,
    programs: Programs = None,
    as_json: Json = False,
) -> None:
    """Say in closed form what rungs launch on a GPU, how they fit, and what bounds them.

    Needs no GPU. Several GPUs, as in --gpu a100,h200,l40s, stand side by side. Exit status 2 if
    there is no such rung or GPU, or none of the GPUs can run the rung.
    """
    with reported():
        from . import find
        from .survey import survey

        problem = problem_of(batch, heads, seq, head_dim, causal, dtype, None, kv_heads)
        names = [known(name) for name in gpu.split(",")]
        steps = _all_steps()
        if target:
            rung = rung_named(target) or find(target)
            options = {
                "softmax": softmax,
                "tile": tile,
                "kv_tiles": kv_tiles,
                "stage": stage,
                "join": join,
                "products": products,
                "programs": programs,
            }
            steps = [chosen(rung, **options)]
        rows = [row for n in names for row in survey(problem, n, steps, tracing=False)]
        planned = any(row.plan for row in rows)
        if not planned and not as_json:
            raise ValueError("\n".join(dict.fromkeys(row.why_not for row in rows)))
    if as_json:
        print_json(_about(problem, ",".join(names)) | {"rows": [row.as_json() for row in rows]})
    else:
        from .plan_screen import print_plans

        print_plans(problem, names, rows, phases=bool(target))
    raise typer.Exit(0 if planned else 2)


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
        from lockstep.output.console import progress

        from .survey import survey

        problem, name = problem_of(batch, heads, seq, head_dim, causal, dtype), known(gpu)
        steps = _all_steps()
        timing = bench and has_gpu()
        rows = []
        with progress(Console(stderr=True), len(steps)) as bar:
            bar.say(steps[0].title)
            for row in survey(problem, name, steps, timing=timing):
                rows.append(row)
                bar.done()
                bar.say(steps[len(rows)].title if len(rows) < len(steps) else "")
    if as_json:
        print_json(_about(problem, gpu) | {"rows": [row.as_json() for row in rows]})
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
    "instructions one after the other in the longest block; lanes active of 32; MB moved to and "
    "from global memory, those of one head times the number of heads; wavefronts lost to bank "
    "conflicts; bar, barriers that a block passes; wb, those that a warp passes by itself. ct: "
    "constant-time."
)


def problem_of(*sizes: Any) -> Problem:
    from .rung import Problem

    with errors_by_option(OPTIONS):
        return Problem(*sizes)


def rung_named(text: str) -> Rung | None:
    """The rung that `NAME` or `NAME:OPTION=VALUE,...` stands for; None if there is none."""
    from . import RUNGS

    name, _, options = text.partition(":")
    found = next((rung for rung in RUNGS if rung.name == name), None)
    if found is None or not options:
        return found
    pairs = [option.partition("=") for option in options.split(",")]
    return chosen(found, **{key.replace("-", "_"): value for key, _, value in pairs})


def _check_known(target: str) -> None:
    """Raise UsageError with the rungs and samples there are, if `target` is none of them."""
    from lockstep.simt.samples import SAMPLES

    from . import RUNGS

    if target.rpartition(":")[0].endswith(".py") or target in {s.name for s in SAMPLES}:
        return
    rungs, samples = ("; ".join(x.name for x in of) for of in (RUNGS, SAMPLES))
    raise UsageError(
        f"'{target}' is neither a rung nor FILE.py:KERNEL nor a sample\n  rungs: {rungs}\n"
        f"  samples: {samples}"
    )


def _all_steps() -> list[Rung]:
    from . import RUNGS

    return [step for rung in RUNGS for step in rung.steps()]


def chosen(rung: Rung, **options: str | None) -> Rung:
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


def known(gpu: str) -> str:
    """The GPU's name as tables write it. Raises ValueError for one that is not known."""
    from .plan import gpu_named

    with errors_by_option({"gpu": "--gpu"}):
        return gpu_named(gpu)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _about(problem: Problem, gpu: str) -> dict[str, Any]:
    return {"problem": asdict(problem), "gpu": gpu}
