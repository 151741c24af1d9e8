"""How kernels spell a side of a window that has no limit."""

from __future__ import annotations

# More than the longest sequence that any kernel takes; the sum of two still fits into int32.
NO_LIMIT = 1 << 29


def limit_of(side: int | None) -> int:
    """The number of keys on one side of a window, as kernels take it: NO_LIMIT for None."""
    return NO_LIMIT if side is None else min(side, NO_LIMIT)
