"""One row of a GPU bench: the contenders of a case, each with its time, error or reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.bench.timing import Timings


class DeviceLost(RuntimeError):
    """The CUDA context is broken: nothing more can run in this process."""


@dataclass
class Row:
    """The results of one case.

    facts: What the case is, for JSON; among them "case", its name, and "unit", that of the rate.
    amount: GFLOP or MB, so that amount / ms is the rate in TFLOP/s or GB/s.
    chosen: The kernel that Lockstep runs for it, None if all kernels refuse it.

    A contender that refuses a case raises NotImplementedError before it runs; one that fails raises
    anything else, or computes a wrong result.
    """

    facts: dict[str, Any]
    chosen: str | None = None
    amount: float = 0.0
    kinds: dict[str, str] = field(default_factory=dict)
    timings: Timings = field(default_factory=lambda: Timings({}))
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[str]:
        """Names of the contenders of this kind, with a time or without."""
        return [name for name, found in self.kinds.items() if found == kind]

    @property
    def best_peer(self) -> str | None:
        timed = [name for name in self.of_kind("peer") if name in self.timings.seconds]
        return min(timed, key=self.timings.median, default=None)

    def as_json(self) -> dict[str, Any]:
        timings, best = self.timings, self.best_peer
        ms = {name: timings.median(name) * 1e3 for name in timings.seconds}
        ours = [name for name in self.of_kind("ours") if name in ms]
        return {
            **self.facts,
            "ours": self.of_kind("ours"),
            "peers": self.of_kind("peer"),
            "chosen": self.chosen,
            "best_peer": best,
            "ms": {name: round(time, 5) for name, time in ms.items()},
            "rate": {name: round(self._rate(time), 1) for name, time in ms.items()},
            "speed": {name: round(timings.speed(name, best), 3) for name in ours if best},
            "error": {name: round(error, 3) for name, error in self.errors.items()},
            "failed": self.failed,
            "refused": self.refused,
        }

    def _rate(self, ms: float) -> float:
        return ms * 1e3 if self.facts["unit"] == "µs" else self.amount / ms

    def admit(
        self,
        name: str,
        kind: str,
        prepare: Callable[[], Callable[[], Any] | None],
        check: Callable[[Any], float] | None,
    ) -> Callable[[], Any] | None:
        """The call to time, after its result has been checked; None where there is none, and then
        the row has the reason, unless the contender does not take part.

        Args:
            name, kind: Those of the contender.
            prepare: Returns the call, or None if the contender does not take part.
            check: Takes the call's result, and returns its error; raises if it is wrong. None for
                a call that is not checked.

        Raises:
            DeviceLost: The contender broke the CUDA context.
        """
        import torch

        try:
            with torch.no_grad():
                call = prepare()
                if call is None:
                    return None
                self.kinds[name] = kind
                result = call()
                if check is not None:
                    self.errors[name] = check(result)
        except NotImplementedError as refusal:
            # Not a failure: some kernels are for some problems only.
            self.kinds[name] = kind
            self.refused[name] = str(refusal).splitlines()[-1].strip()[:200]
            return None
        except Exception as error:
            # An error of one library ends its own cell, not the run.
            self.kinds[name] = kind
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            _check_device(f"{name} in {self.facts['case']}")
            return None
        return call


def _check_device(after: str) -> None:
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"CUDA stopped working after {after}: {error}") from error
