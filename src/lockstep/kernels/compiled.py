"""Which compiled kernels this process has compiled or loaded from disk."""

from __future__ import annotations

# Names, one for each build.
_NAMES: list[str] = []


def note(name: str) -> None:
    """Say that a build of the kernel called `name` was compiled, or loaded from disk."""
    _NAMES.append(name)


def count() -> int:
    """How many builds this process has compiled or loaded."""
    return len(_NAMES)
