"""What a run did, as data: per source line, per phase and in total."""

from __future__ import annotations

import linecache
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.simt import ir
from lockstep.simt.errors import HazardError

from .counters import SECTOR, Depth, Site
from .hazards import Hazard, Hazards
from .recording import Recording

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .program import Program

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
        counted = {"barrier": "barriers", "warp barrier": "warp_barriers"}
        counted |= {
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
class Trace:
    """Everything the machine saw. Printable: `rich.print(trace)` shows the annotated source."""

    kernel: str
    file: str
    first_line: int
    source: tuple[str, ...]
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

    def check(self) -> Trace:
        """Raise `HazardError` listing the hazards, if there are any; returns the trace."""
        if self.hazards:
            raise HazardError("\n".join(str(h) for h in self.hazards))
        return self

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

    def __rich__(self) -> RenderableType:
        from .listing import render

        return render(self)


def collect(
    kernel: ir.Kernel,
    program: Program,
    hazards: Hazards,
    grid: Index3,
    block: Index3,
    static_bytes: int,
    dynamic_bytes: int,
    batches: list[tuple[np.ndarray, Depth]],
    seconds: float,
    recording: Recording | None = None,
) -> Trace:
    """Put the counters of a run together."""
    lines: dict[tuple[str, int], Line] = {}
    phases: dict[str, Counts] = {}
    totals = Counts()

    def line_at(file: str, number: int, phase: str) -> Line:
        key = (file, number)
        if key not in lines:
            text = linecache.getline(file, number).rstrip("\n")
            lines[key] = Line(file, number, text, phase, 0, 0, Counts())
        return lines[key]

    for run in program.lines:
        for (file, number), kinds in run.operations.items():
            line = line_at(file, number, run.phase)
            line.executions += run.warps
            line.lanes += run.lanes
            for counts in (line.counts, totals, phases.setdefault(run.phase, Counts())):
                counts.add_instructions(kinds, run.warps, run.lanes)
    for site in program.sites:
        at = line_at(site.loc.file, site.loc.line, site.phase).counts
        for counts in (at, totals, phases.setdefault(site.phase, Counts())):
            counts.add_site(site)
    blocks = int(np.prod(grid))
    depth = np.zeros(blocks, np.int64)
    by_phase: Counter = Counter()
    for numbers, batch in batches:
        depth[numbers] = batch.total
        for name, steps in batch.by_phase.items():
            by_phase[name] += int(steps.sum())
    threads = int(np.prod(block))
    reports = [_phase(n, c, by_phase[n], threads) for n, c in phases.items() if c.instructions]
    return Trace(
        kernel=kernel.name,
        file=kernel.source.file,
        first_line=kernel.source.first_line,
        source=kernel.source.lines,
        grid=grid,
        block=block,
        static_shared_bytes=static_bytes,
        dynamic_shared_bytes=dynamic_bytes,
        totals=totals,
        lines=sorted(lines.values(), key=lambda line: (line.file, line.number)),
        phases=reports,
        depth=depth,
        hazards=list(hazards.found.values()),
        warnings=[(w.message, w.loc.file, w.loc.line) for w in kernel.warnings],
        seconds=seconds,
        recording=recording,
    )


def _phase(name: str, counts: Counts, depth: int, threads: int) -> Phase:
    warps = -(-threads // 32)
    thread_slots, warp_slots = depth * threads, depth * warps
    return Phase(
        name,
        counts,
        depth,
        counts.lane_instructions / thread_slots if thread_slots else 0.0,
        counts.instructions / warp_slots if warp_slots else 0.0,
    )
