"""Helpers for tests that look at source lines."""

from __future__ import annotations

import inspect

from lockstep import simt


def marked(kernel: simt.Kernel, mark: str = "# !") -> int:
    """Number of the one line of the kernel that carries a mark."""
    lines, first = inspect.getsourcelines(kernel.function)
    found = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(mark)]
    assert len(found) == 1, found
    return found[0]


def only_hazard(trace: simt.Trace) -> simt.Hazard:
    """The one hazard of a trace."""
    assert len(trace.hazards) == 1, [str(h) for h in trace.hazards]
    return trace.hazards[0]
