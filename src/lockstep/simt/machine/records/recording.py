"""The record of one block in order: when each warp worked or waited, what it held, how it accessed.

Time is counted in warp instructions, as the depth of a trace is: a warp advances by what it issues,
and a block barrier brings all warps of the block to the time of the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lockstep.simt.types import WARP_SIZE

from .counters import Site

WAITING = -1  # in place of a phase


@dataclass
class Span:
    """A warp in one phase, or waiting at a barrier, from time `start` to `end`."""

    warp: int
    start: int
    end: int
    phase: int  # index into Recording.phases, or WAITING


@dataclass
class Pattern:
    """The access of one warp, at a site, that costs most beyond what its width asks for."""

    site: Site
    warp: int
    addresses: list[int | None]  # byte per lane; None for a lane that is not there
    size: int  # bytes of one lane
    transactions: int  # wavefronts or sectors
    ideal: int


@dataclass
class Snapshot:
    """The contents of the block when a phase ended, at a barrier outside of all phases, or at the
    end. Arrays that are as they were before are left out."""

    phase: str
    time: int
    arrays: dict[str, np.ndarray]  # by name; NaN where nothing has been written


@dataclass
class Recording:
    """One block of a run. `Launch.trace(record=block)` makes it."""

    block: int
    threads: int
    length: int = 0  # time at which the last warp ended
    phases: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    barriers: list[int] = field(default_factory=list)  # times
    patterns: list[Pattern] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)  # with the counts of the whole run
    spaces: dict[str, str] = field(default_factory=dict)  # of the arrays in snapshots
    # threads that executed together -> start and end times, one row per execution and warp
    together: dict[bytes, list[tuple[np.ndarray, int]]] = field(default_factory=dict)

    @property
    def warps(self) -> int:
        return -(-self.threads // WARP_SIZE)

    def activity(self, bins: int) -> np.ndarray:
        """Share of each time bin in which a thread executes, [threads, bins], 0 to 1."""
        edges = np.linspace(0, max(self.length, 1), bins + 1)
        busy = np.zeros((self.threads, bins))
        for key, runs in self.together.items():
            threads = np.frombuffer(key, np.int64)
            warps, row = np.unique(threads // WARP_SIZE, return_inverse=True)
            starts = np.array([start for start, _ in runs])  # [runs, warps]
            costs = np.array([cost for _, cost in runs])
            for i in range(warps.size):
                covered = _covered(starts[:, i], costs, edges)
                busy[threads[row == i]] += covered
        return busy / np.diff(edges)

    def warp_activity(self, bins: int) -> tuple[np.ndarray, np.ndarray]:
        """The phase that a warp spends most of a time bin in (WAITING where it issues nothing), and
        the share of the bin in which it issues: both [warps, bins]."""
        edges = np.linspace(0, max(self.length, 1), bins + 1)
        covered = np.zeros((len(self.phases), self.warps, bins))
        spans: dict[tuple[int, int], list[Span]] = {}
        for span in self.spans:
            if span.phase != WAITING:
                spans.setdefault((span.phase, span.warp), []).append(span)
        for place, mine in spans.items():
            starts = np.array([span.start for span in mine])
            covered[place] = _covered(starts, np.array([s.end - s.start for s in mine]), edges)
        busy = covered.sum(axis=0)
        phase = np.where(busy > 0, covered.argmax(axis=0), WAITING)
        return phase, busy / np.diff(edges)


def _covered(starts: np.ndarray, costs: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How much of each bin the intervals, ordered and apart, cover."""
    done = np.cumsum(costs)
    times = np.stack([starts, starts + costs], axis=1).reshape(-1)
    amounts = np.stack([done - costs, done], axis=1).reshape(-1)
    return np.diff(np.interp(edges, times, amounts, left=0, right=done[-1]))
