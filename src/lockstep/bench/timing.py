"""Time several ways to compute one thing against each other.

Contenders take turns within every round, so that other load on the machine slows all of them, and
a ratio is taken within a round before the median is taken over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter

# A sample shorter than this is mostly clock and wake-up noise: short calls are repeated.
SAMPLE_SECONDS = 0.03
# A contender that has taken this long in all is not sampled again, if it has been at all.
ENOUGH_SECONDS = 20.0


class WrongResult(RuntimeError):
    """A contender computed something else, so its time means nothing."""


@dataclass(frozen=True)
class Timings:
    """Seconds per call, by contender, one entry per round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds per call of one contender."""
        return median(self.seconds[name])

    def speed(self, name: str, against: str) -> float:
        """How many times as fast as `against` the contender `name` is: median over rounds."""
        ours, theirs = self.seconds[name], self.seconds[against]
        if len(ours) != len(theirs):
            return self.median(against) / self.median(name)
        return median(b / a for a, b in zip(ours, theirs, strict=True))


def interleave(contenders: Mapping[str, Callable[[], object]], rounds: int) -> Timings:
    """Time every contender once per round.

    Each is called once beforehand, to learn how long it takes; that call counts only if it is so
    slow that it stays the only one. So whatever compiles on first use must have done so already.
    A slow contender gets fewer rounds.

    Args:
        contenders: Calls by name.
        rounds: Samples of each, at least 1.

    Example:
        >>> timings = interleave({"sum": lambda: x.sum(), "mean": lambda: x.mean()}, rounds=5)
        >>> timings.speed("sum", against="mean")
    """
    if rounds < 1:
        raise ValueError(f"rounds takes at least 1, got {rounds}")
    seconds: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for name, contender in contenders.items():
        once = _seconds_per_call(contender, 1)
        seconds[name] = [once] if once > ENOUGH_SECONDS else []
        calls[name] = ceil(SAMPLE_SECONDS / once)
    for _ in range(rounds):
        for name, contender in contenders.items():
            if sum(seconds[name]) > ENOUGH_SECONDS:
                continue
            # Threads of the previous contender spin for a while: one call that is not timed.
            if calls[name] > 1:
                contender()
            seconds[name].append(_seconds_per_call(contender, calls[name]))
    return Timings(seconds)


def _seconds_per_call(call: Callable[[], object], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / calls
