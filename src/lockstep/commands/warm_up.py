"""`lockstep warm-up`: fill the caches with the builds of a model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console

from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import Steps, progress

Model = Annotated[
    str | None,
    typer.Argument(help="A model by name, as in 'Llama 3 8B', or a transformers config.json."),
]
Heads = Annotated[int | None, typer.Option(help="Query heads, instead of a model.")]
KvHeads = Annotated[int | None, typer.Option(help="Key heads; as many, if not given.")]
HeadDim = Annotated[int | None, typer.Option(help="Size of a head of queries and keys.")]
ValueDim = Annotated[
    int | None, typer.Option(help="Size of a head of values; the same, if not given.")
]
Window = Annotated[int | None, typer.Option(help="Keys that a row sees, itself one.")]
Softcap = Annotated[float | None, typer.Option(help="A cap on scores.")]
Sinks = Annotated[bool, typer.Option("--sinks", help="With a sink per head.")]
Encoder = Annotated[bool, typer.Option("--encoder", help="Without a causal mask.")]
Cross = Annotated[
    bool, typer.Option("--cross", help="With keys of another sequence, and no causal mask.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="bfloat16, float16, float32 or float64; that of the config.json, or bfloat16, if not "
        "given."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, or one of several, cuda:1; cuda if there is one.")
]
Work = Annotated[str, typer.Option(help="What it will do, joined by commas.")]
Page = Annotated[int, typer.Option(help="Tokens of a page of the cache.")]
Count = Annotated[int | None, typer.Option(help="How many compile at once.")]


def warm_up(
    model: Model = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    window: Window = None,
    softcap: Softcap = None,
    sinks: Sinks = False,
    encoder: Encoder = False,
    cross: Cross = False,
    dtype: Dtype = None,
    device: Device = None,
    work: Work = "prefill,packed,decode,serve,training",
    page: Page = 16,
    processes: Count = None,
    as_json: Json = False,
) -> None:
    """Compile all that a model needs, so that no request waits for a compiler.

    Builds stay on disk for other processes. Exit status 2 for arguments that do not fit, and where
    no kernel runs one of the calls.
    """
    from lockstep.models import Layer

    with ends_with_status_2(ValueError, TypeError, NotImplementedError, OSError, RuntimeError):
        wanted: Any = model
        if (model is None) == (heads is None):
            raise ValueError("takes a model, or --heads and --head-dim")
        if heads is not None:
            if head_dim is None:
                raise ValueError("--heads goes with --head-dim")
            causal = not (encoder or cross)
            seen = None if window is None else (window - 1, 0 if causal else window - 1)
            shape = (heads, kv_heads or heads, head_dim, value_dim or 0, causal, seen)
            wanted = Layer(*shape, softcap=softcap, sinks=sinks, cross=cross)
        works = [name for name in work.split(",") if name]
        found = _with_a_bar(wanted, works, dtype, device=device, page=page, processes=processes)
    if as_json:
        print_json(found._asdict())
    else:
        typer.echo(
            f"{found.builds} builds for {found.calls} kinds of call in {found.seconds:.1f} s"
        )


def _with_a_bar(model: Any, works: Any, dtype: str | None, **options: Any) -> Any:
    """`lockstep.warm_up`, with a progress bar."""
    import torch

    from lockstep import builds

    kind: Any = None if dtype is None else getattr(torch, dtype, dtype)
    with ExitStack() as stack:
        steps: Steps | None = None

        def on_build(name: str, n_builds: int) -> None:
            nonlocal steps
            # Not before: the bar has a thread, and a process with threads is not copied.
            steps = steps or stack.enter_context(progress(Console(stderr=True), n_builds))
            steps.say(name)
            steps.done(of=n_builds)

        return builds.warm_up(model, works=works, dtype=kind, on_build=on_build, **options)
