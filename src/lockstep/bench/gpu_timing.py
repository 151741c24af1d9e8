"""Time calls on a GPU against each other.

Contenders take turns in every round, so that they meet the same clocks and temperatures. Each call
lies between two events of its own and finds a cold L2. Before it the device is kept busy until the
host has issued the call: the host's time is not in it.

`take_host_turns` times the other side: from a call to its return. By then the results have their
memory and the kernels stand in the stream; the device is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lockstep.bench.timing import Timings

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS, QUICK_ROUNDS = 8, 3
# Calls to learn how long one takes.
PROBES = 3
# A turn is as many calls as take this long, within bounds.
TURN_SECONDS, MOST_CALLS = 10e-3, 30
# Calls of a turn of the host. So many short kernels fit into a stream that is never full.
HOST_CALLS = 200
# Memory that is written before each call: several times the L2 of any GPU.
FLUSHED_BYTES = 256 << 20
# Cycles of waiting per second of the host's: more than any GPU makes.
HOLD_HZ = 3e9


def take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> Timings:
    """Seconds per call: for each round, the median over the calls of a turn.

    What compiles on first use must have been called before.

    Args:
        calls: By name; they run on the current CUDA stream.
        rounds: Turns of each, at least 1.

    Example:
        >>> timings = take_turns({"sum": lambda: x.sum(), "mean": lambda: x.mean()})
        >>> timings.speed("sum", against="mean")
    """
    if rounds < 1:
        raise ValueError(f"rounds takes at least 1, got {rounds}")
    if not calls:
        return Timings({})
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    lengths, holds = {}, {}
    for name, call in calls.items():
        holds[name] = int(HOLD_HZ * median(_host_seconds(call) for _ in range(PROBES)))
        once = median(_turn(call, PROBES, holds[name]))
        lengths[name] = min(MOST_CALLS, ceil(TURN_SECONDS / once))
    for number in range(rounds):
        for name in order_of(list(calls), number):
            seconds[name].append(median(_turn(calls[name], lengths[name], holds[name])))
    return Timings(seconds)


def take_host_turns(calls: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> Timings:
    """Seconds of the host per call: for each round, the mean of a turn.

    A turn begins with an idle device. What is worked out on a first call must have been called
    before.

    Args:
        calls: By name; each is short enough for the device to keep up, or nearly.
        rounds: Turns of each, at least 1.
    """
    import torch

    if rounds < 1:
        raise ValueError(f"rounds takes at least 1, got {rounds}")
    if not calls:
        return Timings({})
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in order_of(list(calls), number):
            call = calls[name]
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(HOST_CALLS):
                call()
            seconds[name].append((perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return Timings(seconds)


def order_of(names: list[str], number: int) -> list[str]:
    """The order of one round. Over the rounds every contender follows every other equally often:
    one that runs after the contender that heats the device most finds a slower device.

    In zigzag (0, 1, -1, 2, -2 and so on from the one whose round it is) no two neighbours are
    equally far apart if the names are even in number; if odd, every second round goes backwards.
    """
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    order = [names[(number + step) % n] for step in zigzag]
    return order[::-1] if n % 2 and number % 2 else order


def _host_seconds(call: Callable[[], Any]) -> float:
    """Seconds that the host takes to issue a call to an idle device."""
    import torch

    torch.cuda.synchronize()
    start = perf_counter()
    call()
    return perf_counter() - start


def _turn(call: Callable[[], Any], n: int, hold: int) -> list[float]:
    """Seconds of each of `n` calls in a row, `hold` cycles of waiting before each."""
    import torch

    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    pairs = [(event(), event()) for _ in range(n)]
    for begin, end in pairs:
        _something_else().zero_()
        torch.cuda._sleep(hold)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


@lru_cache(maxsize=1)
def _something_else() -> Tensor:
    import torch

    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
