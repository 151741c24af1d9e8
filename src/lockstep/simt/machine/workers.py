"""A launch in several processes: each runs batches of its own and counts by itself.

Most of the machine is Python code, for which threads of one process would take turns. So the
process forks, and its children send back what they counted and what they wrote to global memory.
No result may depend on which child is first: every part has counters, hazards and shadows of its
own, and they are put together in the order of the blocks. Where blocks of two parts touch the same
memory and one of them writes, the order does matter: one process then runs the launch again.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple, NoReturn

import numpy as np

from lockstep.environment import usable_cores
from lockstep.simt import ir

from .hazards import GLOBAL_RACE, Hazards
from .memory import GlobalArray
from .records.counters import Depth, Site, StraightLine

MOST = 4  # processes: each has arrays of its own
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


class Footprint(NamedTuple):
    """The accesses of the blocks of a part to one array in global memory, by element of its
    span."""

    written: np.ndarray
    touched: np.ndarray  # written or read
    contents: np.ndarray  # of those that were written


Memory = dict[str, Footprint]  # by array
Answer = tuple[Part, Memory]
Run = Callable[[Batches, Callable[[int], None]], Part]  # batches, and what is told of blocks done


def available() -> int:
    """The number of processes that have a core here; one where processes cannot be forked."""
    return min(MOST, usable_cores()) if sys.platform == "linux" else 1


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


def side_by_side(
    run: Run, batches: Batches, workers: int, done: Callable[[int], None]
) -> tuple[Part, list[Memory]] | None:
    """The launch as one part, by `workers` children, and what each did to global memory, which
    here is as it was. None where blocks met in global memory, or where a child failed."""
    ends = [round(i * len(batches) / workers) for i in range(workers + 1)]
    shares = [batches[a:b] for a, b in pairwise(ends)]
    children: list[_Child] = []
    answers: list[Answer] = []
    try:
        for share in shares:
            children.append(_Child(run, share))
        for child, share in zip(children, shares, strict=True):
            answer = child.result()
            if answer is None:
                return None
            answers.append(answer)
            done(sum(batch.size for batch in share))
    finally:
        for child in children:
            child.end()
    parts, memories = ([*column] for column in zip(*answers, strict=True))
    return None if _met(parts, memories) else (_together(parts), memories)


class _Child:
    """A forked process that runs a share of the batches."""

    def __init__(self, run: Run, share: Batches):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold: a child waits for none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _answer(run, share, writing)
        os.close(writing)
        self.pipe = os.fdopen(reading, "rb")

    def result(self) -> Answer | None:
        """The results of the child; None if it failed."""
        try:
            found: Answer = pickle.load(self.pipe)
        except (EOFError, pickle.UnpicklingError):
            return None
        return found

    def end(self) -> None:
        """Wait for the child, which is stopped if it is not done."""
        self.pipe.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _answer(run: Run, share: Batches, pipe: int) -> NoReturn:
    """Send what `run` finds, in the child, and end it without the parent's clean-up. A child that
    fails sends nothing: the launch is run again, and fails where it can be seen."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its children
        gc.freeze()  # collections then leave alone what the parent imported
        part = run(share, lambda _: None)
        answer: Answer = (replace(part, arrays={}), _footprints(part.arrays))
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(answer, file, pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)


def _footprints(arrays: dict[str, GlobalArray]) -> Memory:
    """The footprints of the arrays that the kernel may write, and of those that share memory with
    one."""
    found = {}
    for name, array in arrays.items():
        if array.shadow is not None:
            span = slice(array.shadow_start, array.shadow_start + array.size)
            written = array.shadow.written()[span]
            found[name] = Footprint(written, array.shadow.touched()[span], array.flat[written])
    return found


def _met(parts: list[Part], memories: list[Memory]) -> bool:
    """Whether blocks touched the same global memory, one of them writing."""
    if any(h.kind == GLOBAL_RACE for part in parts for h in part.hazards.found.values()):
        return True
    return any(
        bool((one[name].written & other[name].touched).any())
        or bool((one[name].touched & other[name].written).any())
        for one, other in combinations(memories, 2)
        for name in one
    )


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
