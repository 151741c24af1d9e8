"""Windows that hide no key, because a sequence is shorter than they are."""

from __future__ import annotations

from dataclasses import replace

from lockstep.kernels.hopper.forward.narrow_window.plan import has_narrow_window
from lockstep.kernels.hopper.forward.plan import fixes_maximum, plan_of
from lockstep.kernels.hopper.forward.scheduling.part_rule import LEAST_KEYS
from lockstep.problem import AttentionProblem


def without_idle_window(problem: AttentionProblem) -> AttentionProblem:
    """The problem without a window on the left that hides no key of any row, where that changes no
    bit: then it is causal, or has no mask, and runs as such."""
    left, _ = problem.window
    if left is None or left + 1 < problem.Skv:
        return problem
    # Without it, keys in pages have parts if they are many enough. Those of the same sequence in a
    # call with a longer cache, which the window does not span, have none.
    if problem.is_paged and left + 1 >= 2 * LEAST_KEYS:
        return problem
    # In these, how keys are summed depends on the window in other ways, too.
    if problem.constant_time or problem.query_invariant or has_narrow_window(problem):
        return problem
    rest = replace(problem, window_left=None)
    has_same_bits = plan_of(problem).block_kv == plan_of(rest).block_kv
    has_same_bits = has_same_bits and fixes_maximum(problem) == fixes_maximum(rest)
    return rest if has_same_bits else problem
