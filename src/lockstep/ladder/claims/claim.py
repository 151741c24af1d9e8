"""A claim of a document, and what becomes of it when it is put to the test.

A claim has a figure, that is a range of numbers that would bear it out, and a function that finds
out what we get. The verdict follows from the two: no claim states its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HOLDS, DIFFERS, DEPENDS, UNMEASURED = "holds", "differs", "depends", "not measured"
LENSES = ("plan", "trace", "compiler", "bench", "arithmetic")

Readings = Mapping[str, float]


@dataclass(frozen=True)
class Figure:
    """The range of numbers that a document gives, and how far off still bears it out."""

    low: float
    high: float
    text: str
    tolerance: float = 0.0  # relative

    @property
    def shown(self) -> str:
        """The range as text, with the tolerance where there is one."""
        return self.text + (f" ± {self.tolerance:.0%}" if self.tolerance else "")

    def covers(self, value: float) -> bool:
        if not self.tolerance:
            return self.low <= value <= self.high
        return self.low * (1 - self.tolerance) <= value <= self.high * (1 + self.tolerance)

    def factor(self, value: float) -> float:
        """How many times the document's number, or the nearer end of its range."""
        nearest = self.high if value > self.high else self.low
        return math.inf if nearest == 0 else value / nearest


def exactly(value: float) -> Figure:
    """A figure that has to be met exactly."""
    return Figure(value, value, number(value))


def about(value: float, tolerance: float = 0.02) -> Figure:
    """A figure that has to be met within `tolerance`."""
    return Figure(value, value, number(value), tolerance)


def between(low: float, high: float) -> Figure:
    """A range that has to be met."""
    return Figure(low, high, f"{number(low)}–{number(high)}")


def at_most(value: float) -> Figure:
    """A figure that is an upper bound."""
    return Figure(-math.inf, value, f"≤ {number(value)}")


def at_least(value: float) -> Figure:
    """A figure that is a lower bound."""
    return Figure(value, math.inf, f"≥ {number(value)}")


@dataclass(frozen=True)
class Claim:
    """A statement of a document, and how to test it.

    `ours` gives one number, or several by the condition each holds under, or None where there is no
    measurement to read. `why` says in a sentence what makes the difference where there is one.
    """

    document: str
    part: str
    says: str
    figure: Figure
    unit: str
    lens: str
    ours: Callable[[], float | Readings | None]
    why: str = ""

    def test(self) -> Finding:
        """Find out. Traces run on the machine, which takes seconds the first time."""
        got = self.ours()
        if got is None:
            return Finding(self, {}, UNMEASURED)
        readings = dict(got) if isinstance(got, Mapping) else {"": float(got)}
        borne_out = [self.figure.covers(value) for value in readings.values()]
        verdict = HOLDS if all(borne_out) else DEPENDS if any(borne_out) else DIFFERS
        return Finding(self, readings, verdict)


@dataclass(frozen=True)
class Finding:
    """A claim with what we get and the verdict."""

    claim: Claim
    readings: Readings
    verdict: str

    @property
    def ours(self) -> str:
        """Our figures, as text."""
        return "; ".join(
            f"{number(value)} ({label})" if label else number(value)
            for label, value in self.readings.items()
        )

    @property
    def explanation(self) -> str:
        """The factor, and the reason for it; empty where the claim holds."""
        if self.verdict in (HOLDS, UNMEASURED):
            return ""
        factors = (self.claim.figure.factor(v) for v in self.readings.values())
        worst = max(factors, key=lambda f: abs(math.log(f)) if f > 0 else math.inf)
        by = "none" if worst == 0 else f"{worst:.2g}×" if math.isfinite(worst) else "not zero"
        return f"{by}: {self.claim.why}" if self.verdict == DIFFERS else self.claim.why

    def as_json(self) -> dict[str, Any]:
        claim, figure = self.claim, self.claim.figure
        return {
            "document": claim.document,
            "part": claim.part,
            "says": claim.says,
            "figure": figure.shown,
            "low": figure.low if math.isfinite(figure.low) else None,
            "high": figure.high if math.isfinite(figure.high) else None,
            "tolerance": figure.tolerance,
            "unit": claim.unit,
            "lens": claim.lens,
            "ours": dict(self.readings),
            "verdict": self.verdict,
            "explanation": self.explanation,
        }


def number(value: float) -> str:
    """Four significant digits; whole numbers in full.

    >>> number(266240), number(12.8), number(0.0040123), number(8465.2)
    ('266,240', '12.8', '0.004012', '8,465')
    """
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"
