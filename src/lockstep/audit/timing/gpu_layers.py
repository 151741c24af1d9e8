"""The layers of the audit on a GPU. The machine code is audited without one."""

from __future__ import annotations

import torch

from lockstep.audit.timing import counters, gpu_clock, gpu_code
from lockstep.audit.timing.cpu_layers import timed
from lockstep.audit.timing.outcome import Outcome, judged, skipped


def audit_code(planted: bool) -> list[Outcome]:
    """Machine code for sm_80 and sm_90."""
    missing = gpu_code.missing()
    if missing:
        return skipped("code", "GPU kernels", missing)
    builds = gpu_code.leaks() if planted else gpu_code.builds()
    return [judged("code", name, list(find()), planted) for name, find in builds]


def audit_memcheck(planted: bool) -> list[Outcome]:
    return skipped("memcheck", "GPU kernels", "follows CPU kernels")


def audit_counters(planted: bool) -> list[Outcome]:
    """Compare Nsight Compute's counters, class by class."""
    if not counters.is_available():
        return skipped("counters", "GPU kernels", "needs ncu of Nsight Compute on the path")
    return [
        judged("counters", name, found, planted)
        for group in _groups(planted)
        for name, found in counters.differing(counters.count(group)).items()
    ]


def audit_time(samples: int, planted: bool) -> list[Outcome]:
    """Classes of secrets against random ones, by the clock of the GPU."""
    if not torch.cuda.is_available():
        return skipped("time", "GPU kernels", "needs a GPU")
    compared = gpu_clock.compare(counters.chosen(_groups(planted)), samples)
    return [outcome for name, found in compared for outcome in timed(name, found, planted)]


def _groups(planted: bool) -> tuple[str, ...]:
    return ("leaks",) if planted else ("kernels", "rungs")
