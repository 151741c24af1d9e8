"""The layers of the audit on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from lockstep.audit.timing import clock, code, cpu_counters, memcheck, replay
from lockstep.audit.timing.clock import Times
from lockstep.audit.timing.leaks import LEAKS, MASKED, Leak
from lockstep.audit.timing.outcome import Outcome, judged, skipped
from lockstep.audit.timing.secrets import CASES, Case, fixed
from lockstep.kernels.cpu.compiler import machine
from lockstep.kernels.cpu.compiler.compile import Kernel
from lockstep.kernels.cpu.compiler.machine import Target
from lockstep.kernels.cpu.kernels import constant_time_kernels


def audit_code(planted: bool) -> list[Outcome]:
    """Machine code for this machine, and for others."""
    host = machine.host()
    targets = {"this machine": host} if code.is_supported(host) else {}
    targets |= code.TARGETS
    kernels = {} if planted else {kernel.name: kernel for kernel in constant_time_kernels()}
    return [
        judged("code", f"{name} for {where}", list(code.audit(kernel, target)), planted)
        for where, target in targets.items()
        for name, kernel in (kernels or _kernels_that_leak(target)).items()
    ]


def _leaks_of(target: Target) -> dict[str, Leak]:
    """Leaks that the steps of code for `target` show."""
    leaks = LEAKS | (MASKED if target.architecture == "x86_64" else {})
    return {name: leak for name, leak in leaks.items() if leak.steps_differ}


def _kernels_that_leak(target: Target) -> dict[str, Kernel]:
    return {name: leak.kernel for name, leak in _leaks_of(target).items()}


def audit_memcheck(planted: bool) -> list[Outcome]:
    """Kernels under Valgrind."""
    if not replay.is_available():
        return skipped("memcheck", "CPU kernels", "needs Valgrind, its header and a C compiler")
    outcomes = []
    generator = torch.Generator().manual_seed(0)
    if planted:
        for name, leak in _leaks_of(machine.host()).items():
            found = memcheck.findings(partial(leak.run, leak.draw(generator)))
            outcomes.append(judged("memcheck", name, found, planted))
        return outcomes
    for case in CASES:
        found = memcheck.findings(partial(case.run, case.draw(generator)))
        outcomes.append(judged("memcheck", case.name, found, planted))
    return outcomes


def audit_counters(planted: bool) -> list[Outcome]:
    """Compare Valgrind's counters, class by class."""
    if not replay.is_available():
        return skipped("counters", "CPU kernels", "needs Valgrind, its header and a C compiler")
    if planted:
        counted = {
            name: cpu_counters.count(leak.run, leak.draw, {"fixed": leak.fix})
            for name, leak in LEAKS.items()
            if leak.steps_differ
        }
    else:
        counted = {
            case.name: cpu_counters.count(case.run, case.draw, _fixes(case)) for case in CASES
        }
    return [
        replace(
            judged("counters", name, list(cpu_counters.differing(counts)), planted),
            figures={"classes": len(counts), "counts": counts[cpu_counters.RANDOM]},
        )
        for name, counts in counted.items()
    ]


def _fixes(case: Case) -> clock.Fixes:
    return {name: partial(fixed, name) for name in case.classes}


def timed_subjects(planted: bool) -> list[str]:
    """The names of all that `audit_time` times."""
    return list(LEAKS) if planted else [case.name for case in CASES]


def audit_time(samples: int, planted: bool) -> list[Outcome]:
    """Classes of secrets against random ones."""
    return [x for name in timed_subjects(planted) for x in time_subject(name, samples, planted)]


def time_subject(name: str, samples: int, planted: bool) -> list[Outcome]:
    """The same for one of `timed_subjects`."""
    if planted:
        leak = LEAKS[name]
        compared = clock.compare(leak.run, leak.draw, {"fixed": leak.fix}, samples)
    else:
        case = next(case for case in CASES if case.name == name)
        compared = clock.compare(case.run, case.draw, _fixes(case), samples)
    return list(timed(name, compared, planted))


def timed(subject: str, compared: dict[str, Times], planted: bool) -> Iterator[Outcome]:
    """Whether classes can be told apart; planted leaks have to be, and clearly."""
    for name, times in compared.items():
        t = times.t()
        ok = abs(t) > clock.CLEAR if planted else abs(t) < clock.LIMIT
        figures = {"t": t, "samples": len(times.ns), "median_ns": times.medians()}
        if name == clock.ALL:
            figures["course"] = times.course()
        detail = f"t = {t:.1f} after {len(times.ns)} samples"
        yield Outcome("time", f"{subject}: {name} against random", ok, detail, False, figures)
