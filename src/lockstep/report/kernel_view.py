"""One launch that was traced with a record of a block, as data for the page."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.simt.machine.records.recording import WAITING, Pattern, Recording
from lockstep.simt.machine.records.trace import Trace
from lockstep.simt.occupancy import Occupancy

from .listing import listing

BINS = 240  # of the lanes' strip, over the time of the block
WARP_BINS = 3 * BINS  # of the warps'
LEVELS = 9  # of activity, written as one digit
FEW = 120  # barriers that can be told apart


def kernel_view(
    trace: Trace, sources: dict[str, Any], occupancy: Occupancy | None = None
) -> dict[str, Any]:
    """Everything the page shows of one launch. `trace` must have a recording.

    Raises ValueError where it has none.
    """
    recording = trace.recording
    if recording is None:
        raise ValueError("trace has no recording; trace the launch with record=0")
    totals = trace.totals
    return {
        "kernel": trace.kernel,
        "grid": list(trace.grid),
        "block": list(trace.block),
        "shared_bytes": trace.static_shared_bytes + trace.dynamic_shared_bytes,
        "instructions": totals.instructions,
        "active_lanes": totals.active_lanes,
        "depth": int(trace.depth.max()),
        "sectors": totals.global_sectors,
        "wavefronts": totals.shared_wavefronts,
        "conflicts": totals.bank_conflicts,
        "hazards": [str(hazard) for hazard in trace.hazards],
        "warnings": [f"line {line}: {message}" for message, _, line in trace.warnings],
        "phases": _phases(trace),
        "listing": listing(trace, sources),
        "strip": _strip(recording),
        "arrays": _arrays(recording),
        "banks": [_pattern(p) for p in recording.patterns if p.site.space == "shared"],
        "global": [_pattern(p) for p in recording.patterns if p.site.space == "global"],
        "occupancy": _occupancy(occupancy),
    }


def _phases(trace: Trace) -> list[dict[str, Any]]:
    whole = sum(phase.depth for phase in trace.phases) or 1
    return [
        {
            "name": phase.name or "(outside)",
            "share": phase.depth / whole,
            "threads": phase.thread_utilisation,
            "warps": phase.warp_utilisation,
            "instructions": phase.counts.instructions,
            "sectors": phase.counts.global_sectors,
            "conflicts": phase.counts.bank_conflicts,
        }
        for phase in trace.phases
    ]


def _strip(recording: Recording) -> dict[str, Any]:
    """Activity of every thread over time, one digit a bin, and the spans of the warps."""
    digits = np.rint(recording.activity(BINS) * LEVELS).astype(int)
    texts = ["".join(map(str, row)) for row in digits.tolist()]
    rows = list(dict.fromkeys(texts))
    number = {text: i for i, text in enumerate(rows)}
    return {
        "block": recording.block,
        "length": recording.length,
        "phases": [name or "(outside)" for name in recording.phases],
        "rows": rows,
        "threads": [number[text] for text in texts],
        "warp_bins": WARP_BINS,
        "warps": _warps(recording),
        "barriers": len(recording.barriers),
        "barrier_times": recording.barriers if len(recording.barriers) <= FEW else [],
        "busy": float(recording.activity(1).mean()),
    }


def _warps(recording: Recording) -> list[int]:
    """Warps over time: warp, first bin, bin after the last, phase, level, one after the other.
    Bins in which a warp issues nothing are left out."""
    phases, busy = recording.warp_activity(WARP_BINS)
    levels = np.ceil(busy * LEVELS - 1e-9).astype(int)
    found: list[int] = []
    for warp, (row, level) in enumerate(zip(phases, levels, strict=True)):
        changes = np.flatnonzero((np.diff(row) != 0) | (np.diff(level) != 0)) + 1
        for start, end in pairwise([0, *changes.tolist(), WARP_BINS]):
            if row[start] != WAITING:
                found += [warp, start, end, int(row[start]), int(level[start])]
    return found


def _arrays(recording: Recording) -> list[dict[str, Any]]:
    """Transactions by array and direction, over the whole launch."""
    found: dict[tuple[str, str, str], dict[str, int]] = defaultdict(
        lambda: {"needed": 0, "extra": 0, "bytes": 0}
    )
    for site in recording.sites:
        if site.space not in ("global", "shared") or not site.warps:
            continue
        reads = site.kind == "load" or (site.kind == "copy" and site.space == "global")
        sums = found[site.space, site.name, "read" if reads else "written"]
        if site.space == "global":
            sums["needed"] += site.ideal_sectors
            sums["extra"] += site.sectors - site.ideal_sectors
        else:
            sums["needed"] += site.ideal_wavefronts
            sums["extra"] += site.wavefronts - site.ideal_wavefronts
        sums["bytes"] += site.bytes
    return [
        {"space": space, "array": array, "does": does, **sums}
        for (space, array, does), sums in found.items()
    ]


def _pattern(pattern: Pattern) -> dict[str, Any]:
    site = pattern.site
    return {
        "line": site.loc.line,
        "kind": site.kind,
        "array": site.name,
        "phase": site.phase,
        "warp": pattern.warp,
        "addresses": pattern.addresses,
        "size": pattern.size,
        "cost": pattern.transactions,
        "ideal": pattern.ideal,
        "total": site.wavefronts if site.space == "shared" else site.sectors,
        "total_ideal": site.ideal_wavefronts if site.space == "shared" else site.ideal_sectors,
    }


def _occupancy(occupancy: Occupancy | None) -> dict[str, Any] | None:
    if occupancy is None:
        return None
    return {
        "gpu": occupancy.gpu,
        "registers": occupancy.registers,
        "shared": occupancy.shared,
        "threads": occupancy.threads,
        "limits": occupancy.limits,
        "blocks": occupancy.blocks,
        "warps": occupancy.warps,
        "max_warps": occupancy.max_warps,
        "limited_by": list(occupancy.limited_by),
    }
