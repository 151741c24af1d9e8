"""Windows as kernels take them."""

from __future__ import annotations

# More than the longest sequence that any kernel takes; the sum of two still fits into int32.
NO_LIMIT = 1 << 29


def limit_of(side: int | None) -> int:
    """The number of keys on one side of a window, as kernels take it: NO_LIMIT for None."""
    return NO_LIMIT if side is None else min(side, NO_LIMIT)


def move_window(left: int | None, right: int | None, n: int) -> tuple[int | None, int | None]:
    """The window, which may be negative, of rows that a kernel puts n keys after their place."""
    return None if left is None else left + n, None if right is None else right - n
