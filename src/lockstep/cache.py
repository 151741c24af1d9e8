"""A dictionary of a bounded size, for results that one call computes and the next one like it
uses."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dictionary of at most `limit` entries: it starts anew where one more would not fit.

    A program with more than `limit` kinds of calls spends its time on other things than preparing
    them once more.

    Example:
        >>> squares = Cache(limit=2)
        >>> for n in range(3):
        ...     squares[n] = n * n
        >>> squares
        {2: 4}
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)
