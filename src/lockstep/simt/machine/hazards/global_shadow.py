"""Races in global memory, within a block and between blocks.

Two blocks of one launch that touch one element, one writing, race, unless one has handed over to
the other: see `block_order`. Atomics among themselves do not race. Within a block barriers count,
as in shared memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt.machine.frames import Lanes
from lockstep.simt.machine.records.counters import Site

from . import GLOBAL_RACE, RACE, Hazards
from .clock import SEVERAL_LANES, WHO, Clock, site_of
from .shadow import disagree

NO_BLOCK, SEVERAL_BLOCKS = -1, -2


class GlobalShadow:
    """Shadow of one stretch of global memory that the kernel writes to."""

    def __init__(self, size: int, tracks_reads: bool, hazards: Hazards):
        self.hazards = hazards
        self.writer = np.zeros(size, np.int64)
        self.writer_block = np.full(size, NO_BLOCK, np.int32)
        self.tracks_reads = tracks_reads
        if tracks_reads:
            self.reader = np.zeros(size, np.int64)
            self.reader_block = np.full(size, NO_BLOCK, np.int32)

    def written(self) -> np.ndarray:
        """Which elements a block has written."""
        return self.writer_block != NO_BLOCK

    def touched(self) -> np.ndarray:
        """Which elements a block has written or read."""
        return self.written() | (self.reader_block != NO_BLOCK if self.tracks_reads else False)

    def access(self, lanes: Lanes, element: Any, blocks: np.ndarray) -> tuple:
        """Flat arrays: element, thread, block number, column."""
        place = element if isinstance(element, np.ndarray) else np.full((1, 1), element)
        parts = np.broadcast_arrays(place, lanes.threads[:, None], lanes.column)
        address, thread, column = (p.reshape(-1) for p in parts)
        return address, thread, blocks[column], column

    def read(self, lanes: Lanes, element: Any, site: Site, clock: Clock, blocks: Any, at: Any):
        access = self.access(lanes, element, blocks)
        address, thread, block, column = access
        self._check("reads", "wrote", self.writer, self.writer_block, access, site, clock, at)
        if not self.tracks_reads:
            return
        before, owner = self.reader[address], self.reader_block[address]
        mine = np.where(owner == block, before, 0)
        clock.note_readers(self.reader, (address,), mine, thread, column, site.number)
        fresh = (owner == NO_BLOCK) | (owner == block)
        self.reader_block[address] = np.where(fresh, block, SEVERAL_BLOCKS)
        lost = self.reader_block[address] != block
        self.reader_block[address[lost]] = SEVERAL_BLOCKS

    def write(
        self,
        lanes: Lanes,
        element: Any,
        site: Site,
        clock: Clock,
        blocks: Any,
        at: Any,
        values: Any = None,
    ) -> None:
        access = self.access(lanes, element, blocks)
        address, thread, block, _ = access
        self._check("overwrites", "wrote", self.writer, self.writer_block, access, site, clock, at)
        if self.tracks_reads:
            self._check(
                "overwrites", "read", self.reader, self.reader_block, access, site, clock, at
            )
        own = clock.stamp(site.number, thread)
        self.writer[address] = own
        self.writer_block[address] = block
        if site.kind == "atomic":
            return
        words, owners = self.writer[address], self.writer_block[address]
        clash = (words != own) | (owners != block)
        if clash.any():
            spread = None if values is None else np.broadcast_to(values, lanes.shape).reshape(-1)
            clash &= disagree(address, spread)
            if clash.any():
                self._report("overwrites", "wrote", words, owners, clash, access, site, at)

    def _check(
        self,
        does: str,
        did: str,
        words: np.ndarray,
        owners: np.ndarray,
        access: tuple,
        site: Site,
        clock: Clock,
        at: Any,
    ) -> None:
        address, thread, block, column = access
        word, owner = words[address], owners[address]
        bad = (owner != NO_BLOCK) & (owner != block)
        if self.hazards.order is not None and bad.any():
            bad[bad] = ~self.hazards.order.ordered(
                word[bad], owner[bad], tuple(part[bad] for part in access), clock
            )
        same = owner == block
        if same.any():
            bad |= same & clock.unordered(word, thread, column)
        if bad.any() and site.kind == "atomic":
            bad &= ~self.hazards.is_atomic[site_of(word)]
        if bad.any():
            self._report(does, did, word, owner, bad, access, site, at)

    def _report(
        self,
        does: str,
        did: str,
        words: np.ndarray,
        owners: np.ndarray,
        bad: np.ndarray,
        access: tuple,
        site: Site,
        at: Any,
    ) -> None:
        """`at` names an element number for the message."""
        first = int(np.argmax(bad))
        address, thread, block, _ = (int(part[first]) for part in access)
        owner, who = int(owners[first]), int(words[first]) & WHO
        apart = owner != block
        whom = "another block" if apart else "another thread of the block"
        reason = "nothing orders the two" if apart else "with no barrier between"
        several = who >= SEVERAL_LANES or owner == SEVERAL_BLOCKS
        self.hazards.report(
            GLOBAL_RACE if apart else RACE,
            site,
            f"{does} {at(address)}, which {whom} {did}; {reason}",
            thread,
            block,
            subject=site.name,
            other_site=site_of(int(words[first])),
            other_thread=None if several else who,
            other_block=owner if owner >= 0 else None,
        )
