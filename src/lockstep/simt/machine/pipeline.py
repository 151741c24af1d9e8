"""Asynchronous copies from global to shared memory.

Data moves when the copy is issued; `pending` remembers, per element, which copy may still be under
way, and any access to such an element is a hazard. A copy is done when its thread has waited for
the group it was committed in. From then on it is a write of that thread like any other, which
other threads may read after a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .frames import Lanes
from .memory import GlobalArray, SharedArray
from .records.counters import Site
from .values import Value
from .warp import Warps


@dataclass
class _Copy:
    """A copy under way: its elements and, per lane, the group it belongs to."""

    array: SharedArray
    address: Value
    lanes: Lanes
    site: Site
    count: int
    group: np.ndarray  # [rows, columns] of `lanes`


class Pipeline(Warps):
    """Copies, commits and waits, counted per thread."""

    _committed: np.ndarray | None = None  # [threads, blocks]
    _completed: np.ndarray | None = None

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        if self._committed is None or self._completed is None:
            shape = (self.threads, self.block_numbers.size)
            self._committed, self._completed = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            self._under_way: list[_Copy] = []
        return self._committed, self._completed

    def copy_async(
        self,
        sites: tuple[Site, Site],
        target: SharedArray,
        target_index: tuple[Value, ...],
        source: GlobalArray,
        source_index: tuple[Value, ...],
        count: int,
    ) -> None:
        """Issue a copy. `sites` count its reads of global and its writes to shared memory."""
        reading, writing = sites

        def again(index: tuple[Value, ...], _: Value) -> None:
            split = len(target_index)
            self.copy_async(sites, target, index[:split], source, index[split:], count)

        for site, array, index in (
            (reading, source, source_index),
            (writing, target, target_index),
        ):
            bad = self.beyond(site, array, index, count)
            if bad is not False:
                self.by_lanes(~bad, again, (*target_index, *source_index))
                return
        origin = self.check_vector(reading, source, source_index, count)
        place = self.check_vector(writing, target, target_index, count)
        frame, size = self.frame, count * target.item
        self.count(reading, source, origin, size, frame)
        self.count(writing, target, place, size, frame)
        committed, _ = self._groups()
        if target.pending is None:
            target.pending = np.full((target.size, self.block_numbers.size), -1, np.int64)
        for k in range(count):
            self.note_read(reading, source, origin + k, frame)
            self.note_write(writing, target, place + k, frame)
            target.scatter(place + k, source.gather(origin + k, frame), frame)
        mark = frame.threads[:, None].astype(np.int64) | (writing.number << 16)
        for k in range(count):
            target.pending[place + k, frame.column] = mark
        group = self.marked(committed).copy()
        self._under_way.append(_Copy(target, place, frame, writing, count, group))

    def commit(self, site: Site) -> None:
        site.hit(self.frame)
        committed, _ = self._groups()
        self._put(committed, self.marked(committed) + 1)

    def wait(self, site: Site, pending: int) -> None:
        """Complete all but the last `pending` groups of the active lanes."""
        site.hit(self.frame)
        committed, completed = self._groups()
        done = np.maximum(self.marked(completed), self.marked(committed) - pending)
        self._put(completed, done)
        still: list[_Copy] = []
        for copy in self._under_way:
            lanes = copy.lanes
            if lanes.flat:
                reached = completed[lanes.threads, lanes.blocks][:, None]
            else:
                reached = completed[np.ix_(lanes.threads, lanes.blocks)]
            finished = reached > copy.group
            if finished.all():
                self._finish(copy)
            elif finished.any():
                self._finish(_part(copy, finished))
                still.append(_part(copy, ~finished))
            else:
                still.append(copy)
        self._under_way = still

    def _finish(self, copy: _Copy) -> None:
        assert copy.array.pending is not None
        for k in range(copy.count):
            copy.array.pending[copy.address + k, copy.lanes.column] = -1
            copy.array.shadow.restamp(copy.lanes, copy.address + k, copy.site)

    def _put(self, target: np.ndarray, values: Any) -> None:
        frame = self.frame
        if frame.flat:
            target[frame.threads, frame.blocks] = values[:, 0]
        else:
            target[np.ix_(frame.threads, frame.blocks)] = values


def _part(copy: _Copy, mask: np.ndarray) -> _Copy:
    """The lanes of a copy in `mask`, as a flat list."""
    rows, columns = np.nonzero(mask)
    lanes = copy.lanes
    blocks = lanes.blocks[rows] if lanes.flat else lanes.blocks[columns]
    address = np.broadcast_to(np.asarray(copy.address), mask.shape)[rows, columns][:, None]
    part = Lanes(lanes.threads[rows], blocks, flat=True, all_blocks=False)
    group = copy.group[rows, columns][:, None]
    return _Copy(copy.array, address, part, copy.site, copy.count, group)
