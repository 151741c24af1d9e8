"""Lengths of the sequences of a batch as traffic brings them: a few long ones among many short."""

from __future__ import annotations

import math
from statistics import NormalDist

# Standard deviation of the logarithms of lengths.
SPREAD = 1.2
STEP = 37


def long_tailed_lengths(n: int, tokens: int) -> list[int]:
    """About `tokens` in `n` log-normal lengths: quantiles, so always the same, in mixed order."""
    normal = NormalDist()
    sizes = [math.exp(SPREAD * normal.inv_cdf((i + 0.5) / n)) for i in range(n)]
    lens = [max(1, round(size * tokens / sum(sizes))) for size in sizes]
    # A step that shares no divisor with n visits each length once.
    return [lens[i * STEP % n] for i in range(n)]
