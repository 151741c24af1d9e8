"""Lockstep as a kernel of the Hugging Face hub, which the package `kernels` loads.

Such a kernel is a repository with a folder of sources per backend, `build/torch-cuda/`, and a
`metadata.json` in it. `kernels` imports the folder as a package under the id that this file gives,
so imports in it are relative, and several versions, an installed Lockstep among them, can be loaded
in one process. The packages that a kernel may need are a closed list without numba. What is written
here runs the kernels for GPUs; tensors on a CPU need numba to be installed.

A GPU is not needed to write the folder, and nothing is compiled.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lockstep
from lockstep import api, flash_attn

NAME = "lockstep"
# The hub counts versions of a kernel whose calls fit together.
VERSION = 1
BACKENDS = ("cuda", "cpu")
SOURCE = Path(lockstep.__file__).parent
_START = ("lockstep.api", "lockstep.flash_attn")
_FROM = re.compile(r"from lockstep(\.?)([\w.]*) import")


class Layout(NamedTuple):
    """The files that `write_layout` has written."""

    folder: Path
    """`build/torch-cuda` or `build/torch-cpu`, below the repository."""
    id: str
    """The name under which `kernels` imports the folder."""
    files: int


def write_layout(repository: Path, backend: str = "cuda") -> Layout:
    """Write Lockstep's sources below a folder as `kernels` loads them.

    The package has the calls of Lockstep and the functions of flash-attn 2, so that transformers
    takes the repository's name as an `attn_implementation`.

    Args:
        repository: The folder of the repository; made if it is not there.
        backend: "cuda", or "cpu" to try the folder on a machine without a GPU.

    Raises:
        ValueError: There is no such backend.
        FileExistsError: The folder of that backend is there already.

    Example:
        >>> layout = write_layout(folder / "lockstep-flash-attn2")
        >>> sorted(path.name for path in layout.folder.glob("*.json"))
        ['metadata.json']
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend takes one of {', '.join(BACKENDS)}, got {backend!r}")
    folder = repository / "build" / f"torch-{backend}"
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    texts = _sources()
    texts[Path("__init__.py")] = _package()
    digest = hashlib.sha256()
    for path, text in sorted(texts.items()):
        digest.update(f"{path.as_posix()}\0{text}\0".encode())
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    identifier = f"_{NAME}_{backend}_{digest.hexdigest()[:10]}"
    metadata = {
        "id": identifier,
        "name": NAME,
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return Layout(folder, identifier, len(texts))


def _package() -> str:
    """The `__init__.py` of the folder."""
    calls = [name for name in lockstep.__all__ if hasattr(api, name)]
    functions = [name for name in flash_attn.__all__ if name.startswith("flash_attn_")]
    names = "".join(f'    "{name}",\n' for name in sorted([*calls, *functions]))
    return (
        f'"""{lockstep.__doc__}"""\n\n'
        f"from .api import {', '.join(calls)}\n"
        f"from .flash_attn import {', '.join(functions)}\n\n"
        f"__all__ = [\n{names}]\n"
    )


def _sources() -> dict[Path, str]:
    """The modules that the start needs and the packages they are in, with relative imports."""
    found: dict[Path, str] = {}
    waiting = list(_START)
    while waiting:
        path = _path(waiting.pop())
        if path is None or path in found:
            continue
        text = (SOURCE / path).read_text(encoding="utf-8")
        lines, dots = text.splitlines(keepends=True), "." * len(path.parts)
        for node in _imports(text):
            lines[node.lineno - 1] = _FROM.sub(rf"from {dots}\2 import", lines[node.lineno - 1])
            waiting += [f"{node.module}", *(f"{node.module}.{name.name}" for name in node.names)]
        found[path] = "".join(lines)
        waiting += [".".join(("lockstep", *folder.parts)) for folder in path.parents][:-1]
    return found


def _path(module: str) -> Path | None:
    """The file of a module, None where there is none: the name is that of a function."""
    below = module.replace(".", "/").removeprefix("lockstep").removeprefix("/")
    # The package itself gets another `__init__.py`.
    candidates = (Path(f"{below}.py"), Path(below, "__init__.py")) if below else ()
    return next((path for path in candidates if (SOURCE / path).is_file()), None)


def _imports(text: str) -> Iterator[ast.ImportFrom]:
    """The statements of a file that import from Lockstep, also those inside functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            yield node
        elif isinstance(node, ast.Import):
            named = {alias.name.split(".")[0] for alias in node.names}
            assert "lockstep" not in named, "`import lockstep` has no relative form"
