"""Turns on a GPU, with a clock in place of the device."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch

from lockstep.bench import gpu_timing
from lockstep.bench.gpu_timing import (
    HOST_CALLS,
    MOST_CALLS,
    order_of,
    take_host_turns,
    take_turns,
)


class Device:
    """Events on it read a clock that only calls and flushes move."""

    def __init__(self, monkeypatch):
        self.now = self.host = 0.0
        self.held: set[int] = set()
        self.log: list[str] = []
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class Memory:
            def zero_(self):
                device.now += 65e-6

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(gpu_timing, "perf_counter", lambda: self.host)
        monkeypatch.setattr(gpu_timing, "_something_else", Memory)

    def sleep(self, cycles: int) -> None:
        self.held.add(cycles)
        self.now += cycles / 2e9

    def call(self, name: str, seconds: float, host: float = 1e-5):
        def run() -> None:
            self.log.append(name)
            self.now += seconds
            self.host += host

        return run


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_flushing_and_waiting_are_not_in_a_time(device):
    timings = take_turns({"a": device.call("a", 30e-6), "b": device.call("b", 20e-3)}, rounds=3)
    assert timings.seconds["a"] == pytest.approx([30e-6] * 3)
    assert timings.seconds["b"] == pytest.approx([20e-3] * 3)
    assert device.log.count("a") == 6 + 3 * MOST_CALLS
    assert device.log.count("b") == 6 + 3


def test_the_device_waits_for_longer_than_the_host_needs(device):
    take_turns({"a": device.call("a", 1e-4, host=3e-4)}, rounds=1)
    (cycles,) = device.held
    assert cycles / 2e9 > 3e-4


def test_rounds_differ_in_order(device):
    take_turns({name: device.call(name, 1.0) for name in "abcd"}, rounds=2)
    assert "".join(device.log) == "aaaaaabbbbbbccccccdddddd" + "abdc" + "bcad"


@pytest.mark.parametrize("n", range(2, 11))
def test_everyone_follows_everyone_else_equally_often(n):
    names = list("abcdefghij"[:n])
    followed = Counter()
    for number in range(2 * n):
        order = order_of(names, number)
        assert sorted(order) == names
        followed.update(pairwise(order))
    assert followed == dict.fromkeys(permutations(names, 2), 2)


def test_nobody_to_time_and_no_rounds():
    assert take_turns({}).seconds == {}
    with pytest.raises(ValueError, match="rounds takes at least 1, got 0"):
        take_turns({}, rounds=0)


def test_the_host_is_timed_without_the_device(device):
    calls = {"a": device.call("a", 1.0, host=2e-5), "b": device.call("b", 1e-6, host=5e-5)}
    timings = take_host_turns(calls, rounds=2)
    assert timings.seconds["a"] == pytest.approx([2e-5] * 2)
    assert timings.seconds["b"] == pytest.approx([5e-5] * 2)
    assert "".join(device.log) == "".join(name * HOST_CALLS for name in "abba")
    assert take_host_turns({}).seconds == {}
    with pytest.raises(ValueError, match="rounds takes at least 1, got 0"):
        take_host_turns(calls, rounds=0)
