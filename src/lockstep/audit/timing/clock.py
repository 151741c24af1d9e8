"""Times of two classes of secrets, fixed and random, compared by Welch's t-test.

Samples of both classes alternate at random and go through the same buffers. Long samples are
interruptions of the process: statistics are also computed without the slowest ones, cropped at
several percentiles, and the largest |t| counts. Above LIMIT the classes can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Secrets = dict[str, Tensor]
# Below LIMIT, classes are not told apart; a planted leak has to be above CLEAR.
LIMIT, CLEAR = 4.5, 10.0
PERCENTILES = (50, 75, 90, 95, 99, 100)
# Different secrets of a class: as many copies of the fixed ones, so that both classes are read
# from equally cold memory.
POOL = 32
# Calls that are in flight together on a GPU.
BATCH = 500


@dataclass(frozen=True)
class Times:
    """Nanoseconds of each sample, and whether it had the fixed secrets."""

    ns: np.ndarray
    is_fixed: np.ndarray

    def t(self, upto: int | None = None) -> float:
        """The largest Welch's t, in size, over all crops of the first samples."""
        ns, is_fixed = self.ns[:upto], self.is_fixed[:upto]
        found = [0.0]
        for limit in np.percentile(ns, PERCENTILES):
            kept = ns <= limit
            found.append(welch(ns[kept & is_fixed], ns[kept & ~is_fixed]))
        return max(found, key=abs)

    def course(self, points: int = 40) -> list[tuple[int, float]]:
        """(samples, t) as samples come in."""
        steps = np.unique(np.geomspace(200, len(self.ns), points).astype(int))
        return [(int(n), self.t(int(n))) for n in steps if n <= len(self.ns)]


def welch(x: np.ndarray, y: np.ndarray) -> float:
    """The difference of two means in units of its standard error; 0 where there is no error."""
    if min(len(x), len(y)) < 2:
        return 0.0
    error = np.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y))
    return float((x.mean() - y.mean()) / error) if error > 0 else 0.0


def compare(
    run: Callable[[Secrets], Tensor],
    draw: Callable[[torch.Generator], Secrets],
    fix: Callable[[Secrets], Secrets],
    samples: int,
    seed: int = 0,
) -> Times:
    """Times `samples` calls of `run` on secrets that `draw` drew, half of them after `fix`."""
    generator = torch.Generator().manual_seed(seed)
    random = [draw(generator) for _ in range(POOL)]
    fixed = [fix({name: x.clone() for name, x in random[0].items()}) for _ in range(POOL)]
    buffers = {name: x.clone() for name, x in random[0].items()}
    order = torch.randint(0, 2 * POOL, (samples,), generator=generator).tolist()
    pool = random + fixed
    for _ in range(20):
        run(buffers)
    timer = _time_on_gpu if next(iter(buffers.values())).is_cuda else _time_on_cpu
    ns = timer(run, buffers, pool, order)
    return Times(ns, np.array(order) >= POOL)


def _load(buffers: Secrets, secrets: Secrets) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(secrets[name])


def _time_on_cpu(
    run: Callable[[Secrets], Tensor], buffers: Secrets, pool: list[Secrets], order: list[int]
) -> np.ndarray:
    ns = np.empty(len(order))
    clock = time.perf_counter_ns
    for i, which in enumerate(order):
        _load(buffers, pool[which])
        start = clock()
        run(buffers)
        ns[i] = clock() - start
    return ns


def _time_on_gpu(
    run: Callable[[Secrets], Tensor], buffers: Secrets, pool: list[Secrets], order: list[int]
) -> np.ndarray:
    """By events around each call, read in batches."""
    ns = np.empty(len(order))
    event: Any = torch.cuda.Event
    events = [[event(enable_timing=True) for _ in range(2)] for _ in range(BATCH)]
    for first in range(0, len(order), BATCH):
        some = order[first : first + BATCH]
        for which, (start, end) in zip(some, events, strict=False):
            _load(buffers, pool[which])
            start.record()
            run(buffers)
            end.record()
        torch.cuda.synchronize()
        for i, (start, end) in zip(range(len(some)), events, strict=False):
            ns[first + i] = start.elapsed_time(end) * 1e6
    return ns
