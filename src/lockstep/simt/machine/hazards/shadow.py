"""Races in shared memory.

Every element has two shadow words (see `clock`), for its last writer and for its readers. The
shadow is one column wide while all blocks do the same and widens when they do not. Reads are
queued, and checked only if a thread writes to the array before the next barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.simt.machine.addresses import linear, row_major
from lockstep.simt.machine.frames import Lanes
from lockstep.simt.machine.records.counters import Site

from . import RACE, Hazards
from .clock import SEVERAL_LANES, WHO, Clock, site_of

QUEUE_BYTES = 256 << 20


@dataclass
class Access:
    """Elements that lanes touch, all arrays of one shape."""

    address: np.ndarray
    column: Any  # of the shadow: an array, or 0
    thread: np.ndarray

    @property
    def index(self) -> tuple:
        return self.address, self.column


class SharedShadow:
    """Shadow of one shared array in all blocks of the batch."""

    def __init__(
        self, name: str, shape: tuple[int, ...], blocks: np.ndarray, clock: Clock, hazards: Hazards
    ):
        self.name, self.shape = name, shape
        self.block_numbers = blocks
        self.clock, self.hazards = clock, hazards
        self.strides = row_major(shape)
        self.queue: list[tuple[Lanes, tuple, tuple[int, ...], Site, int, range | None]] = []
        self.queued: set[int] = set()  # arrays held by the queue
        self.queued_bytes = 0
        self.written_at = self.read_at = 0
        self._reset()

    def _reset(self) -> None:
        size = int(np.prod(self.shape))
        self.writer = np.zeros((size, 1), np.int64)
        self.reader = np.zeros((size, 1), np.int64)

    def all_met(self) -> None:
        """A barrier of all blocks: nothing before it matters any more."""
        self._forget_reads()
        if self.writer.shape[1] != 1:
            self._reset()

    def access(self, lanes: Lanes, address: Any) -> Access:
        """The elements as indices into the shadow, which widens if blocks differ."""
        varies = isinstance(address, np.ndarray) and address.shape[1] != 1
        same = lanes.all_blocks and not lanes.flat and not varies and self.clock.same_in_all_blocks
        blocks = self.block_numbers.size
        if not same and self.writer.shape[1] != blocks:
            self.writer = np.repeat(self.writer, blocks, axis=1)
            self.reader = np.repeat(self.reader, blocks, axis=1)
        threads = lanes.threads
        if self.writer.shape[1] == 1 and not lanes.flat and not varies:
            one = address[:, 0] if isinstance(address, np.ndarray) else np.asarray(address)
            if one.shape != threads.shape:
                one = np.broadcast_to(one, threads.shape)
            return Access(one, 0, threads)
        place = address if isinstance(address, np.ndarray) else np.full((1, 1), address)
        return Access(*np.broadcast_arrays(place, lanes.column, threads[:, None]))

    def read(self, lanes: Lanes, address: Any, site: Site, index: tuple = ()) -> None:
        """Record a read. `index`, if given, is what `address` was computed from: loops reuse their
        index arrays, so queueing those costs next to nothing."""
        if self.only_queues and self.queued_bytes < QUEUE_BYTES:
            self._queue(lanes, index or (address,), self.strides if index else (1,), site, None)
            return
        self.drain()
        access = self.access(lanes, address)
        self._check("reads", "wrote", self.writer[access.index], access, site)
        self._note_readers(access, site)

    def read_rounds(self, lanes: Lanes, index: tuple, site: Site, rounds: range) -> None:
        """Queue the reads of all rounds of a loop, whose counter is None in `index`. There must be
        nothing to check: see `only_queues`."""
        self._queue(lanes, index, self.strides, site, rounds)

    def read_vector(self, lanes: Lanes, address: Any, site: Site, width: int) -> None:
        """Record a read of `width` neighbouring elements."""
        if self.only_queues and self.queued_bytes < QUEUE_BYTES:
            self._queue(lanes, (address, None), (1, 1), site, range(width))
            return
        for k in range(width):
            self.read(lanes, address + k, site)

    def _queue(
        self,
        lanes: Lanes,
        index: tuple,
        strides: tuple[int, ...],
        site: Site,
        rounds: range | None,
    ) -> None:
        self.queue.append((lanes, index, strides, site, self.clock.now, rounds))
        for part in index:
            if isinstance(part, np.ndarray) and id(part) not in self.queued:
                self.queued.add(id(part))
                self.queued_bytes += part.nbytes

    @property
    def only_queues(self) -> bool:
        """Whether reads cannot race: nothing was written since the last barrier of all blocks."""
        return self.written_at < self.clock.earliest_barrier

    def drain(self) -> None:
        """Enter the queued reads into the shadow, each at its own time."""
        now = self.clock.now
        for lanes, index, strides, site, time, rounds in self.queue:
            self.clock.now = time
            for counter in rounds or (None,):
                at = tuple(counter if part is None else part for part in index)
                self._note_readers(self.access(lanes, linear(at, strides)), site)
        self.clock.now = now
        self._forget_reads()

    def _forget_reads(self) -> None:
        self.queue.clear()
        self.queued.clear()
        self.queued_bytes = 0

    def _note_readers(self, access: Access, site: Site) -> None:
        first = self.read_at < self.clock.earliest_barrier  # nothing was read since
        self.read_at = max(self.read_at, self.clock.now)
        before = None if first else self.reader[access.index]
        self.clock.note_readers(
            self.reader, access.index, before, access.thread, access.column, site.number
        )

    def write(self, lanes: Lanes, address: Any, site: Site, values: Any = None) -> None:
        """Record a write. Lanes that store equal `values` to one element together do not race."""
        self.drain()
        access = self.access(lanes, address)
        if not self.only_queues:
            self._check("overwrites", "wrote", self.writer[access.index], access, site)
        if self.read_at >= self.clock.earliest_barrier:
            self._check("overwrites", "read", self.reader[access.index], access, site)
        self.written_at = self.clock.now
        own = self.clock.stamp(site.number, access.thread)
        self.writer[access.index] = own
        if site.kind == "atomic":
            return
        winner = self.writer[access.index]
        clash = winner != own
        if clash.any():
            key = access.address.astype(np.int64) * self.block_numbers.size + access.column
            clash &= disagree(key, values)
            if clash.any():
                self._report("overwrites", "wrote", winner, clash, access, site)

    def restamp(self, lanes: Lanes, address: Any, site: Site) -> None:
        """Move a write to the present: an asynchronous copy is done."""
        self.drain()
        self.written_at = self.clock.now
        access = self.access(lanes, address)
        self.writer[access.index] = self.clock.stamp(site.number, access.thread)

    def _check(self, does: str, did: str, words: np.ndarray, access: Access, site: Site) -> None:
        bad = self.clock.unordered(words, access.thread, access.column)
        if bad.any() and site.kind == "atomic":
            bad &= ~self.hazards.is_atomic[site_of(words)]
        if bad.any():
            self._report(does, did, words, bad, access, site)

    def _report(
        self, does: str, did: str, words: np.ndarray, bad: np.ndarray, access: Access, site: Site
    ) -> None:
        first = tuple(np.argwhere(bad)[0])
        word = int(words[first])
        who = word & WHO
        several = who >= SEVERAL_LANES
        column = access.column if isinstance(access.column, int) else int(access.column[first])
        element = np.unravel_index(int(access.address[first]), self.shape)
        place = ", ".join(str(int(i)) for i in element)
        other = "several threads" if several else "another thread"
        self.hazards.report(
            RACE,
            site,
            f"{does} {self.name}[{place}], which {other} {did}, with no barrier between",
            int(access.thread[first]),
            int(self.block_numbers[column]),
            subject=self.name,
            other_site=site_of(word),
            other_thread=None if several else who,
        )


def disagree(key: np.ndarray, values: Any) -> np.ndarray:
    """Where entries with the same key have different values."""
    if values is None:
        return np.ones(key.shape, bool)
    spread = np.asarray(values)
    if spread.ndim == 2 and key.ndim == 1:  # one shadow column stands for all blocks
        differs = [disagree(key, spread[:, j]) for j in range(min(spread.shape[1], 8))]
        return np.logical_or.reduce(differs)
    flat = np.broadcast_to(spread, key.shape).ravel()
    order = np.argsort(key, axis=None, kind="stable")
    keys, sorted_values = key.ravel()[order], flat[order]
    fresh = np.r_[True, keys[1:] != keys[:-1]]
    starts = np.flatnonzero(fresh)
    low = np.minimum.reduceat(sorted_values, starts)
    high = np.maximum.reduceat(sorted_values, starts)
    out = np.empty(key.size, bool)
    out[order] = (low != high)[np.cumsum(fresh) - 1]
    return out.reshape(key.shape)
