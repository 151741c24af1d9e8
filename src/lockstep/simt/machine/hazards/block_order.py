"""Order between blocks: which threads may rely on what another block of the launch wrote.

Nothing orders two blocks by itself. Block A hands its writes over when one of its threads fences
and then changes a number by an atomic; block B takes them over when one of its threads finds that
number by an atomic and fences after it. What A's thread wrote before its fence, and what all
threads of A wrote before the last barrier ahead of that fence, is then in order before what B's
thread does after its own fence, and before what all threads of B do after their next barrier.
A fence that is missing on either side leaves the two blocks unordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.simt.machine.frames import Lanes

from .clock import TIME, WHO, Clock


@dataclass(frozen=True)
class Published:
    """The accesses of one block that are in order, in the times of that block's own clock."""

    met: int  # all accesses before this time
    thread: int
    fenced: int  # and those of `thread` before this time

    def covers(self, words: np.ndarray) -> np.ndarray:
        """Which shadow words are of such accesses."""
        own = ((words & WHO) == self.thread) & (words < self.fenced << TIME)
        return (words < self.met << TIME) | own


@dataclass(frozen=True)
class Acquired:
    """The order that one block has taken over from others by an atomic of `thread` and its
    fence."""

    published: dict[int, list[Published]]  # by block
    thread: int
    fenced: int  # in the time of the block's own clock

    def visible(self, threads: np.ndarray, met: int) -> np.ndarray:
        """Which threads of the block may rely on it, after a barrier at `met`."""
        return (threads == self.thread) | (met > self.fenced)


Publications = dict[int, list[Published]]


class BlockOrder:
    """Hand-overs between the blocks of a launch. Blocks and threads are numbers, over all batches.

    A batch has a clock of its own, and every block is in one batch: times are compared within it.
    """

    def __init__(self) -> None:
        self.fences: dict[tuple[int, int], Published] = {}  # last fence of (block, thread)
        self.released: dict[Any, Publications] = {}  # by atomic element
        self.found: dict[tuple[int, int], Publications] = {}  # at atomics not fenced yet
        self.acquired: dict[int, list[Acquired]] = {}  # by block

    def fence(self, lanes: Lanes, blocks: np.ndarray, clock: Clock) -> None:
        """A threadfence of these lanes, at a time of its own."""
        clock.now += 1
        for thread, column in _pairs(lanes):
            block, met = int(blocks[column]), _met(clock, column)
            found = self.found.pop((block, thread), None)
            if found:
                self.acquired.setdefault(block, []).append(Acquired(found, thread, clock.now))
            self.fences[block, thread] = Published(met, thread, clock.now)

    def atomic(self, lanes: Lanes, element: Any, where: int, blocks: np.ndarray, clock: Clock):
        """Atomics of these lanes, in turns. `element` broadcasts to them, `where` is the memory."""
        elements = np.broadcast_to(np.asarray(element), lanes.shape)
        for (thread, column), place in zip(_pairs(lanes), _turns(lanes, elements), strict=True):
            block = int(blocks[column])
            key = (where, int(place))
            there = self.released.setdefault(key, {})
            others = {b: list(p) for b, p in there.items() if b != block}
            _merge(self.found.setdefault((block, thread), {}), others)
            fenced = self.fences.get((block, thread))
            if fenced is not None:
                _merge(there, {block: [fenced]})
                for earlier in self.acquired.get(block, ()):
                    if earlier.visible(np.array([thread]), _met(clock, column))[0]:
                        _merge(there, earlier.published)

    def ordered(
        self, words: np.ndarray, owners: np.ndarray, access: tuple, clock: Clock
    ) -> np.ndarray:
        """Which accesses come after what `words` say that blocks `owners` did."""
        _, thread, block, column = access
        result = np.zeros(words.shape, bool)
        for number in np.unique(block):
            for acquired in self.acquired.get(int(number), ()):
                mine = np.flatnonzero((block == number) & np.isin(owners, list(acquired.published)))
                if not mine.size:
                    continue
                met = _met(clock, int(column[mine[0]]))
                seen = mine[acquired.visible(thread[mine], met)]
                for owner in np.unique(owners[seen]):
                    of = seen[owners[seen] == owner]
                    for published in acquired.published[int(owner)]:
                        result[of] |= published.covers(words[of])
        return result


def _met(clock: Clock, column: int) -> int:
    """Time of the last barrier of a block."""
    return clock.block_met if isinstance(clock.block_met, int) else int(clock.block_met[column])


def _merge(into: Publications, more: Publications) -> None:
    for block, published in more.items():
        known = into.setdefault(block, [])
        known += [p for p in published if p not in known]


def _pairs(lanes: Lanes) -> Iterator[tuple[int, int]]:
    """Thread and column of every lane; blocks take turns whole, as at an atomic."""
    if lanes.flat:
        yield from zip(lanes.threads.tolist(), lanes.blocks.tolist(), strict=True)
    else:
        for column in lanes.blocks.tolist():
            yield from ((thread, column) for thread in lanes.threads.tolist())


def _turns(lanes: Lanes, values: np.ndarray) -> np.ndarray:
    """A value per lane, in the order of `_pairs`."""
    return values.reshape(-1) if lanes.flat else values.T.reshape(-1)
