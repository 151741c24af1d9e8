"""The trace of a run: its tally, printable, put together from the counters of the machine."""

from __future__ import annotations

import linecache
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from lockstep.simt import ir
from lockstep.simt.errors import HazardError

from .recording import Recording
from .tally import Counts, Index3, Line, Phase, Tally

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lockstep.simt.machine.workers import Part


class Trace(Tally):
    """A tally that can be printed: `rich.print(trace)` shows the annotated source."""

    def check(self) -> Trace:
        """Raise `HazardError` listing the hazards, if there are any; returns the trace."""
        if self.hazards:
            raise HazardError("\n".join(str(h) for h in self.hazards))
        return self

    def __rich__(self) -> RenderableType:
        from .listing import render

        return render(self)


def collect(
    kernel: ir.Kernel,
    counted: Part,
    grid: Index3,
    block: Index3,
    static_bytes: int,
    dynamic_bytes: int,
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

    for run in counted.lines:
        for (file, number), kinds in run.operations.items():
            line = line_at(file, number, run.phase)
            line.executions += run.warps
            line.lanes += run.lanes
            for counts in (line.counts, totals, phases.setdefault(run.phase, Counts())):
                counts.add_instructions(kinds, run.warps, run.lanes)
    for site in counted.sites:
        at = line_at(site.loc.file, site.loc.line, site.phase).counts
        for counts in (at, totals, phases.setdefault(site.phase, Counts())):
            counts.add_site(site)
    blocks = int(np.prod(grid))
    depth = np.zeros(blocks, np.int64)
    by_phase: Counter = Counter()
    for numbers, batch in counted.depths:
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
        devices=dict(kernel.device_sources),
        grid=grid,
        block=block,
        static_shared_bytes=static_bytes,
        dynamic_shared_bytes=dynamic_bytes,
        totals=totals,
        lines=sorted(lines.values(), key=lambda line: (line.file, line.number)),
        phases=reports,
        depth=depth,
        hazards=list(counted.hazards.found.values()),
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
