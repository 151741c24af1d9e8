"""The counts of a run, as data: per source line, per phase and in total."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lockstep.simt import ir
from lockstep.simt.machine.hazards import Hazard
from lockstep.simt.types import SECTOR

from .counters import Site
from .recording import Recording

Index3 = tuple[int, int, int]


@dataclass
class Counts:
    """Everything counted for a line, a phase or the run. Instructions are warp instructions."""

    instructions: int = 0
    lane_instructions: int = 0
    by_kind: Counter = field(default_factory=Counter)
    global_requests: int = 0
    global_sectors: int = 0
    ideal_sectors: int = 0
    global_load_sectors: int = 0
    global_store_sectors: int = 0
    shared_accesses: int = 0
    shared_wavefronts: int = 0
    ideal_wavefronts: int = 0
    shared_load_wavefronts: int = 0
    shared_store_wavefronts: int = 0
    barriers: int = 0  # warps at syncthreads
    warp_barriers: int = 0  # warps at syncwarp
    shuffles: int = 0
    votes: int = 0
    fragment_operations: int = 0
    divergent_branches: int = 0
    bytes: Counter = field(default_factory=Counter)  # asked for by lanes, by space

    @property
    def active_lanes(self) -> float:
        """Mean active lanes of a warp instruction."""
        return self.lane_instructions / self.instructions if self.instructions else 0.0

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts beyond what the width of the accesses asks for."""
        return self.shared_wavefronts - self.ideal_wavefronts

    @property
    def sector_bytes(self) -> int:
        """Bytes moved to and from global memory, in whole sectors."""
        return self.global_sectors * SECTOR

    def add_instructions(self, kinds: Counter, warps: int, lanes: int) -> None:
        for kind, n in kinds.items():
            self.by_kind[kind] += n * warps
            self.instructions += n * warps
            self.lane_instructions += n * lanes

    def add_site(self, site: Site) -> None:
        reads = site.kind == "load" or (site.kind == "copy" and site.space == "global")
        if site.space:
            self.bytes[site.space] += site.bytes
        if site.space == "global":
            self.global_requests += site.requests
            self.global_sectors += site.sectors
            self.ideal_sectors += site.ideal_sectors
            self.global_load_sectors += site.sectors if reads else 0
            self.global_store_sectors += 0 if reads else site.sectors
        elif site.space == "shared":
            self.shared_accesses += site.warps
            self.shared_wavefronts += site.wavefronts
            self.ideal_wavefronts += site.ideal_wavefronts
            self.shared_load_wavefronts += site.wavefronts if reads else 0
            self.shared_store_wavefronts += 0 if reads else site.wavefronts
        self.divergent_branches += site.divergent
        counted = {
            "barrier": "barriers",
            "warp barrier": "warp_barriers",
            "shuffle": "shuffles",
            "vote": "votes",
            "mma": "fragment_operations",
            "fragment": "fragment_operations",
        }
        if site.kind in counted:
            name = counted[site.kind]
            setattr(self, name, getattr(self, name) + site.warps)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["by_kind"], data["bytes"] = dict(self.by_kind), dict(self.bytes)
        data |= {
            "active_lanes": self.active_lanes,
            "bank_conflicts": self.bank_conflicts,
            "sector_bytes": self.sector_bytes,
        }
        return data


@dataclass
class Line:
    """One source line: how many warps and threads executed it, and what that cost."""

    file: str
    number: int
    text: str
    phase: str
    executions: int  # by warps
    lanes: int  # by threads
    counts: Counts

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line": self.number,
            "text": self.text,
            "phase": self.phase,
            "executions": self.executions,
            "lanes": self.lanes,
            **self.counts.to_json(),
        }


@dataclass
class Phase:
    """A named region. Utilisation compares with all threads (warps) of the block being busy for as
    long as the slowest warp of each barrier interval."""

    name: str
    counts: Counts
    depth: int  # summed over blocks
    thread_utilisation: float
    warp_utilisation: float

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "depth": self.depth,
            "thread_utilisation": self.thread_utilisation,
            "warp_utilisation": self.warp_utilisation,
            **self.counts.to_json(),
        }


@dataclass
class Tally:
    """Everything the machine counted and found in one run."""

    kernel: str
    file: str
    first_line: int
    source: tuple[str, ...]
    devices: dict[str, ir.Source]  # device functions that were inlined, by name
    grid: Index3
    block: Index3
    static_shared_bytes: int
    dynamic_shared_bytes: int
    totals: Counts
    lines: list[Line]
    phases: list[Phase]
    depth: np.ndarray  # [blocks] warp instructions on the critical path of each block
    hazards: list[Hazard]
    warnings: list[tuple[str, str, int]]  # message, file, line
    seconds: float  # the machine's own time
    recording: Recording | None = None  # of one block, where that was asked for

    def line(self, number: int, file: str | None = None) -> Line:
        """The report of one source line. Raises KeyError if it was never executed."""
        for line in self.lines:
            if line.number == number and line.file == (file or self.file):
                return line
        raise KeyError(f"line {number} was not executed")

    def phase(self, name: str) -> Phase:
        """The report of one phase. Raises KeyError if the kernel has none of that name."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(f"no phase '{name}'; there are {[p.name for p in self.phases]}")

    def to_json(self) -> dict[str, Any]:
        """The whole trace as dictionaries, lists and numbers."""
        return {
            "kernel": self.kernel,
            "file": self.file,
            "grid": list(self.grid),
            "block": list(self.block),
            "static_shared_bytes": self.static_shared_bytes,
            "dynamic_shared_bytes": self.dynamic_shared_bytes,
            "seconds": self.seconds,
            "totals": self.totals.to_json(),
            "depth": {
                "max": int(self.depth.max()),
                "mean": float(self.depth.mean()),
                "per_block": self.depth.tolist(),
            },
            "phases": [p.to_json() for p in self.phases],
            "lines": [line.to_json() for line in self.lines],
            "hazards": [h.to_json() for h in self.hazards],
            "warnings": [{"message": m, "file": f, "line": n} for m, f, n in self.warnings],
        }
