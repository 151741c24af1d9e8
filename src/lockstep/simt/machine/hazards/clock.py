"""Time between synchronisations, and what it says about two accesses of one block."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt.machine.frames import Lanes
from lockstep.simt.types import WARP_SIZE

# A shadow word is time << TIME | site << SITE | who.
TIME, SITE = 32, 16
WHO = (1 << SITE) - 1
SEVERAL_LANES = 0x1000  # + warp: several lanes of that warp
SEVERAL_WARPS = 0x2000  # warp_of gives a warp that does not exist


def warp_of(who: np.ndarray) -> np.ndarray:
    """The warp a shadow word's `who` belongs to."""
    return np.where(who >= SEVERAL_LANES, who - SEVERAL_LANES, who // WARP_SIZE)


def site_of(words: Any) -> Any:
    return (words >> SITE) & WHO


class Clock:
    """Time moves at every barrier. Two accesses of different threads are in order if a barrier
    that both took part in lies between: one of the block, or of the warp they share."""

    def __init__(self, warps: int, blocks: int):
        self.now = 1
        self.block_met: int | np.ndarray = 1  # time of the last barrier, [blocks] where they differ
        self.warp_met: np.ndarray | None = None  # [warps, blocks] once a syncwarp came after it
        self.earliest_barrier = 1
        self.extent = (warps, blocks)

    def all_met(self) -> None:
        """All threads of all blocks met at a barrier."""
        self.now += 1
        self.block_met, self.warp_met = self.now, None
        self.earliest_barrier = self.now

    def blocks_met(self, blocks: np.ndarray) -> None:
        """The threads of these blocks met at a barrier."""
        self.now += 1
        self.block_met = np.broadcast_to(self.block_met, self.extent[1]).copy()
        self.block_met[blocks] = self.now
        self.earliest_barrier = int(self.block_met.min())
        if self.warp_met is not None:
            self.warp_met[:, blocks] = self.now

    def warps_met(self, lanes: Lanes) -> None:
        """The warps of these lanes met at a syncwarp."""
        self.now += 1
        if self.warp_met is None:
            self.warp_met = np.broadcast_to(self.block_met, self.extent).copy()
        if lanes.flat:
            self.warp_met[lanes.threads // WARP_SIZE, lanes.blocks] = self.now
        else:
            self.warp_met[np.ix_(lanes.warp_keys, lanes.blocks)] = self.now

    @property
    def same_in_all_blocks(self) -> bool:
        return isinstance(self.block_met, int) and self.warp_met is None

    def stamp(self, site: int, thread: np.ndarray) -> np.ndarray:
        """Shadow words of an access now."""
        return thread + ((self.now << TIME) | (site << SITE))

    def unordered(self, words: np.ndarray, thread: np.ndarray, block: Any) -> np.ndarray:
        """Which words belong to another thread of the block, with no barrier since.

        `block` are columns of the batch; any integer will do while `same_in_all_blocks`.
        """
        met = self.block_met if isinstance(self.block_met, int) else self.block_met[block]
        who = words & WHO
        bad = (words >= met << TIME) & (who != thread)
        if self.warp_met is not None and bad.any():
            warp = thread // WARP_SIZE
            met = self.warp_met[warp, block]
            bad &= (warp_of(who) != warp) | (words >= met << TIME)
        return bad

    def with_reader(
        self, words: np.ndarray, thread: np.ndarray, block: Any, site: int
    ) -> np.ndarray:
        """Reader words after one more read by `thread`: it alone, or several lanes or warps."""
        own = self.stamp(site, thread)
        together = self.unordered(words, thread, block)
        if not together.any():
            return own
        warp = thread // WARP_SIZE
        one_warp = warp_of(words & WHO) == warp
        several = np.where(one_warp, SEVERAL_LANES + warp, SEVERAL_WARPS)
        return np.where(together, (own & ~WHO) | several, own)

    def note_readers(
        self,
        shadow: np.ndarray,
        index: tuple,
        before: np.ndarray | None,
        thread: np.ndarray,
        block: Any,
        site: int,
    ) -> None:
        """Enter a read into the words of `shadow` at `index`; `before` is what they hold, None if
        all of that is older than the last barrier."""
        if before is None:
            after = self.stamp(site, thread)
        else:
            after = self.with_reader(before, thread, block, site)
        shadow[index] = after
        lost = shadow[index] != after
        if not lost.any():
            return
        # lanes that read one element in one instruction: the last of them won
        index = _where(index, lost)
        winner = shadow[index]
        warp = warp_of(winner & WHO)
        shadow[index] = (winner & ~WHO) | (SEVERAL_LANES + warp)
        apart = warp != thread[lost] // WARP_SIZE
        shadow[_where(index, apart)] = (winner[apart] & ~WHO) | SEVERAL_WARPS


def _where(index: tuple, mask: np.ndarray) -> tuple:
    return tuple(part[mask] if isinstance(part, np.ndarray) else part for part in index)
