"""Shared memory in the analysis: cells, and which of them secrets were written to."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import reduce

from .code import Code
from .steps import SHARED
from .values import NOTHING, State, Value, either

# Addresses of a block's shared memory begin here where there are clusters.
_BEGIN = 0x400
_LOWEST_INDEX = 8
# The cell of addresses that are not known.
_ELSEWHERE = -1


@dataclass
class SharedMemory:
    """The shared memory of a program. A cell begins at each constant that addresses add to, where
    these tell buffers from indices; elsewhere there is one, and one for each address that is
    constant. Where warps go different ways, `cells` belongs to all of them; else to a state."""

    code: Code
    bases: list[int] | None  # where cells begin; None if that is yet to be found
    written_bases: set[int] = field(default_factory=set)
    cells: dict[object, Value] = field(default_factory=dict)

    def write(self, base: int, value: Value, state: State, is_constant: bool = False) -> None:
        """Keep a value that is written at this base."""
        self.written_bases.add(base)
        if not self.code.has_bases:
            at: object = (SHARED, base) if is_constant else SHARED
            state[at] = either(state.get(at, value), value)
        elif self.bases is not None:
            cells = self._cells(state)
            at = SHARED, self._cell(base, self.bases)
            cells[at] = either(cells.get(at, value), value)

    def read(self, base: int, n: int, state: State, is_constant: bool) -> Value:
        """What may be in n bytes at this base."""
        if not self.code.has_bases:
            return state.get((SHARED, base) if is_constant else SHARED, NOTHING)
        if self.bases is None:
            return NOTHING
        # Where an index does not begin with 0, the base is that much lower.
        behind = base + max(n, _LOWEST_INDEX) - 1
        first, last = self._cell(base, self.bases), self._cell(behind, self.bases)
        # An unknown address may be that of any cell; what was written at one may be in any.
        wanted = [_ELSEWHERE, *(x for x in self.bases if x >= _BEGIN)]
        if first != _ELSEWHERE:
            wanted = [x for x in wanted if first <= x <= last or x == _ELSEWHERE]
        cells = self._cells(state)
        found = [cells[SHARED, x] for x in wanted if (SHARED, x) in cells]
        return reduce(either, found) if found else NOTHING

    def _cells(self, state: State) -> dict[object, Value]:
        return self.cells if self.code.is_specialized else state

    @staticmethod
    def _cell(base: int, bases: list[int]) -> int:
        """Where the cell begins that an address is in; _ELSEWHERE if that is not known."""
        i = bisect_right(bases, base)
        return bases[i - 1] if i and base >= _BEGIN else _ELSEWHERE
