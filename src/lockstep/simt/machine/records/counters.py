"""Counting: instructions, memory transactions and the critical path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.simt.ir import Location
from lockstep.simt.machine.frames import MAX_WARPS, Frame, Lanes
from lockstep.simt.types import SECTOR, WARP_SIZE

BANKS = 32
WORD = 4  # bytes per bank


@dataclass
class Site:
    """One place in the source that touches memory, branches, synchronises or talks to lanes."""

    number: int
    kind: str  # "load", "store", "atomic", "copy", "branch", "barrier", "shuffle", ...
    space: str  # "global", "shared", "local" or ""
    name: str  # array, function or mode
    loc: Location
    phase: str
    warps: int = 0  # warp instructions
    lanes: int = 0
    requests: int = 0  # global: one per warp instruction
    sectors: int = 0
    ideal_sectors: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    worst_wavefronts: int = 0  # of one warp instruction
    bytes: int = 0  # asked for by the lanes
    divergent: int = 0  # branches: warps whose lanes disagreed

    def hit(self, lanes: Lanes, times: int = 1) -> None:
        self.warps += lanes.warps * times
        self.lanes += lanes.lanes * times


@dataclass
class StraightLine:
    """Statements that always execute together, and what one execution of them costs."""

    phase: str
    operations: dict[tuple[str, int], Counter] = field(default_factory=dict)  # (file, line)
    cost: int = 0
    executions: int = 0
    warps: int = 0
    lanes: int = 0

    def add(self, loc: Location, kinds: Counter) -> None:
        self.operations.setdefault((loc.file, loc.line), Counter()).update(kinds)
        self.cost += sum(kinds.values())


class Patterns:
    """Transactions of one warp as a function of its 32 addresses.

    Neither the number of distinct sectors nor the worst bank changes when all addresses move
    together, so a warp is looked up by its addresses relative to the first lane's, and each
    pattern is worked out once. Patterns are told apart by three linear hashes whose multipliers
    are small enough for exact sums in float64 (and big enough for 60 random bits in all).
    """

    def __init__(self, measure: Callable[[np.ndarray], np.ndarray]):
        self.measure = measure
        self.known: dict[int, int] = {}
        multipliers = np.random.default_rng(2).integers(1, 2**20, (3, WARP_SIZE))
        self.multipliers = multipliers.astype(np.float64)

    def __call__(self, units: np.ndarray) -> np.ndarray:
        """`units` [warps, 32, columns]: sector or word numbers. Returns [warps, columns]."""
        relative = (units - units[:, :1]).astype(np.float64)
        hashes = (self.multipliers @ relative).astype(np.int64)  # [warps, 3, columns]
        mixed = hashes[:, 0] * 0x9E3779B97F4A7C1 + hashes[:, 1] * 0x2545F4914F6CDD1D + hashes[:, 2]
        keys, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
        known = self.known
        new = [i for i, key in enumerate(keys.tolist()) if key not in known]
        if new:
            warp, column = np.unravel_index(first[new], mixed.shape)
            measured = self.measure(relative[warp, :, column].astype(np.int64))
            known.update(zip(keys[new].tolist(), measured.tolist(), strict=True))
        counts = np.array([known[key] for key in keys.tolist()])
        return counts[inverse.reshape(mixed.shape)]


def _distinct(units: np.ndarray) -> np.ndarray:
    """How many different numbers each row holds."""
    ordered = np.sort(units, axis=1)
    return 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)


def _worst_bank(words: np.ndarray) -> np.ndarray:
    """The largest number of different words one bank has to serve, per row."""
    ordered = np.sort(words, axis=1)
    fresh = np.ones(ordered.shape, bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    row, lane = np.nonzero(fresh)
    bank = ordered[row, lane] % BANKS
    return np.bincount(row * BANKS + bank, minlength=len(words) * BANKS).reshape(-1, BANKS).max(1)


distinct_sectors = Patterns(_distinct)
worst_bank = Patterns(_worst_bank)


def wavefronts(
    words: np.ndarray, parts: int, present: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Wavefronts of accesses `parts` words wide, and how few they would be without conflicts.

    `words` [warps, 32, columns] are the first words that the lanes ask for, `present` [warps, 32]
    says which lanes there are; both results are [warps, columns].

    A wide access is served for a piece of the warp at a time: a half of it at 8 bytes, a quarter at
    16. Two neighbouring pieces go together where each lane asks for the same as the lane beside it,
    and a piece without lanes costs nothing.
    """
    if parts == 1:
        counts = worst_bank(words)
        return counts, np.ones_like(counts)
    if present is None:
        present = np.ones(words.shape[:2], bool)
    total = np.zeros((words.shape[0], words.shape[2]), np.int64)
    fewest = np.zeros_like(total)
    pairs = parts // 2
    for asked, there in zip(
        np.split(words, pairs, axis=1), np.split(present, pairs, axis=1), strict=True
    ):
        apart, pieces = np.zeros_like(total), np.zeros_like(total)
        for piece, lanes in zip(
            np.split(asked, 2, axis=1), np.split(there, 2, axis=1), strict=True
        ):
            some = lanes.any(axis=1)[:, None]
            apart += np.where(some, _piece(piece, lanes, parts), 0)
            pieces += some
        together, alike = _neighbours(asked, there, parts)
        total += np.where(alike, together, apart)
        fewest += np.where(alike, np.minimum(pieces, 1), pieces)
    return total, fewest


