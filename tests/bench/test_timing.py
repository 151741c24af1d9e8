"""Contenders take turns, short calls are repeated, and ratios are taken within a round."""

from __future__ import annotations

import pytest

from lockstep.bench import timing
from lockstep.bench.timing import Timings, interleave


class Clock:
    """Time passes only when a contender says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def contender(self, name: str, seconds: float):
        def call() -> None:
            self.log.append(name)
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_contenders_take_turns(clock):
    interleave({name: clock.contender(name, 1.0) for name in "ab"}, rounds=3)
    assert "".join(clock.log) == "ab" + "ab" * 3


def test_times_are_per_call(clock):
    timings = interleave({"a": clock.contender("a", 0.001), "b": clock.contender("b", 0.5)}, 3)
    assert timings.seconds["a"] == pytest.approx([0.001] * 3)
    assert timings.seconds["b"] == pytest.approx([0.5] * 3)
    assert clock.log.count("a") > 3 * timing.SAMPLE_SECONDS / 0.001
    assert clock.log.count("b") == 1 + 3


def test_what_is_slow_runs_less_often(clock):
    contenders = {
        "fast": clock.contender("fast", 0.5),
        "slow": clock.contender("slow", 0.4 * timing.ENOUGH_SECONDS),
        "slowest": clock.contender("slowest", 2 * timing.ENOUGH_SECONDS),
    }
    timings = interleave(contenders, rounds=9)
    assert {name: len(timings.seconds[name]) for name in contenders} == {
        "fast": 9,
        "slow": 3,
        "slowest": 1,
    }
    assert clock.log.count("slowest") == 1


def test_speed_is_the_median_of_ratios_within_rounds():
    # A machine that is ten times slower in the second round makes no difference.
    timings = Timings({"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 3.0]})
    assert timings.speed("a", against="b") == 2.0
    assert timings.median("a") == 1.0


def test_speed_with_fewer_rounds_of_one():
    assert Timings({"a": [1.0, 2.0, 3.0], "b": [40.0]}).speed("a", against="b") == 20.0


def test_no_rounds():
    with pytest.raises(ValueError, match="rounds takes at least 1, got 0"):
        interleave({"a": lambda: None}, rounds=0)
