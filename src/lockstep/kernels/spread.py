"""Groups of arguments at the entry of a kernel.

A kernel with fifty arguments reads best if they come in groups, named tuples of pointers or of
numbers. Triton 3.6 takes a tuple as an argument, but looks at the numbers in it, whatever
`do_not_specialize` says: it compiles another kernel where one of them is 1 or a multiple of 16. So
a kernel is written with groups, and `spread` makes of it what Triton sees: a kernel that takes the
fields of its groups one by one, and groups them in its first lines. For

    def add(pointers: Pointers, stride_x: Strides, N: tl.constexpr):
        tl.store(pointers.y_ptr, tl.load(pointers.x_ptr + N * stride_x.s))

with `x_ptr` and `y_ptr` as the fields of Pointers, and `b` and `s` as those of Strides, that is

    def add(x_ptr, y_ptr, stride_xb, stride_xs, N: tl.constexpr):
        pointers = Pointers(x_ptr, y_ptr)
        stride_x = Strides(stride_xb, stride_xs)
        tl.store(pointers.y_ptr, tl.load(pointers.x_ptr + N * stride_x.s))

A field has its own name, but for those of `stride_x`, which go by `stride_x` and theirs. Constants
cannot be in a group: Triton makes tensors of those in a tuple that has a name.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with the fields of its groups as parameters; itself if it has no groups.

    A group is a parameter that is annotated with the name of a named tuple, in a module with
    `from __future__ import annotations`.

    Raises:
        TypeError: Two parameters would have one name.
    """
    parameters: list[str] = []
    grouping: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        fields = _fields_of(function, kind)
        if fields is None:
            parameters.append(name if kind is parameter.empty else f"{name}: {kind}")
            continue
        taken = [f"{name}{field}" if name.startswith("stride_") else field for field in fields]
        parameters += taken
        grouping.append(f"{name} = {kind}({', '.join(taken)})")
    if not grouping:
        return function
    names = [parameter.partition(":")[0] for parameter in parameters]
    if len(set(names)) < len(names):
        raise TypeError(f"two parameters of {function.__name__} have one name: {sorted(names)}")
    return _made_of(_text_of(function, parameters, grouping), function)


def _fields_of(function: Callable[..., Any], kind: Any) -> tuple[str, ...] | None:
    """The fields of the named tuple of this name; None if it is none."""
    return getattr(function.__globals__.get(kind), "_fields", None)


def _text_of(function: Callable[..., Any], parameters: list[str], grouping: list[str]) -> str:
    """The function's text with other parameters, and with these lines before its first."""
    text = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef)
    has_docstring = ast.get_docstring(definition) is not None
    docstring = definition.body[0]
    first = docstring.end_lineno if has_docstring else docstring.lineno - 1
    lines = text.splitlines()
    head = [f"def {function.__name__}(", *(f"    {parameter}," for parameter in parameters), "):"]
    if has_docstring:
        head += lines[docstring.lineno - 1 : first]
    return "\n".join([*head, *(f"    {line}" for line in grouping), *lines[first:], ""])


def _made_of(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a text defines, in the module of another. Triton can read its text."""
    file = f"<{function.__module__}.{function.__name__}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    made: dict[str, Any] = {}
    # Annotations stay text, as Triton has them elsewhere.
    flags = __future__.annotations.compiler_flag
    exec(compile(text, file, "exec", flags, dont_inherit=True), function.__globals__, made)
    return made[function.__name__]
