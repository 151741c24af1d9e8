"""Times of two classes of secrets, fixed and random, compared by Welch's t-test.

Samples of both classes alternate at random and go through the same buffers. Long samples are
interruptions of the process: statistics are also computed without the slowest ones, cropped at
several percentiles, and the largest |t| counts. Above LIMIT the classes can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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

    def medians(self) -> dict[str, float]:
        """Of both classes."""
        fixed, random = self.ns[self.is_fixed], self.ns[~self.is_fixed]
        return {"fixed": float(np.median(fixed)), "random": float(np.median(random))}

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
    which = torch.randint(0, POOL, (samples,), generator=generator).tolist()
    is_fixed = torch.randint(0, 2, (samples,), generator=generator).tolist()
    flags = torch.tensor([False, True])
    for _ in range(20):
        run(buffers)
    ns = np.empty(samples)
    clock = time.perf_counter_ns
    for sample, (i, chosen) in enumerate(zip(which, is_fixed, strict=True)):
        _load(buffers, random[i], fixed[i], flags[chosen])
        start = clock()
        run(buffers)
        ns[sample] = clock() - start
    return Times(ns, np.array(is_fixed) > 0)


def _load(buffers: Secrets, random: Secrets, fixed: Secrets, is_fixed: Tensor) -> None:
    """Copies secrets of one class, and reads those of both: what is in the caches afterwards must
    not tell which."""
    for name, buffer in buffers.items():
        torch.where(is_fixed, fixed[name], random[name], out=buffer)
