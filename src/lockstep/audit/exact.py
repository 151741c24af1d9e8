"""`lockstep audit exact`: random problems of all kinds, until one of them shows a fault.

Each problem is drawn from the seed and its number alone: a run with the same seed draws the same
problems, however many of them it checks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep import dispatch
from lockstep.audit import exact_checks
from lockstep.audit.cases import Case, Douts
from lockstep.audit.drawing import Recipe, draw
from lockstep.kernels.kernel import Kernel


@dataclass(frozen=True)
class Failure:
    """The first promise that was not kept, and a program that shows it."""

    problem: str
    kernel: str
    check: str
    what: str
    snippet: str


@dataclass
class Summary:
    """Counts of what a run has checked so far."""

    problems: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    checks: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kernel and check
    shares: dict[tuple[str, str], float] = field(default_factory=dict)  # by kernel and result
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "problems": self.problems,
            "kinds": dict(sorted(self.kinds.items())),
            "checks": [
                {"kernel": kernel, "check": check, "problems": n}
                for (kernel, check), n in sorted(self.checks.items())
            ],
            "largest_share_of_the_error_rule": [
                {"kernel": kernel, "result": name, "share": share}
                for (kernel, name), share in sorted(self.shares.items())
            ],
            "failure": None if self.failure is None else vars(self.failure),
        }


def audit(
    kernels: Iterable[Kernel],
    *,
    device: str = "cpu",
    seed: int = 0,
    problems: int | None = None,
    minutes: float | None = None,
) -> Iterator[Summary]:
    """Check kernels on one problem after another; yields the same summary after each.

    Ends after so many problems or minutes, whichever is given and comes first, or at the first
    failure.

    Example:
        >>> *_, summary = audit(dispatch.KERNELS, problems=100)  # doctest: +SKIP
        >>> summary.ok  # doctest: +SKIP
        True
    """
    kernels = tuple(kernels)
    summary, start = Summary(), time.monotonic()
    while summary.ok and (problems is None or summary.problems < problems):
        if minutes is not None and time.monotonic() - start >= 60 * minutes:
            return
        _examine(draw(seed, summary.problems, device), kernels, summary)
        summary.problems += 1
        yield summary


def _examine(made: Recipe, kernels: tuple[Kernel, ...], summary: Summary) -> None:
    summary.kinds.update(made.kinds)
    case, douts = made.build()
    for kernel in kernels:
        wanted = _within(kernel, case, douts)
        if wanted is None:
            continue
        for check in exact_checks.checks(kernel, long=made.memory):
            try:
                shares = getattr(exact_checks, check)(case, *wanted, kernel.name)
            except exact_checks.Broken as broken:
                what = str(broken)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
            else:
                summary.checks[kernel.name, check] += 1
                for name, share in shares.items():
                    key = kernel.name, name
                    summary.shares[key] = max(summary.shares.get(key, 0.0), share)
                continue
            snippet = made.snippet(check, kernel.name)
            problem = str(case.pose()[0])
            summary.failure = Failure(problem, kernel.name, check, what, snippet)
            return


def _within(kernel: Kernel, case: Case, douts: Douts | None) -> tuple[Douts | None] | None:
    """The part of a problem that the kernel takes: (douts,) with gradients, (None,) for the forward
    alone, None for neither."""
    problem, _ = case.pose()
    for candidate in (douts, None):
        try:
            dispatch.select(problem, kernel.name, backward=candidate is not None)
        except NotImplementedError:
            continue
        return (candidate,)
    return None
