"""Commands `trace` and `show`: a kernel named on the command line, run or translated.

Functions for a Typer application to mount::

    app.command()(trace)
    app.command()(show)
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lockstep.output.command import Json, check_writable, ends_with_status_2, print_json

from .errors import SimtError
from .kernel import Kernel
from .types import ArrayType, Scalar, bfloat16, scalar_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .machine import Trace
    from .samples import Sample

    # Writes the page of --html: file, traces with a record of a block, title. The application that
    # mounts `trace` hands it over as the object of the command's context.
    WritePage = Callable[[Path, Sequence[Trace], str], None]

NAMED = "FILE:KERNEL, or the name of a built-in sample"
ARGUMENTS = (
    "NAME=VALUE for a number, a constant or a type; NAME=64x32 or NAME=float16:64x32 for an array "
    "of that shape (floats are drawn at random, integers are zero); NAME=@file.npy for a given one."
)
Target = Annotated[str, typer.Argument(metavar="KERNEL", help=NAMED)]
Arguments = Annotated[list[str], typer.Option("--arg", "-a", help=ARGUMENTS)]


class UsageError(SimtError, ValueError):
    """The command line does not describe a launch."""


def _check_html(context: typer.Context, path: Path | None) -> Path | None:
    """Ends the command before it traces anything if the page of `--html` cannot be written."""
    if path is not None:
        with reported():
            if context.obj is None:
                raise UsageError("--html is an option of the `lockstep` command")
            check_writable("--html", path)
    return path


Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        callback=_check_html,
        help="Also write a page with pictures of block 0.",
    ),
]


def trace(
    context: typer.Context,
    target: Target,
    arg: Arguments = [],  # noqa: B006 - Typer reads the default
    grid: Annotated[str, typer.Option(help="Blocks: 8, or 8,4 or 8,4,2.")] = "",
    block: Annotated[str, typer.Option(help="Threads of a block, likewise.")] = "",
    shared: Annotated[int, typer.Option(help="Bytes of dynamic shared memory.")] = 0,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Run a kernel on the lockstep machine; print phases, annotated source and hazards.

    Exit status 1 if there are hazards, 2 if the kernel cannot be run at all.
    """
    with reported():
        kernel, sample = find(target)
        if sample is not None and not arg:
            arguments = sample.arguments()
            launch = sample.grid, sample.block, sample.dynamic_bytes
        else:
            arguments = parse(kernel, arg)
            launch = _extent(grid, "--grid"), _extent(block, "--block"), shared
        configured = kernel[launch]
        with progress_bar() as progress:
            task = progress.add_task(kernel.__name__, total=None)
            result = configured.trace(
                **arguments,
                progress=lambda done, whole: progress.update(task, completed=done, total=whole),
                record=None if html is None else 0,
            )
        if html is not None:
            save_page(context.obj, html, [result], kernel.__name__)
    if as_json:
        print_json(result.to_json())
    else:
        Console(soft_wrap=False).print(result)
    raise typer.Exit(1 if result.hazards else 0)


def show(
    target: Target,
    arg: Arguments = [],  # noqa: B006 - Typer reads the default
    cuda: Annotated[bool, typer.Option("--cuda", help="The CUDA C++ it stands for.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Machine code by source line.")] = False,
) -> None:
    """Print what a kernel becomes: CUDA C++ (the default), or SASS. No GPU is needed.

    Exit status 2 if the kernel cannot be compiled.
    """
    with reported():
        from .sass import show as render

        kernel, sample = find(target)
        arguments = sample.arguments() if sample is not None and not arg else parse(kernel, arg)
        wanted = [what for what, on in (("cuda", cuda), ("sass", sass)) if on] or ["cuda"]
        for what in wanted:
            typer.echo(render(kernel, what, **arguments))


def save_page(write_page: WritePage, path: Path, traces: Sequence[Trace], title: str) -> None:
    """Write the page of `--html`. Raises UsageError where that is not possible."""
    try:
        write_page(path, traces, title)
    except OSError as error:
        raise UsageError(f"--html takes a file that can be written: {error}") from None


def reported() -> AbstractContextManager[None]:
    """Turns what is wrong with a kernel or a launch into a message and exit status 2."""
    return ends_with_status_2(SimtError, ValueError, TypeError)


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def find(target: str) -> tuple[Kernel, Sample | None]:
    """The kernel a name stands for, with its ready launch if it is a built-in sample.

    Raises `UsageError` naming what there is to choose from.
    """
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), name), None
    from .samples import SAMPLES

    for sample in SAMPLES:
        if sample.name == target:
            return sample.kernel, sample
    known = "\n  ".join(s.name for s in SAMPLES)
    raise UsageError(f"'{target}' is neither FILE.py:KERNEL nor one of the samples\n  {known}")


def _from_file(path: Path, name: str) -> Kernel:
    if not path.is_file():
        raise UsageError(f"there is no file '{path}'")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours, as a script would
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no part of what the command prints
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    kernels = {n: k for n, k in vars(module).items() if isinstance(k, Kernel)}
    if name not in kernels:
        raise UsageError(f"'{path}' has no kernel '{name}'; it has {', '.join(kernels) or 'none'}")
    return kernels[name]


def _extent(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes sizes such as 8 or 8,4, got '{text}'") from None


def parse(kernel: Kernel, texts: list[str]) -> dict[str, Any]:
    """Arguments from NAME=VALUE texts; parameters with defaults may be left out."""
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in kernel.annotations:
            known = ", ".join(kernel.annotations)
            raise UsageError(f"--arg takes NAME=VALUE with NAME one of {known}; got '{text}'")
        arguments[name] = _value(name, value, kernel.declared(name))
    return arguments


def _value(name: str, text: str, declared: Scalar | ArrayType | None) -> Any:
    if text.startswith("@"):
        return _from_disk(name, text[1:])
    dtype_text, colon, shape_text = text.rpartition(":")
    dtype = scalar_named(dtype_text) if colon else None
    if isinstance(declared, ArrayType) or dtype is not None:
        dtype = dtype or declared.dtype  # type: ignore[union-attr]
        try:
            shape = tuple(int(n) for n in shape_text.split("x"))
        except ValueError:
            raise UsageError(f"'{name}' takes a shape such as 64x32, got '{text}'") from None
        if min(shape) < 1:
            raise UsageError(f"'{name}' takes sizes of at least 1, got '{text}'")
        return _array(shape, dtype)
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    if text in ("True", "False"):
        return text == "True"
    return scalar_named(text) or text


def _from_disk(name: str, path: str) -> Any:
    import numpy as np

    try:
        return np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"'{name}' takes an array in a .npy file, got '{path}': {error}") from None


def _array(shape: tuple[int, ...], dtype: Scalar) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    if not dtype.is_float:
        return np.zeros(shape, dtype.name.rstrip("_"))
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype == bfloat16:
        import torch

        return torch.from_numpy(values).bfloat16()
    return values.astype(dtype.name)
