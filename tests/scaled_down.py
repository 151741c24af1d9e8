"""Cases of models in little, for tests that run them."""

from __future__ import annotations

from dataclasses import replace

from lockstep.bench.models.cases import Case


def scaled_down(case: Case, largest: int = 40) -> Case:
    """The same work with at most so many queries and keys."""

    def least(n: int) -> int:
        return min(n, largest)

    keys = least(case.keys)
    return replace(
        case,
        B=min(case.B, 3),
        Sq=min(least(case.Sq), keys) if case.Skv >= case.Sq else least(case.Sq),
        Skv=keys if case.Skv else 0,
        page=min(case.page, 16),
    )
