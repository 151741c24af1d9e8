"""From a Python function to its syntax tree, its comments and the names it can see."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .errors import SimtError, UnsupportedConstruct
from .ir import Location, Source


class _Text(NamedTuple):
    """The source text of a function, in the coordinates of its file."""

    file: str
    first_line: int
    lines: tuple[str, ...]
    indent: int
    body: str  # without that indentation
    tree: ast.stmt


_texts: WeakKeyDictionary[Callable, _Text] = WeakKeyDictionary()


def _text_of(function: Callable) -> _Text:
    """Reads the source of a function once: device functions are inlined many times."""
    found = _texts.get(function)
    if found is None:
        found = _texts[function] = _read(function)
    return found


def _read(function: Callable) -> _Text:
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or "<unknown>"
    except (OSError, TypeError) as error:
        raise SimtError(f"no source to be found for {function!r}: {error}") from error
    body = textwrap.dedent("".join(lines))
    indent = len(lines[0]) - len(lines[0].lstrip())
    tree = ast.parse("\n" * (first - 1) + body)  # so that lines have the numbers of the file
    written = tuple(line.rstrip("\n") for line in lines)
    return _Text(file, first, written, indent, body, tree.body[0])


@lru_cache(maxsize=256)
def _comments(body: str, first: int, indent: int) -> dict[int, tuple[int, str]]:
    """Columns and words of comments, by line."""
    return {
        token.start[0] + first - 1: (token.start[1] + indent, token.string.lstrip("#").strip())
        for token in tokenize.generate_tokens(io.StringIO(body).readline)
        if token.type == tokenize.COMMENT
    }


class FunctionSource:
    """The source of one function, in the coordinates of its file."""

    def __init__(self, function: Callable):
        text = _text_of(function)
        self.file, self.first_line, self.lines, self.indent, self.body, self.tree = text
        if not isinstance(self.tree, ast.FunctionDef):
            raise UnsupportedConstruct(
                "a kernel is a plain function (def ...), not a lambda or an async function",
                self.locate(self.tree),
            )
        self.names = {**vars(builtins), **function.__globals__, **_closure(function)}

    @cached_property
    def source(self) -> Source:
        """The function as it is written, with its comments."""
        comments = _comments(self.body, self.first_line, self.indent)
        return Source(self.file, self.first_line, self.lines, comments)

    def locate(self, node: ast.AST) -> Location:
        """Where `node` lies in the file."""
        line = getattr(node, "lineno", self.first_line)
        column = getattr(node, "col_offset", 0) + self.indent + 1
        end_line = getattr(node, "end_lineno", None) or line
        end = (getattr(node, "end_col_offset", None) or column) + self.indent + 1
        return Location(self.file, line, column, end_line, end, self.lines[line - self.first_line])

    def annotation(self, node: ast.expr | None) -> Any:
        """The object an annotation stands for, None where there is none."""
        if node is None:
            return None
        try:
            value = eval(compile(ast.Expression(node), self.file, "eval"), dict(self.names))
            return eval(value, dict(self.names)) if isinstance(value, str) else value
        except Exception as error:
            raise UnsupportedConstruct(
                f"cannot evaluate this annotation: {error}", self.locate(node)
            ) from error


def _closure(function: Callable) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet: the front end reports it as an unknown name
            continue
    return found
