"""`lockstep warm-up`: fill the caches with the builds of a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import progress


def warm_up(
    model: Annotated[
        str | None,
        typer.Argument(help="A model by name, as in 'Llama 3 8B', or a transformers config.json."),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads, instead of a model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; as many, if not given.")] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Size of a head of queries and keys.")
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Size of a head of values; the same, if not given.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Keys that a row sees, itself one.")] = None,
    softcap: Annotated[float | None, typer.Option(help="A cap on scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="With a sink per head.")] = False,
    encoder: Annotated[bool, typer.Option("--encoder", help="Without a causal mask.")] = False,
    cross: Annotated[
        bool, typer.Option("--cross", help="With keys of another sequence, and no causal mask.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32 or float64; that of the config.json, or bfloat16, "
            "if not given."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, or one of several, cuda:1; cuda if there is one."),
    ] = None,
    work: Annotated[
        str, typer.Option(help="What it will do, joined by commas.")
    ] = "prefill,packed,decode,training",
    page: Annotated[int, typer.Option(help="Tokens of a page of the cache.")] = 16,
    processes: Annotated[int | None, typer.Option(help="How many compile at once.")] = None,
    as_json: Json = False,
) -> None:
    """Compile all that a model needs, so that no request waits for a compiler.

    Builds stay on disk for other processes. Exit status 2 for arguments that do not fit, and where
    no kernel runs one of the calls.
    """
    import torch

    from lockstep import builds
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
        works: Any = [name for name in work.split(",") if name]
        kind: Any = None if dtype is None else getattr(torch, dtype, dtype)
        with progress(Console(stderr=True)) as steps:

            def on_build(name: str, n_builds: int) -> None:
                steps.say(name)
                steps.done(of=n_builds)

            found = builds.warm_up(
                wanted,
                works=works,
                dtype=kind,
                device=device,
                page=page,
                processes=processes,
                on_build=on_build,
            )
    if as_json:
        print_json(found._asdict())
    else:
        typer.echo(
            f"{found.builds} builds for {found.calls} kinds of call in {found.seconds:.1f} s"
        )
