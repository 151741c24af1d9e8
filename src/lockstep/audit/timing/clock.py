"""Times of classes of secrets against random ones, compared by Welch's t-test.

Half of the samples have random secrets, the classes share the other half; they alternate at random
and go through the same buffers. Long samples are interruptions of the process: statistics are also
computed without the slowest ones, cropped at several percentiles, and the largest |t| counts. Above
LIMIT the classes can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

Secrets = dict[str, Tensor]
Draw = Callable[[torch.Generator], Secrets]
Fixes = Mapping[str, Callable[[Secrets], Secrets]]
# Below LIMIT, classes are not told apart; a planted leak has to be above CLEAR.
LIMIT, CLEAR = 4.5, 10.0
PERCENTILES = (50, 75, 90, 95, 99, 100)
# Copies of the secrets of a class. There are as many random ones as of all classes together:
# each has a partner, and a sample reads both, so that what is in the caches does not tell
# which it uses.
POOL = 8
ALL = "all classes"


@dataclass(frozen=True)
class Times:
    """Nanoseconds of each sample, whole numbers, and whether it had the fixed secrets."""

    ns: np.ndarray
    is_fixed: np.ndarray

    def t(self, upto: int | None = None) -> float:
        """The largest Welch's t, in size, over all crops of the first samples."""
        both = np.sort(self.ns[:upto].astype(np.int64) << 1 | self.is_fixed[:upto])
        ns, is_fixed = both >> 1, both & 1
        limits = np.percentile(ns, PERCENTILES)
        ends = np.searchsorted(ns, limits, side="right")
        centred = ns - float(ns[len(ns) // 2])
        fixed, random = (_Sums(centred, mine, ends) for mine in (is_fixed, 1 - is_fixed))
        error = np.sqrt(fixed.squared_error + random.squared_error)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (fixed.mean - random.mean) / error
        return float(max(found[np.isfinite(found)], key=abs, default=0.0))

    def medians(self) -> dict[str, float]:
        """The median time of each class, in nanoseconds."""
        fixed, random = self.ns[self.is_fixed], self.ns[~self.is_fixed]
        return {"fixed": float(np.median(fixed)), "random": float(np.median(random))}

    def course(self, points: int = 40) -> list[tuple[int, float]]:
        """(samples, t) as samples come in."""
        steps = np.unique(np.geomspace(200, len(self.ns), points).astype(int))
        return [(int(n), self.t(int(n))) for n in steps if n <= len(self.ns)]


class _Sums:
    """Mean and squared standard error of those of sorted numbers that are `mine`, for each of
    several numbers of them; nan where there are fewer than two."""

    def __init__(self, numbers: np.ndarray, mine: np.ndarray, ends: np.ndarray) -> None:
        n, x, xx = (
            np.concatenate(([0.0], np.cumsum(mine * weights)))[ends]
            for weights in (1.0, numbers, numbers * numbers)
        )
        n[n < 2] = np.nan
        self.mean = x / n
        self.squared_error = (xx - x * self.mean) / (n - 1) / n


@dataclass(frozen=True)
class Samples:
    """Which secrets each sample has."""

    names: tuple[str, ...]
    pool: list[Secrets]
    order: np.ndarray  # which random secrets in `pool` each sample has, or their partners
    is_fixed: np.ndarray  # 0: the random ones; 1: their partners, in the second half of `pool`

    def first(self, n: int) -> Samples:
        """The first `n` of them."""
        return replace(self, order=self.order[:n], is_fixed=self.is_fixed[:n])

    def split(self, ns: np.ndarray) -> dict[str, Times]:
        """The times of all classes together beside the random ones, and of each of several beside
        its partners: others lie at other addresses, which may suit the caches better."""
        found = {ALL: Times(ns, self.is_fixed > 0)}
        for i, name in enumerate(self.names if len(self.names) > 1 else ()):
            mine = self.order // POOL == i
            found[name] = Times(ns[mine], self.is_fixed[mine] > 0)
        return found


def plan(draw: Draw, fixes: Fixes, samples: int, seed: int = 0) -> Samples:
    """Secrets that `draw` draws, those that each of `fixes` makes of them, and a random order."""
    generator = torch.Generator().manual_seed(seed)
    pool = [draw(generator) for _ in range(POOL * len(fixes))]
    first = pool[0]
    for fix in fixes.values():
        pool += [fix({name: x.clone() for name, x in first.items()}) for _ in range(POOL)]
    rng = np.random.default_rng(seed)
    order, is_fixed = rng.integers(0, len(pool) // 2, samples), rng.integers(0, 2, samples)
    return Samples(tuple(fixes), pool, order, is_fixed)


def compare(
    run: Callable[[Secrets], Tensor], draw: Draw, fixes: Fixes, samples: int, seed: int = 0
) -> dict[str, Times]:
    """Times of `samples` calls of `run` on one thread, by class, and of all classes together."""
    planned = plan(draw, fixes, samples, seed)
    buffers = {name: x.clone() for name, x in planned.pool[0].items()}
    ns = np.empty(samples, np.int64)
    clock = time.perf_counter_ns
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(20):
        run(buffers)
    random, fixed = planned.pool[: len(planned.pool) // 2], planned.pool[len(planned.pool) // 2 :]
    flags = torch.tensor([False, True])
    order = zip(planned.order.tolist(), planned.is_fixed.tolist(), strict=True)
    for sample, (i, is_fixed) in enumerate(order):
        for name, buffer in buffers.items():
            torch.where(flags[is_fixed], fixed[i][name], random[i][name], out=buffer)
        start = clock()
        run(buffers)
        ns[sample] = clock() - start
    torch.set_num_threads(threads)
    return planned.split(ns)
