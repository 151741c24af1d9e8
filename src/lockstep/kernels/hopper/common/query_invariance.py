"""Which query-invariant calls the Hopper kernels take.

The forward and the decode kernel give a row the same bits, others do not. So what is said here
must not depend on the number of queries or keys: calls of one kind all run here, or none does.
"""

from __future__ import annotations

from lockstep.problem import AttentionProblem

HEAD_DIMS = (64, 128)
# Keys of a block and of a span (`spans.py`) in both kernels, and of those that rows see first.
BLOCK_KV, SPAN, FIRST = 128, 512, 32
# Rows of a KV head, up to which keys in one tensor are split among programs of the decode kernel.
MOST_SPLIT_ROWS = 128


def refusal_of_kind(problem: AttentionProblem) -> str | None:
    """Why the Hopper kernels leave query-invariant calls of this kind to others, or None."""
    if problem.Dv != problem.D or problem.D not in HEAD_DIMS:
        dims = " and ".join(map(str, HEAD_DIMS))
        return (
            f"takes query_invariant with head dims {dims}, the same for keys and values, got "
            f"D = {problem.D} and Dv = {problem.Dv}"
        )
    if problem.constant_time:
        return "takes no query_invariant with constant_time"
    if problem.layout == "varlen_paged":
        return "takes no query_invariant with ragged queries in pages"
    return None


def is_split(problem: AttentionProblem) -> bool:
    """Whether a query-invariant call that both kernels could run is the decode kernel's."""
    rows = problem.Sq * problem.Hq // problem.Hkv
    return problem.layout == "dense" and (rows <= MOST_SPLIT_ROWS or problem.has_kv_starts)