def _piece(words: np.ndarray, present: np.ndarray, parts: int) -> np.ndarray:
    """Wavefronts of lanes that are served together, 32 words of them, [warps, columns]."""
    if not present.all():
        # an absent lane asks for what the first one present does
        stand_in = np.where(present, np.arange(present.shape[1]), present.argmax(axis=1)[:, None])
        words = np.take_along_axis(words, stand_in[:, :, None], axis=1)
    spread = words[:, :, None, :] + np.arange(parts)[:, None]
    return worst_bank(spread.reshape(len(words), WARP_SIZE, -1))


def _neighbours(
    words: np.ndarray, present: np.ndarray, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Wavefronts of two pieces that go together, and where they do: [warps, columns]."""
    even, odd = words[:, ::2], words[:, 1::2]
    has_even, has_odd = present[:, ::2], present[:, 1::2]
    alike = ((even == odd) | ~(has_even & has_odd)[:, :, None]).all(axis=1)
    one = np.where(has_even[:, :, None], even, odd)
    some = present.any(axis=1)[:, None]
    return np.where(some, _piece(one, has_even | has_odd, parts), 0), alike


def per_warp(lanes: Lanes, address: np.ndarray) -> np.ndarray:
    """Addresses [rows or 1, columns] as [warps, 32, columns]; absent lanes repeat a present one."""
    rows, columns = lanes.threads.size, address.shape[1]
    if address.shape[0] == 1 and rows != 1:
        address = np.broadcast_to(address, (rows, columns))
    if lanes.whole_warps:
        return address.reshape(-1, WARP_SIZE, columns)
    return address[lanes.filled_row]


class Transactions:
    """Sectors and wavefronts of accesses, with a memo for address patterns seen before."""

    def __init__(self) -> None:
        self.memo: dict[tuple, tuple[int, int, int]] = {}

    def shared(
        self, site: Site, lanes: Lanes, element: Any, item: int, base: int, size: int
    ) -> None:
        """Count a shared-memory access of `size` bytes per lane at elements of `item` bytes."""
        site.hit(lanes)
        site.bytes += lanes.lanes * size
        parts = max(size // WORD, 1)
        if not isinstance(element, np.ndarray) or element.size == 1:
            if parts <= 2:  # all lanes ask for the same
                self._note(site, lanes.warps, lanes.warps, 1)
                return
            element = np.broadcast_to(element, (1, 1))
        if lanes.flat or element.shape[1] != 1:
            self._note(site, *self._wavefronts(lanes, element * item + base, parts))
            return
        # moving all addresses by whole words changes nothing
        first = element[0, 0]
        relative = element - first
        key = (item, size, int(first * item + base) % WORD, lanes.layout, relative.tobytes())
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._wavefronts(lanes, element * item + base, parts)
        total, fewest, worst = found
        self._note(site, total * lanes.blocks.size, fewest * lanes.blocks.size, worst)

    @staticmethod
    def _wavefronts(lanes: Lanes, address: np.ndarray, parts: int) -> tuple[int, int, int]:
        present = None if lanes.whole_warps else lanes.row_at >= 0
        counts, fewest = wavefronts(per_warp(lanes, address) // WORD, parts, present)
        return int(counts.sum()), int(fewest.sum()), int(counts.max())

    @staticmethod
    def _note(site: Site, wavefronts: int, fewest: int, worst: int) -> None:
        site.wavefronts += wavefronts
        site.ideal_wavefronts += fewest
        site.worst_wavefronts = max(site.worst_wavefronts, worst)

    @staticmethod
    def global_(site: Site, lanes: Lanes, address: Any, size: int) -> None:
        """Count a global-memory access of `size` bytes per lane at byte `address`."""
        site.hit(lanes)
        site.requests += lanes.warps
        site.bytes += lanes.lanes * size
        if not isinstance(address, np.ndarray) or address.size == 1:
            site.sectors += lanes.warps
            site.ideal_sectors += lanes.warps
            return
        repeat = lanes.blocks.size if not lanes.flat and address.shape[1] == 1 else 1
        sectors = distinct_sectors(per_warp(lanes, address) // SECTOR)  # [warps, columns]
        needed = -(-lanes.lanes_per_warp()[:, None] * size // SECTOR)
        site.sectors += int(sectors.sum()) * repeat
        site.ideal_sectors += int(np.minimum(sectors, needed).sum()) * repeat


class Depth:
    """Warp instructions on the critical path of each block.

    Between two barriers the slowest warp decides; intervals add up. Kept for the block and for
    each phase by itself.
    """

    def __init__(self, warps: int, blocks: int):
        self.shape = (warps, blocks)
        self.interval: dict[str, np.ndarray] = {}  # phase -> [warps, blocks] since the barrier
        self.total = np.zeros(blocks, np.int64)
        self.by_phase: dict[str, np.ndarray] = {}

    def charge(self, frame: Frame, phase: str) -> None:
        """Bring the account of one frame up to date."""
        if not frame.issued:
            return
        steps = self.interval.get(phase)
        if steps is None:
            steps = self.interval[phase] = np.zeros(self.shape, np.int64)
        if frame.flat:
            keys = frame.warp_keys
            steps[keys % MAX_WARPS, keys // MAX_WARPS] += frame.issued
        elif frame.all_blocks:
            steps[frame.warp_keys] += frame.issued
        else:
            steps[np.ix_(frame.warp_keys, frame.blocks)] += frame.issued
        frame.issued = 0

    def join(self, blocks: np.ndarray | None = None) -> None:
        """All warps of these blocks (None: of all) have met."""
        if not self.interval:
            return
        columns = slice(None) if blocks is None else blocks
        together = sum(self.interval.values())
        self.total[columns] += together[:, columns].max(axis=0)
        for phase, steps in self.interval.items():
            spent = self.by_phase.setdefault(phase, np.zeros(self.shape[1], np.int64))
            spent[columns] += steps[:, columns].max(axis=0)
            steps[:, columns] = 0
