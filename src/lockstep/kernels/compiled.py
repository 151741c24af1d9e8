"""Which kernels this process has compiled or loaded from disk, and which ones calls would need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import local
from typing import NamedTuple

# Names, one for each build.
_NAMES: list[str] = []


class Build(NamedTuple):
    """A compiled kernel that a call needs."""

    name: str
    load: Callable[[], object]
    """Has it ready for launches in this process, compiled or loaded from disk."""
    apart: Callable[[], Callable[[], object]]
    """Says how another process leaves it on disk: a function that can be pickled."""
    is_long: bool = False
    """Whether compiling it takes long beside others."""


class _Planned(local):
    """What calls of this thread would need; None if they are made."""

    builds: dict[Hashable, Build] | None = None


_PLANNED = _Planned()


def note(name: str) -> None:
    """Say that a build of the kernel called `name` was compiled, or loaded from disk."""
    _NAMES.append(name)


def count() -> int:
    """How many builds this process has compiled or loaded."""
    return len(_NAMES)


@contextmanager
def planning() -> Iterator[dict[Hashable, Build]]:
    """While this is entered, kernels for GPUs are not launched in this thread: results are memory
    as it was. What they would have been compiled as is collected. Gradients that autograd computes
    in a thread of its own are none of it: `torch.autograd.set_multithreading_enabled`."""
    found: dict[Hashable, Build] = {}
    _PLANNED.builds = found
    try:
        yield found
    finally:
        _PLANNED.builds = None


def is_only_planned(key: Hashable, build: Build) -> bool:
    """Whether a launch that needs this build is not to be made, since `planning` is entered."""
    if _PLANNED.builds is None:
        return False
    _PLANNED.builds.setdefault(key, build)
    return True
