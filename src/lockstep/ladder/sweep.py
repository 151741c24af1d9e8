"""Command `sweep`: one rung over values of its options and of the problem, side by side.

A function for a Typer application to mount::

    app.command()(sweep)
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.output.command import Json, print_json
from lockstep.output.console import progress
from lockstep.simt.cli import UsageError, reported

from .cli import LEGEND, chosen, has_gpu, known, problem_of, rung_named

if TYPE_CHECKING:
    from .rung import Problem, Rung
    from .survey import Row

LIST = "One value, or several by commas."
Values = Annotated[str, typer.Option(help=LIST)]
Option = Annotated[str | None, typer.Option(help=LIST, rich_help_panel="Options of rungs")]


def sweep(
    target: Annotated[str, typer.Argument(metavar="RUNG")],
    seq: Values = "512",
    head_dim: Values = "32",
    batch: Values = "1",
    heads: Values = "1",
    softmax: Option = None,
    tile: Option = None,
    kv_tiles: Option = None,
    stage: Option = None,
    join: Option = None,
    products: Option = None,
    programs: Option = None,
    gpu: Values = "H200",
    causal: Annotated[bool, typer.Option("--causal", help="With a causal mask.")] = False,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    trace: Annotated[bool, typer.Option(help="Run one head on the machine.")] = True,
    bench: Annotated[bool, typer.Option(help="Time it if there is a GPU.")] = True,
    as_json: Json = False,
) -> None:
    """Plan, trace and, where there is a GPU, time a rung for every combination of values.

    lockstep sweep split_kv --kv-tiles 1,2,4,8,16 --seq 1024

    Exit status 1 if a run is wrong or has a hazard, 2 for a value that the rung does not take.
    """
    with reported():
        from . import find

        base = rung_named(target) or find(target)
        options = {
            "softmax": softmax,
            "tile": tile,
            "kv_tiles": kv_tiles,
            "stage": stage,
            "join": join,
            "products": products,
            "programs": programs,
        }
        rungs = _variants(base, {name: text for name, text in options.items() if text is not None})
        sizes = (
            _numbers(text, name)
            for text, name in (
                (batch, "--batch"),
                (heads, "--heads"),
                (seq, "--seq"),
                (head_dim, "--head-dim"),
            )
        )
        problems = [problem_of(*size, causal, dtype) for size in product(*sizes)]
        gpus = [known(name) for name in gpu.split(",")]
        rows = _rows(list(product(problems, gpus, rungs)), trace, bench and has_gpu())
    if as_json:
        print_json([{"problem": str(r.problem), "gpu": g, **r.as_json()} for g, r in rows])
    else:
        _print(rows)
    counted = [row.counted for _, row in rows if row.counted]
    raise typer.Exit(1 if any(c.hazards or not c.right for c in counted) else 0)


def _variants(base: Rung, options: dict[str, str]) -> list[Rung]:
    """The rung with every combination of values. Raises ValueError for one it does not take."""
    lists = [text.split(",") for text in options.values()]
    return [chosen(base, **dict(zip(options, values, strict=True))) for values in product(*lists)]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes numbers separated by commas, got '{text}'") from None


def _rows(
    points: list[tuple[Problem, str, Rung]], tracing: bool, timing: bool
) -> list[tuple[str, Row]]:
    """One row per point, with its GPU; what does not depend on the GPU is done once."""
    from .survey import survey

    rows: list[tuple[str, Row]] = []
    counted: dict[Any, Any] = {}
    with progress(Console(stderr=True), len(points)) as bar:
        for problem, gpu, rung in points:
            bar.say(f"{rung.title}, {problem}")
            key = (rung.title, problem)
            (row,) = survey(problem, gpu, [rung], tracing and key not in counted, timing)
            counted.setdefault(key, row.counted)
            rows.append((gpu, row.with_counted(counted[key])))
            bar.done()
    return rows


def _print(rows: list[tuple[str, Row]]) -> None:
    """One line per row; what all of them have in common stands above."""
    from .tables import ladder_table

    console = Console()
    kept = [row for _, row in rows]
    # sizes, dtype and mask of each, word by word, and its GPU
    words = {id(row): (*str(row.problem).split(), gpu) for gpu, row in rows}
    varies = [len(set(column)) > 1 for column in zip(*words.values(), strict=True)]

    def title(row: Row) -> str:
        own = [word for word, differs in zip(words[id(row)], varies, strict=True) if differs]
        return ", ".join([row.rung.title, *([" ".join(own)] if own else [])])

    first = words[id(kept[0])]
    shared = [word for word, differs in zip(first[:-1], varies, strict=False) if not differs]
    console.print(" ".join(shared) + f", planned for {first[-1]}" * (not varies[-1]) + "\n")
    if any(row.plan for row in kept):
        console.print(ladder_table(kept, any(row.microseconds for row in kept), title))
    for refusal in dict.fromkeys(row.why_not for row in kept if row.why_not):
        console.print(refusal, style="yellow")
    console.print(f"\n{LEGEND}", style="dim")
