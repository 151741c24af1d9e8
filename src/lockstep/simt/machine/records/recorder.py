"""A machine that also keeps a record of one of its blocks; what it counts is the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt.machine.fragments import Fragments
from lockstep.simt.machine.frames import MAX_WARPS, Fragment, Frame, Lanes
from lockstep.simt.machine.memory import GlobalArray, LocalArray, SharedArray
from lockstep.simt.machine.values import from_bfloat_bits
from lockstep.simt.types import SECTOR, WARP_SIZE

from .counters import WORD, Site, StraightLine, Transactions, distinct_sectors, wavefronts
from .recording import WAITING, Pattern, Recording, Snapshot, Span

BARRIER, END = "barrier", "end"  # in place of a phase, where there is none
LARGEST_SNAPSHOT = 1 << 15  # elements of a global array


class Recorder(Fragments):
    """A mix-in for the machine of the batch that has the recorded block."""

    arrays: dict[str, Any]
    gathers = False  # every round is recorded

    def start_recording(self, recording: Recording) -> None:
        self.recording = recording
        self.column = int(np.flatnonzero(self.block_numbers == recording.block)[0])
        self.cursor = np.zeros(recording.warps, np.int64)
        self.last_span: list[Span | None] = [None] * recording.warps
        self.warps_of: dict[bytes, np.ndarray] = {}  # by the threads that are there
        self.held: dict[str, np.ndarray] = {}
        self.worst: dict[int, Pattern] = {}
        self.transactions = RecordedTransactions(self)

    def stop_recording(self, sites: list[Site]) -> None:
        recording = self.recording
        self._snapshot(END)
        recording.length = int(self.cursor.max())
        recording.sites = sites
        recording.patterns = sorted(self.worst.values(), key=lambda p: p.site.number)

    # Time

    def here(self, lanes: Lanes) -> np.ndarray:
        """Threads of the block among `lanes`."""
        if lanes.flat:
            return lanes.threads[lanes.blocks == self.column]
        if lanes.all_blocks or self.column in lanes.blocks:
            return lanes.threads
        return lanes.threads[:0]

    def tick(self, line: StraightLine) -> None:
        super().tick(line)
        threads = self.here(self.frame)
        if not threads.size or not line.cost:
            return
        key = threads.tobytes()
        if key not in self.warps_of:
            self.warps_of[key] = np.unique(threads // WARP_SIZE)
        warps = self.warps_of[key]
        start = self.cursor[warps]
        self.recording.together.setdefault(key, []).append((start, line.cost))
        self.cursor[warps] += line.cost
        phase = self._phase_number()
        for warp, begin in zip(warps.tolist(), start.tolist(), strict=True):
            self._extend(warp, begin, begin + line.cost, phase)

    def _phase_number(self) -> int:
        phases = self.recording.phases
        if self.phase not in phases:
            phases.append(self.phase)
        return phases.index(self.phase)

    def _extend(self, warp: int, start: int, end: int, phase: int) -> None:
        last = self.last_span[warp]
        if last is not None and last.phase == phase and last.end == start:
            last.end = end
            return
        self.last_span[warp] = span = Span(warp, start, end, phase)
        self.recording.spans.append(span)

    def syncthreads(self, site: Site) -> None:
        super().syncthreads(site)
        if self.here(self.frame).size:
            if not self.phase:
                self._snapshot(BARRIER)
            now = int(self.cursor.max())
            for warp in np.flatnonzero(self.cursor < now).tolist():
                self._extend(warp, int(self.cursor[warp]), now, WAITING)
            self.cursor[:] = now
            self.recording.barriers.append(now)

    # What the block holds

    def enter_phase(self, name: str) -> str:
        before = super().enter_phase(name)
        if before and before != name and self.here(self.frame).size:
            self._snapshot(before)
        return before

    def _snapshot(self, phase: str) -> None:
        arrays = {}
        for name, values in self._contents().items():
            known = self.held.get(name)
            if known is None or not np.array_equal(known, values, equal_nan=True):
                arrays[name] = self.held[name] = values
        if phase in (BARRIER, END) and not arrays:
            return
        time = int(self.cursor.max())
        self.recording.snapshots.append(Snapshot(phase, time, arrays))

    def _contents(self) -> dict[str, np.ndarray]:
        """Shared arrays, local arrays [threads, ...], fragments [warps, 16, 16], what the kernel
        keeps in `m`, `l` and `acc` [threads], and small global arrays that it writes."""
        found: dict[str, np.ndarray] = {}
        spaces = self.recording.spaces
        for name, array in self.arrays.items():
            spaces[name] = array.space
            if isinstance(array, SharedArray):
                valid = array.valid[:, self.column if array.valid.shape[1] > 1 else 0]
                valid = valid | array.all_valid
                values = np.where(valid, array.data[:, self.column].astype(np.float32), np.nan)
                found[name] = values.reshape(array.shape)
            elif isinstance(array, LocalArray):
                valid, values = array.valid[..., self.column], array.data[..., self.column]
                values = np.where(valid, values.astype(np.float32), np.nan)
                found[name] = values.T.reshape(self.threads, *array.shape)
            elif array.shadow is not None and array.size <= LARGEST_SNAPSHOT:
                found[name] = _host_values(array)
        registers = self._registers()
        spaces.update(dict.fromkeys(registers, "local"))
        return found | registers

    def _registers(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        frame: Frame | None = self.frame
        names: set[str] = set()
        while frame is not None:
            names |= {n for n in frame.variables if n.split("[")[0] in ("m", "l", "acc")}
            frame = frame.parent
        for name in sorted(names):
            value = self.v[name]
            if isinstance(value, Fragment):
                column = self.column if value.data.shape[3] > 1 else 0
                found[name] = value.data[..., column].copy()
            elif self.frame.flat or self.frame.threads.size != self.threads:
                continue
            else:
                grid = np.broadcast_to(np.asarray(value, np.float32), self.frame.shape)
                at = int(np.searchsorted(self.frame.blocks, self.column))
                found[name] = grid[:, at].copy()
        return found

    # Accesses

    def count_fragment(
        self, site: Site, array: Any, origin: np.ndarray, stride: int, base: int
    ) -> None:
        super().count_fragment(site, array, origin, stride, base)
        frame = self.frame
        if not self.here(frame).size:
            return
        keys = frame.warp_keys
        if frame.flat:
            rows = np.flatnonzero(keys // MAX_WARPS == self.column)
            keys = keys % MAX_WARPS
        else:
            rows = np.arange(keys.size)
        at = 0 if origin.shape[1] == 1 else int(np.searchsorted(frame.blocks, self.column))
        shared = isinstance(array, SharedArray)
        for place, parts in self.fragment_places(array, origin, stride, base):
            for row in rows.tolist():
                self.note(site, int(keys[row]), place[row, :, at], np.arange(32), parts, shared)

    def note(
        self,
        site: Site,
        warp: int,
        addresses: np.ndarray,
        lanes: np.ndarray,
        words: int,
        shared: bool,
        size: int = 0,
    ) -> None:
        """Keep the access of one warp if it is the worst of its site so far."""
        filled = np.full(WARP_SIZE, addresses[0])
        filled[lanes] = addresses
        present = np.zeros((1, WARP_SIZE), bool)
        present[0, lanes] = True
        if shared:
            counts, fewest = wavefronts(filled[None, :, None] // WORD, words, present)
            cost, ideal = int(counts[0, 0]), int(fewest[0, 0])
        else:
            cost = int(distinct_sectors(filled[None, :, None] // SECTOR)[0, 0])
            ideal = min(cost, -(-lanes.size * (size or words * WORD) // SECTOR))
        known = self.worst.get(site.number)
        before = (known.transactions - known.ideal, known.transactions) if known else (-1, -1)
        if (cost - ideal, cost) > before:
            asked: list[int | None] = [None] * WARP_SIZE
            for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
                asked[lane] = address
            self.worst[site.number] = Pattern(site, warp, asked, size or words * WORD, cost, ideal)


class RecordedTransactions(Transactions):
    """Counts as before, and shows the accesses of the recorded block to the recorder."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self.seen: set[tuple] = set()

    def shared(
        self, site: Site, lanes: Lanes, element: Any, item: int, base: int, size: int
    ) -> None:
        super().shared(site, lanes, element, item, base, size)
        self._look(site, lanes, element * item + base, size, True)

    def global_(self, site: Site, lanes: Lanes, address: Any, size: int) -> None:  # type: ignore[override]
        super().global_(site, lanes, address, size)
        self._look(site, lanes, address, size, False)

    def _look(self, site: Site, lanes: Lanes, address: Any, size: int, shared: bool) -> None:
        threads = self.recorder.here(lanes)
        if not threads.size or (threads.size == 1 and site.number in self.recorder.worst):
            return
        column = self.recorder.column
        place = np.atleast_2d(np.asarray(address, np.int64))
        if lanes.flat:
            place = np.broadcast_to(place, lanes.shape)[lanes.blocks == column, 0]
        else:
            at = 0 if place.shape[1] == 1 else int(np.searchsorted(lanes.blocks, column))
            place = np.broadcast_to(place[:, at], threads.shape)
        # neither wavefronts nor sectors change when all addresses move by whole sectors
        key = (site.number, threads.tobytes(), (place - place[0] // SECTOR * SECTOR).tobytes())
        if key in self.seen:
            return
        self.seen.add(key)
        for warp in np.unique(threads // WARP_SIZE).tolist():
            mine = threads // WARP_SIZE == warp
            lanes_of = threads[mine] % WARP_SIZE
            words = max(size // WORD, 1)
            self.recorder.note(site, warp, place[mine], lanes_of, words, shared, size)


def _host_values(array: GlobalArray) -> np.ndarray:
    raw = np.lib.stride_tricks.as_strided(
        array.flat, array.shape, tuple(s * array.item for s in array.strides)
    )
    return from_bfloat_bits(raw) if array.dtype.name == "bfloat16" else raw.astype(np.float32)
