"""The outcome of an audit of constant time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The findings of one layer in one kernel or one kind of call."""

    layer: str
    name: str
    ok: bool
    detail: str = ""
    skipped: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


def skipped(layer: str, name: str, why: str) -> list[Outcome]:
    """The one outcome of a layer that cannot run here."""
    return [Outcome(layer, name, True, why, skipped=True)]


def judged(layer: str, name: str, found: list[Any], planted: bool) -> Outcome:
    """Nothing may be found in a kernel, something must be where a leak was planted."""
    detail = "; ".join(map(str, found[:3])) or "not found" * planted
    return Outcome(layer, name, bool(found) == planted, detail)
