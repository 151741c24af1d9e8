"""The Hopper path: Gluon kernels for compute capability 9.0.

Importing this package does not import Triton.

    common/    what both directions use: Gluon's names, shared memory, barriers, tensor maps
    forward/   one kernel, warp-specialized and persistent
    backward/  gradients: three designs, for narrow, medium and wide heads
    decode/    a few queries against a cache: a kernel of its own

A row's bits depend on its own sequence and the head dims alone.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.query_invariance import refusal_of_kind
from lockstep.kernels.hopper.common.requirements import (
    HEAD_DIM_STEP,
    LONG,
    MAX_HEAD_DIM,
    MAX_ROWS,
    MAX_SOFTCAP,
    PAGE_ROWS,
    has_tiles_in_pages,
    has_too_many_rows,
    refusal_of_device,
)
from lockstep.kernels.hopper.forward.page_rule import least_queries_in_pages
from lockstep.kernels.kernel import BackwardTensors, Kernel, Needs, Prepared, PreparedBackward
from lockstep.problem import AttentionProblem, Tensors

# Above these, gradients take two passes: of both head dims, and of D where Dv is no larger.
MAX_ONE_PASS_HEAD_DIM = 128
MAX_ONE_PASS_KEY_DIM = 192
# Fewer query rows than this leave the SMs idle: the Triton path splits the keys instead. With
# grouped heads it also packs a group into one tile, and is faster for longer.
MIN_QUERIES = 16
MIN_QUERIES_OF_GROUPS = 33
# With LONG keys in every sequence, for longer still.
MIN_QUERIES_ON_LONG = 65


def _prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    from lockstep.kernels.hopper.forward.launch import prepare

    return prepare(problem, tensors)


def _prepare_backward(
    problem: AttentionProblem, tensors: BackwardTensors, needs: Needs
) -> PreparedBackward:
    if problem.Dv <= MAX_ONE_PASS_HEAD_DIM < problem.D <= MAX_ONE_PASS_KEY_DIM:
        from lockstep.kernels.hopper.backward.medium import call as medium

        return medium.prepare_backward(problem, tensors, needs)
    if max(problem.D, problem.Dv) > MAX_ONE_PASS_HEAD_DIM:
        from lockstep.kernels.hopper.backward.wide import call as wide

        return wide.prepare_backward(problem, tensors, needs)
    from lockstep.kernels.hopper.backward.narrow import call as narrow

    return narrow.prepare_backward(problem, tensors, needs)


def supports(problem: AttentionProblem) -> str | None:
    reason = refusal_of_device(problem)
    if reason is not None:
        return reason
    dims = problem.D, problem.Dv
    if max(dims) > MAX_HEAD_DIM or any(dim % HEAD_DIM_STEP for dim in dims):
        return (
            f"takes head dims in multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got "
            f"D = {problem.D} and Dv = {problem.Dv}"
        )
    reason = _refusal_of_pages(problem) if problem.is_paged else None
    if reason is not None:
        return reason
    if problem.has_kv_starts:
        return "takes no kv_starts"
    if problem.has_alibi_slopes:
        return "takes no alibi_slopes"
    if problem.bias_shape is not None:
        return "takes no bias"
    if problem.secret_lengths:
        return "takes no secret_lengths"
    has_numbers = problem.has_kv_lens or problem.layout == "varlen"
    if has_numbers and 0 in (problem.B, problem.Skv):
        return "takes lengths and offsets of at least one sequence and one key"
    if problem.softcap is not None and problem.softcap > MAX_SOFTCAP:
        return f"takes a softcap up to {MAX_SOFTCAP}, got {problem.softcap}"
    if has_too_many_rows(problem):
        return f"takes up to {MAX_ROWS} rows in all heads, got more"
    if problem.query_invariant:
        return refusal_of_kind(problem)
    if problem.is_paged:
        return None
    # Only the sum of the lengths of packed sequences is known, and which kernel runs a sequence
    # must not depend on its neighbours.
    least = MIN_QUERIES if problem.Hq == problem.Hkv else MIN_QUERIES_OF_GROUPS
    if problem.Hq > problem.Hkv and problem.Skv >= LONG and not problem.has_kv_lens:
        least = MIN_QUERIES_ON_LONG
    if problem.layout != "varlen" and problem.Sq < least:
        return f"takes {least} queries or more in a sequence, got {problem.Sq}"
    return None


def _refusal_of_pages(problem: AttentionProblem) -> str | None:
    if problem.layout == "varlen_paged":
        return "takes no ragged queries in pages"
    if problem.constant_time:
        return "takes no constant_time in pages"
    if problem.page_size % PAGE_ROWS:
        return f"takes pages of multiples of {PAGE_ROWS} keys, got {problem.page_size}"
    if not has_tiles_in_pages(problem):
        return f"takes pages with D in multiples of 16 up to 192, or 256, got {problem.D}"
    if 0 in (problem.B, problem.Sq, problem.Skv, problem.n_pages):
        return "takes at least one sequence, one query and one page"
    # With query_invariant, hopper_decode comes first where it is faster.
    least = least_queries_in_pages(problem)
    if problem.Sq < least and not problem.query_invariant:
        return f"takes {least} queries or more of so many heads on pages, got {problem.Sq}"
    return None


def supports_backward(problem: AttentionProblem) -> str | None:
    """Why gradients are refused of a problem that the forward takes."""
    if 0 in (problem.B, problem.Sq, problem.Skv):
        return "has a backward for at least one query and one key"
    if problem.query_invariant:
        return "leaves gradients with query_invariant to triton, whose sums go by position"
    return None


KERNEL = Kernel(
    name="hopper",
    supports=supports,
    prepare=_prepare,
    prepare_backward=_prepare_backward,
    deterministic=True,
    batch_invariant=True,
    constant_time=True,
    query_invariant=True,
    supports_backward=supports_backward,
)
