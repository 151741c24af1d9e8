"""Which tokens of a sequence each rank holds. Plain arithmetic: no tensors, no communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Piece(NamedTuple):
    """A run of tokens that one rank holds: where in the sequence, and where in the shard."""

    tokens: range
    start: int

    @property
    def local(self) -> slice:
        return slice(self.start, self.start + len(self.tokens))


class Overlap(NamedTuple):
    """Tokens that a shard shares with a range: where in the shard, where in the range."""

    start: int
    at: int
    n: int


@dataclass(frozen=True)
class Sharding:
    """How `length` tokens are divided among `ranks`.

    Contiguous: rank r holds the r-th chunk of `ceil(length / ranks)` tokens, as `torch.chunk` and
    DTensor's `Shard` cut it. Balanced: there are twice as many chunks, and rank r holds the r-th
    from the start and the r-th from the end, so that under a causal mask all ranks see equally
    many keys. The last chunks may be shorter, or empty.
    """

    length: int
    ranks: int
    balanced: bool = False

    @property
    def chunk(self) -> int:
        return -(-self.length // (2 * self.ranks if self.balanced else self.ranks))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The runs of tokens of a rank, ascending; none if it holds no token."""
        return self._pieces[rank]

    def size(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(len(piece.tokens) for piece in self._pieces[rank])

    @property
    def largest(self) -> int:
        """The size of the largest shard."""
        return max(map(self.size, range(self.ranks)))

    def overlaps(self, rank: int, tokens: range) -> Iterator[Overlap]:
        """The ranges of `tokens` that a rank holds, ascending."""
        for held, start in self._pieces[rank]:
            first, last = max(held.start, tokens.start), min(held.stop, tokens.stop)
            if first < last:
                yield Overlap(start + first - held.start, first - tokens.start, last - first)

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(self._pieces_of(rank)) for rank in range(self.ranks))

    def _pieces_of(self, rank: int) -> Iterator[Piece]:
        start = 0
        for i in (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,):
            first = min(i * self.chunk, self.length)
            tokens = range(first, min(first + self.chunk, self.length))
            if tokens:
                yield Piece(tokens, start)
                start += len(tokens)


def share(n: int, ranks: int, rank: int) -> range:
    """The part of n things that falls to a rank: contiguous, and sizes differ by at most one."""
    return range(n * rank // ranks, n * (rank + 1) // ranks)
