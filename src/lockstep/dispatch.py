"""Which kernel runs a problem, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lockstep.kernels import cpu, hopper, oracle, triton
from lockstep.kernels.hopper import decode
from lockstep.kernels.kernel import Kernel
from lockstep.problem import AttentionProblem

# In order of preference.
KERNELS: tuple[Kernel, ...] = (
    decode.KERNEL,
    hopper.KERNEL,
    triton.KERNEL,
    cpu.AMX,
    cpu.KERNEL,
    oracle.KERNEL,
)


@dataclass(frozen=True)
class Explanation:
    """The result of `lockstep.explain`; print it to read it."""

    problem: AttentionProblem
    kernel: str | None
    """The kernel that would run, or None where the call would raise NotImplementedError."""
    refusals: dict[str, str]
    """Why each kernel that cannot run the problem refuses it."""

    def __str__(self) -> str:
        width = max(len(kernel.name) for kernel in KERNELS)
        lines = [str(self.problem)]
        for kernel in KERNELS:
            if kernel.name == self.kernel:
                verdict = "runs"
            elif kernel.name in self.refusals:
                verdict = f"refuses: {self.refusals[kernel.name]}"
            else:
                verdict = "could run" if self.kernel is None else f"could run, after {self.kernel}"
            lines.append(f"  {kernel.name:<{width}}  {verdict}")
        return "\n".join(lines)


def select(
    problem: AttentionProblem, kernel: str | None = None, *, backward: bool = False
) -> Kernel:
    """The kernel called `kernel`, or without a name the first that supports the problem.

    With `backward`, only a kernel that has one, and one for this problem, will do. Raises
    ValueError for an unknown name, NotImplementedError with every reason if the named kernel, or
    each kernel, refuses.
    """
    refusals = []
    for candidate in candidates(kernel):
        reason = refusal(candidate, problem, backward)
        if reason is None:
            return candidate
        refusals.append(f"\n  {candidate.name}: {reason}")
    raise NotImplementedError(f"no kernel runs {problem}{''.join(refusals)}")


def explain(problem: AttentionProblem, kernel: str | None = None) -> Explanation:
    """The choice of `select`, with the refusals of all kernels.

    Raises ValueError for an unknown name.
    """
    reasons = {candidate.name: refusal(candidate, problem) for candidate in KERNELS}
    able = (candidate.name for candidate in candidates(kernel) if reasons[candidate.name] is None)
    refusals = {name: reason for name, reason in reasons.items() if reason is not None}
    return Explanation(problem, next(able, None), refusals)


def refusal(kernel: Kernel, problem: AttentionProblem, backward: bool = False) -> str | None:
    """Why a kernel does not run a problem or, with `backward`, its gradients; None if it does."""
    if problem.query_invariant and not kernel.query_invariant:
        return "does not promise query_invariant"
    if problem.constant_time and not kernel.constant_time:
        return "does not promise constant_time"
    reason = kernel.supports(problem)
    if reason is not None or not backward:
        return reason
    if kernel.prepare_backward is None:
        return "has no backward"
    return None if kernel.supports_backward is None else kernel.supports_backward(problem)


def select_carry(problem: AttentionProblem, kernel: str | None = None) -> Kernel | None:
    """The first kernel, or the one called `kernel`, that runs a problem whose keys come in blocks.

    None where there is none. Raises ValueError for an unknown name.
    """
    able = (x for x in candidates(kernel) if x.carry is not None and refusal(x, problem) is None)
    return next(able, None)


def select_merge(
    part: Tensor,
) -> Callable[[list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]:
    """The merge for partial results whose `out` has the device and the dtype of `part`: that of the
    first kernel that takes them. The oracle's takes all."""
    return next(
        kernel.merge.run
        for kernel in KERNELS
        if kernel.merge is not None and kernel.merge.supports(part)
    )


def candidates(name: str | None) -> tuple[Kernel, ...]:
    if name is None:
        return KERNELS
    for kernel in KERNELS:
        if kernel.name == name:
            return (kernel,)
    names = ", ".join(kernel.name for kernel in KERNELS)
    raise ValueError(f"kernel takes one of {names}, or None to choose, got {name!r}")
