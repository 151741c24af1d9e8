"""The constant-time kernels of this package, for audits of their machine code."""

from __future__ import annotations

from lockstep.kernels.cpu import backward, extras, forward, units
from lockstep.kernels.cpu.compiler.compile import Kernel


def constant_time_kernels() -> tuple[Kernel, ...]:
    """Every kernel that a call with `constant_time=True` may run."""
    gradients = (backward.run_gradients, *extras.KERNELS)
    pairs = (units.plan, *forward.RUNNERS.values(), *gradients)
    return tuple(constant_time for _, constant_time in pairs)
