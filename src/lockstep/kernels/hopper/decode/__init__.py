"""Decode on Hopper: a few queries of each sequence against a cache, by Gluon kernels.

Importing this package does not import Triton.

    plan.py      tile sizes, and how long a span of keys is
    span_rule.py that rule, on the host and on the device
    tiles.py     tiles of packed queries in the place of sequences
    longer.py    sequences of more queries than a call says any has
    schedule.py  which program computes which spans
    runs.py      what the producer tells the consumer of each run
    producer.py  the warp that streams pages
    prefetch.py  pages and queries that it prefetches into L2
    queries.py   query rows in shared memory, and when they are asked for
    consumer.py  the warpgroup that computes
    narrow_consumer.py  the same for few query rows: each warp has keys of its own
    rows.py      what a consumer takes and returns, and which keys its rows see
    sums.py      products with values, in pieces of columns
    head_columns.py  columns of tiles and of products, and those beyond the head dim
    nonfinite.py values that are not finite, kept from rows that do not see them
    kernel.py    the kernel
    groups.py    groups of its arguments
    folding/     parts of spans folded into results, by that kernel or by a second one
    spans/       the consumer and the second kernel of query-invariant calls
    few_rows.py  tiles of up to 32 rows
    launch.py    from a problem to launches

A row's bits depend on its own sequence, the heads and the head dims alone.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.query_invariance import is_split, refusal_of_kind
from lockstep.kernels.hopper.common.requirements import (
    HEAD_DIM_STEP,
    LONG,
    MAX_HEAD_DIM,
    MAX_SOFTCAP,
    PAGE_ROWS,
    refusal_of_device,
)
from lockstep.kernels.hopper.forward.page_rule import least_queries_in_pages
from lockstep.kernels.kernel import Kernel, Prepared
from lockstep.problem import AttentionProblem, Tensors


def _prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    from lockstep.kernels.hopper.decode.launch import prepare

    return prepare(problem, tensors)


def _refusal_of_dense(problem: AttentionProblem) -> str | None:
    """Why Triton runs a call whose keys are in one tensor: it is as fast with fewer keys, and with
    more queries. Of sequences with lengths of their own, the longest must not decide."""
    has_lengths = problem.has_kv_lens or problem.has_kv_starts
    if problem.layout != "dense" or problem.Sq > 1 or problem.Skv < LONG or has_lengths:
        return (
            f"takes pages, or one query on {LONG} keys or more of every sequence, got a "
            f"{problem.layout} problem"
        )
    return None


def supports(problem: AttentionProblem) -> str | None:
    reason = refusal_of_device(problem)
    if reason is not None:
        return reason
    if not problem.is_paged and not problem.query_invariant:
        reason = _refusal_of_dense(problem)
        if reason is not None:
            return reason
    if problem.query_invariant and refusal_of_kind(problem) is not None:
        return refusal_of_kind(problem)
    if problem.query_invariant and not is_split(problem):
        return "leaves query_invariant to hopper, which is faster with so many query rows"
    dims = (problem.D, problem.Dv)
    if max(dims) > MAX_HEAD_DIM or any(dim % HEAD_DIM_STEP for dim in dims):
        return (
            f"takes head dims that are multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got "
            f"D = {problem.D} and Dv = {problem.Dv}"
        )
    if problem.is_paged and problem.page_size % PAGE_ROWS:
        return f"takes pages of multiples of {PAGE_ROWS} keys, got {problem.page_size}"
    if problem.bias_shape is not None:
        return "takes no bias"
    if problem.has_kv_starts and problem.is_paged:
        return "takes no kv_starts with pages"
    if problem.has_alibi_slopes:
        return "takes no alibi_slopes"
    if 0 in (problem.B, problem.Sq, problem.Skv, problem.n_pages):
        return "takes at least one sequence, one query and one page"
    # Each tile of 64 rows reads all keys; those of the forward are taller. Packed queries are not
    # counted: what runs a sequence must not depend on its neighbours.
    is_counted = not (problem.is_packed or problem.query_invariant)
    most = least_queries_in_pages(problem) - 1
    if is_counted and most == 0:
        return "leaves windows this narrow, of heads in groups, to hopper's kernel for them"
    if is_counted and problem.Sq > most:
        return f"takes up to {most} queries of so many heads, got {problem.Sq}"
    if problem.softcap is not None and problem.softcap > MAX_SOFTCAP:
        return f"takes a softcap up to {MAX_SOFTCAP}, got {problem.softcap}"
    return None


KERNEL = Kernel(
    name="hopper_decode",
    supports=supports,
    prepare=_prepare,
    prepare_backward=None,
    deterministic=True,
    batch_invariant=True,
    # Lengths decide what is computed where.
    constant_time=False,
    query_invariant=True,
)
