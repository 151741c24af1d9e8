"""How every `lockstep` command prints and ends.

A character that the terminal cannot show is replaced by a similar one. Ctrl-C, a lack of memory and
a full disk end a command with one line and an exit status, without a traceback. Errors name options
as they are typed.
"""

from __future__ import annotations

import atexit
import codecs
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from lockstep.output.console import BAD

USAGE, INTERRUPTED = 2, 130
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]

# One character for one: columns stay where they are.
_INSTEAD = str.maketrans("·×µ–−±²ᵀᵢΣ≤≥✓✗…█▉▊▋▌▍▎▏", "*xu--~2TiS<>yn~########")
_PLAIN = "lockstep.plain"


class Commands(TyperGroup):
    """The group of all commands."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A stream that replaces the standard one, as in a test, may not have it.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors=_PLAIN)
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _ended_by_a_line():
            return super().invoke(ctx)


def run(app: typer.Typer) -> NoReturn:
    """Run the command line, and end the process as soon as it is through.

    Functions registered with `atexit` are called, but Python does not free all objects one by one,
    which takes it half a second where PyTorch is loaded.
    """
    try:
        app()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # of a pipe that nothing reads
            if stream is not None:  # as one that the caller has closed is
                stream.flush()
    os._exit(status)


def print_json(value: Any) -> None:
    """Print what a command found on standard output, for a script to read."""
    typer.echo(json.dumps(value, indent=1))


@contextmanager
def ends_with_status_2(*errors: type[Exception]) -> Iterator[None]:
    """Errors of these kinds end the command with one message on standard error and status 2."""
    try:
        yield
    except errors as error:
        line = Text.assemble(("error: ", BAD), str(error))
        Console(stderr=True, highlight=False).print(line, soft_wrap=True)
        raise typer.Exit(USAGE) from None


def check_writable(option: str, path: Path) -> None:
    """Raises ValueError, before any work is done, for a file that cannot be written."""
    there = os.access(path, os.F_OK)
    is_place = os.path.isdir(path.parent) and not os.path.isdir(path)
    if not is_place or not os.access(path if there else path.parent, os.W_OK):
        raise ValueError(f"{option} takes a file that can be written, got '{path}'")


@contextmanager
def errors_by_option(options: dict[str, str]) -> Iterator[None]:
    """Errors of arguments name the options that set them, as `by_option` does."""
    try:
        yield
    except (ValueError, TypeError) as error:
        error.args = (by_option(error, options),)
        raise


def by_option(error: Exception, options: dict[str, str]) -> str:
    """The message of an error with fields replaced by the options that set them.

    `options` maps a field, such as "S", to its option, "--seq".
    """
    fields = "|".join(options)
    return re.sub(rf"\b({fields})\b", lambda found: options[found[1]], str(error))


def _spelled_plainly(error: UnicodeError) -> tuple[str, int]:
    """A codecs error handler for characters that the encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_INSTEAD)
    return text.encode("ascii", errors="replace").decode(), error.end


codecs.register_error(_PLAIN, _spelled_plainly)


@contextmanager
def _ended_by_a_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except OSError as error:
        # Where standard output goes as well, or the file of results.
        if error.errno != errno.ENOSPC:
            raise
        _end(f"error: {error.strerror}", USAGE)
    except MemoryError as error:
        _end(f"error: not enough memory: {error}", USAGE)
    except RuntimeError as error:
        # These are PyTorch's words, on a CPU and on a GPU.
        said = str(error)
        if "can't allocate memory" not in said and "out of memory" not in said:
            raise
        _end(f"error: not enough memory: {said.splitlines()[0]}", USAGE)


def _end(line: str, status: int) -> NoReturn:
    typer.echo(line, err=True)
    raise typer.Exit(status) from None
