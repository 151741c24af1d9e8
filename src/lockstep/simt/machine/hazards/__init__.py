"""Hazards: what the machine saw go wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lockstep.simt.ir import Location
from lockstep.simt.machine.records.counters import Site

from .block_order import BlockOrder

Index3 = tuple[int, int, int]

RACE = "race"
GLOBAL_RACE = "race between blocks"
DIVERGENT_BARRIER = "divergent barrier"
INACTIVE_LANE = "inactive lane"
OUT_OF_BOUNDS = "out of bounds"
UNINITIALISED_SHARED = "uninitialised shared memory"
UNINITIALISED_REGISTER = "uninitialised register"
UNINITIALISED_LOCAL = "uninitialised local array"
MISALIGNED = "misaligned access"
ASYNC = "asynchronous copy not waited for"
NOT_WARP_UNIFORM = "fragment operand differs within a warp"
PARTIAL_WARP = "fragment used by a partial warp"


@dataclass
class Hazard:
    """One defect: its kind, where it happened first, and how often the place saw it again."""

    kind: str
    message: str
    loc: Location
    thread: Index3
    block: Index3
    other_loc: Location | None = None
    other_thread: Index3 | None = None  # None with `other_loc` set: several threads
    other_block: Index3 | None = None
    count: int = 1

    def to_json(self) -> dict:
        other = None
        if self.other_loc is not None:
            other = {
                "file": self.other_loc.file,
                "line": self.other_loc.line,
                "thread": self.other_thread,
                "block": self.other_block,
            }
        return {
            "kind": self.kind,
            "message": self.message,
            "file": self.loc.file,
            "line": self.loc.line,
            "thread": self.thread,
            "block": self.block,
            "other": other,
            "count": self.count,
        }

    def __str__(self) -> str:
        where = f"{self.loc.file}:{self.loc.line}: {self.kind}: {self.message}"
        who = f"thread {self.thread} of block {self.block}"
        if self.other_loc is None:
            return f"{where} ({who}; {self.count}x)"
        whom = "several threads" if self.other_thread is None else f"thread {self.other_thread}"
        if self.other_block is not None:
            whom += f" of block {self.other_block}"
        return f"{where} ({who} against {whom} at line {self.other_loc.line}; {self.count}x)"


@dataclass
class Hazards:
    """All hazards of a run, one per kind, place, subject and place of the other access."""

    block: Index3
    grid: Index3
    sites: list[Site]
    found: dict[tuple, Hazard] = field(default_factory=dict)
    order: BlockOrder | None = None  # of kernels that fence

    def __post_init__(self) -> None:
        self.is_atomic = np.array([site.kind == "atomic" for site in self.sites], bool)

    def seen(self, *key: object) -> bool:
        """Whether such a hazard is known already; counts it if so."""
        hazard = self.found.get(key)
        if hazard is not None:
            hazard.count += 1
        return hazard is not None

    def report(
        self,
        kind: str,
        site: Site,
        message: str,
        thread: int,
        block: int,
        subject: str = "",
        other_site: int | None = None,
        other_thread: int | None = None,
        other_block: int | None = None,
    ) -> None:
        key = (kind, site.number, subject, other_site)
        if self.seen(*key):
            return
        other = None if other_site is None else self.sites[other_site].loc
        self.found[key] = Hazard(
            kind,
            message,
            site.loc,
            _unravel(thread, self.block),
            _unravel(block, self.grid),
            other,
            None if other_thread is None else _unravel(other_thread, self.block),
            None if other_block is None else _unravel(other_block, self.grid),
        )


def _unravel(linear: int, extent: Index3) -> Index3:
    x, y, _ = extent
    return linear % x, linear // x % y, linear // (x * y)
