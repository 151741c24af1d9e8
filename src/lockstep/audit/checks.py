"""The parts of `lockstep audit bits`: checks, their outcomes, and how they run.

A `Check` belongs to a claim of the `Kernel` descriptor and yields pairs of results that must have
the same bits. `audit` runs the checks of everything a kernel claims and stops at the first
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.audit.bits import Difference, first_difference
from lockstep.audit.calls import Results, Shape
from lockstep.kernels.kernel import Kernel


class Pair(NamedTuple):
    """Two results that must agree to the bit, and what was done to get the second."""

    what: str
    expected: Results
    got: Results


def _anywhere(shape: Shape) -> str | None:
    return None


@dataclass(frozen=True)
class Check:
    """One way in which a claim could fail. `refuses` gives the reason where a shape cannot be
    checked that way, else None."""

    name: str
    claim: str
    pairs: Callable[[Shape, Kernel], Iterator[Pair]]
    refuses: Callable[[Shape], str | None] = _anywhere


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check of one kernel: agreement, a difference, or a reason for neither.

    `left_out` holds the kernel's reasons for refusing calls, or gradients, that the check would
    have compared as well.
    """

    kernel: str
    claim: str
    check: str
    comparisons: int
    skipped: str | None = None
    left_out: tuple[str, ...] = ()
    what: str | None = None
    difference: Difference | None = None

    @property
    def ok(self) -> bool:
        return self.difference is None

    def as_json(self) -> dict[str, Any]:
        found = {
            "kernel": self.kernel,
            "claim": self.claim,
            "check": self.check,
            "comparisons": self.comparisons,
            "skipped": self.skipped,
            "left_out": self.left_out,
            "ok": self.ok,
        }
        if self.difference is not None:
            found |= {"what": self.what, "difference": vars(self.difference)}
        return found


def run(check: Check, shape: Shape, kernel: Kernel) -> Outcome:
    """Compare pair after pair until one differs."""
    head = kernel.name, check.claim, check.name
    if not getattr(kernel, check.claim):
        return Outcome(*head, 0, skipped="not claimed")
    reason = check.refuses(shape)
    if reason is not None:
        return Outcome(*head, 0, skipped=reason)
    comparisons = 0
    refusals: dict[str, None] = {}
    for what, expected, got in check.pairs(shape, kernel):
        refusals |= dict.fromkeys((*expected.refusals, *got.refusals))
        mine, other = _comparable(expected, got)
        if not mine:
            continue
        comparisons += 1
        difference = first_difference(mine, other)
        if difference is not None:
            return Outcome(
                *head, comparisons, left_out=tuple(refusals), what=what, difference=difference
            )
    if not comparisons:
        return Outcome(*head, 0, skipped="; ".join(refusals) or "nothing to compare")
    return Outcome(*head, comparisons, left_out=tuple(refusals))


def _comparable(expected: Results, got: Results) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of both; where a kernel refused a part of one, those that the other has too."""
    if not (expected.refusals or got.refusals):
        return expected.tensors, got.tensors
    names = [name for name in expected.tensors if name in got.tensors]
    return {n: expected.tensors[n] for n in names}, {n: got.tensors[n] for n in names}


def audit(checks: Iterable[Check], shape: Shape, kernels: Iterable[Kernel]) -> Iterator[Outcome]:
    """Every check of every kernel, up to and including the first that fails."""
    checks = tuple(checks)
    for kernel in kernels:
        for check in checks:
            outcome = run(check, shape, kernel)
            yield outcome
            if not outcome.ok:
                return
