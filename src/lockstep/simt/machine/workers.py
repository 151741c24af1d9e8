"""A launch in several threads: each runs batches of its own and counts by itself.

NumPy lets other threads run while it works on large arrays, so two threads keep two cores busy.
No result may depend on which thread is first: every part has counters, hazards and shadows of its
own, and they are put together in the order of the blocks. Where blocks of two parts touch the same
memory and one of them writes, the order does matter: the launch is then run again by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from lockstep.environment import usable_cores
from lockstep.simt import ir

from .counters import Depth, Site, StraightLine
from .global_shadow import GlobalShadow
from .hazards import GLOBAL_RACE, Hazards
from .memory import GlobalArray

MOST = 4  # threads: the Python code of all of them takes turns
SITE_SUMS = (
    "warps",
    "lanes",
    "requests",
    "sectors",
    "ideal_sectors",
    "wavefronts",
    "ideal_wavefronts",
    "bytes",
    "divergent",
)
LINE_SUMS = ("executions", "warps", "lanes")

Batches = list[np.ndarray]  # block numbers


@dataclass
class Part:
    """Batches of blocks that follow one another: what they counted and found."""

    sites: list[Site]
    lines: list[StraightLine]
    hazards: Hazards
    arrays: dict[str, GlobalArray]
    depths: list[tuple[np.ndarray, Depth]]  # block numbers of a batch, and its account


def available() -> int:
    """The number of threads that have a core here."""
    return min(MOST, usable_cores())


def divide(blocks: int, most: int) -> Batches:
    """Block numbers in as few batches of up to `most` as there can be, of like sizes."""
    return np.array_split(np.arange(blocks), -(-blocks // most))


def communicates(kernel: ir.Kernel) -> bool:
    """Whether a block may learn from another what it has done: by a fence or a global atomic."""
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Fence):
            return True
        for expr in ir.expressions(stmt):
            if isinstance(expr, ir.Atomic) and expr.array.space is ir.Space.GLOBAL:
                return True
    return False


def side_by_side(run: Callable[[Batches], Part], batches: Batches, workers: int) -> Part | None:
    """The launch as one part, by `workers` threads; None where blocks met in global memory."""
    ends = [round(i * len(batches) / workers) for i in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        shares = (batches[a:b] for a, b in pairwise(ends))
        parts = list(pool.map(run, shares))
    return None if _met(parts) else _together(parts)


def _met(parts: list[Part]) -> bool:
    """Whether blocks touched the same global memory, one of them writing."""
    if any(h.kind == GLOBAL_RACE for part in parts for h in part.hazards.found.values()):
        return True
    for one, other in combinations(parts, 2):
        for name, array in one.arrays.items():
            mine, theirs = array.shadow, other.arrays[name].shadow
            if mine is not None and theirs is not None and _touch(mine, theirs):
                return True
    return False


def _touch(one: GlobalShadow, other: GlobalShadow) -> bool:
    pairs = ((one.written(), other.touched()), (one.touched(), other.written()))
    return any(bool((a & b).any()) for a, b in pairs)


def _together(parts: list[Part]) -> Part:
    """The sum of the parts; of hazards of one kind and place, the first stands for all."""
    whole, *others = parts
    for part in others:
        for mine, theirs in zip(whole.sites, part.sites, strict=True):
            _add(mine, theirs, SITE_SUMS)
            mine.worst_wavefronts = max(mine.worst_wavefronts, theirs.worst_wavefronts)
        for line, more in zip(whole.lines, part.lines, strict=True):
            _add(line, more, LINE_SUMS)
        for key, hazard in part.hazards.found.items():
            known = whole.hazards.found.setdefault(key, hazard)
            if known is not hazard:
                known.count += hazard.count
    return replace(whole, depths=[depth for part in parts for depth in part.depths])


def _add(into: Site | StraightLine, more: Site | StraightLine, names: tuple[str, ...]) -> None:
    for name in names:
        setattr(into, name, getattr(into, name) + getattr(more, name))
