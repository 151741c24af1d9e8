"""Which query-invariant calls the Hopper kernels take.

The forward and the decode kernel give a row the same bits, others do not. So what is said here
must not depend on the number of queries or keys: calls of one kind all run here, or none does.
"""

from __future__ import annotations

import math

from lockstep.kernels.hopper.common.sizes import ROWS
from lockstep.problem import AttentionProblem

HEAD_DIMS = (64, 128)
# Keys of a block and of a span (`spans.py`) in both kernels, and of those that rows see first.
BLOCK_KV, SPAN, FIRST = 128, 512, 32
# SMs of an H200. How long a program of the decode kernel takes for a tile of 64 query rows, beside
# one of the forward for 128 queries of a head, as measured there with 16k keys at D 128.
PROCESSORS, DECODE_COST = 132, 1.5
# The most memory for parts of spans, and of how many tiles at once there may be any.
MAX_PART_BYTES, MAX_SLOTS = 512 << 20, 2 * PROCESSORS


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
    """Whether the decode kernel runs a query-invariant call that the forward could run, too: where
    programs that share the keys of a sequence take less time than programs with tiles of queries.
    A row has the same bits either way, so all sizes of the call may decide."""
    if problem.layout not in ("dense", "paged"):
        return False
    if problem.has_kv_starts:
        return True
    share = _tiles(problem) / PROCESSORS
    if not parts_fit(problem):
        share = math.ceil(share)
    rounds = math.ceil(problem.B * problem.Hq * -(-problem.Sq // (2 * ROWS)) / PROCESSORS)
    return DECODE_COST * share < rounds


def parts_fit(problem: AttentionProblem) -> bool:
    """Whether there is memory for the parts of all spans of a query-invariant call."""
    parts = min(_tiles(problem), MAX_SLOTS) * (problem.Skv // SPAN + 2)
    rows = min(ROWS, problem.Sq * problem.Hq // problem.Hkv)
    return parts * rows * problem.D * 4 <= MAX_PART_BYTES


def _tiles(problem: AttentionProblem) -> int:
    """Tiles of query rows of the decode kernel, in all KV heads."""
    return problem.B * problem.Hkv * -(-problem.Sq * problem.Hq // problem.Hkv // ROWS)
