"""From tensors and options to a function that runs them.

The tensors and options pose a problem, a kernel is selected for it, and the kernel prepares what
does not depend on data. `call_cache` keeps the function for other calls like this one.
"""

from __future__ import annotations

from operator import attrgetter, is_

import torch
from torch import Tensor

from lockstep import dispatch, memory_order
from lockstep.checks import are_values_checked, check_values
from lockstep.forks import fork_safe
from lockstep.kernels.kernel import (
    BackwardTensors,
    Gradients,
    Kernel,
    Needs,
    Prepared,
    PreparedBackward,
    Result,
)
from lockstep.problem import AttentionProblem, Options, Tensors, describe


def _select(
    tensors: Tensors, options: Options, name: str | None, *, backward: bool = False
) -> tuple[AttentionProblem, Kernel]:
    """The problem that a call poses, and the kernel for it."""
    problem = describe(tensors, options)
    # Kernels look at the current device.
    with torch.cuda.device_of(tensors.q):
        return problem, dispatch.select(problem, name, backward=backward)


def prepare(tensors: Tensors, options: Options, name: str | None) -> Prepared:
    """The function that runs this call, and others like it."""
    problem, kernel = _select(tensors, options, name)
    rows = _with_contiguous_rows(tensors)
    run = kernel.prepare(problem, rows)
    # Other calls like this one have the same strides.
    is_checked, is_contiguous = are_values_checked(problem), rows is tensors
    if is_contiguous and not is_checked:
        return run

    @fork_safe
    def check_and_run(tensors: Tensors, addresses: list[int]) -> Result:
        if is_checked:
            check_values(problem, tensors, options.max_seqlen_q)
        if is_contiguous:
            return run(tensors, addresses)
        rows = _with_contiguous_rows(tensors)
        return run(rows, rows.addresses())

    return check_and_run


def prepare_backward(
    given: BackwardTensors, options: Options, name: str | None, needs: Needs
) -> PreparedBackward:
    """The function that computes the gradients of this call, and of others like it."""
    problem, kernel = _select(given.inputs, options, name, backward=True)
    rows = _with_contiguous_results(given)
    assert kernel.prepare_backward is not None
    run = kernel.prepare_backward(problem, rows, needs)
    is_checked, is_contiguous = are_values_checked(problem), all(map(is_, rows, given))
    if is_contiguous and not is_checked:
        return run

    @fork_safe
    def check_and_run(given: BackwardTensors, addresses: list[int]) -> Gradients:
        if is_checked:
            check_values(problem, given.inputs, options.max_seqlen_q)
        if is_contiguous:
            return run(given, addresses)
        rows = _with_contiguous_results(given)
        return run(rows, rows.addresses())

    return check_and_run


def _with_contiguous_results(given: BackwardTensors) -> BackwardTensors:
    """The tensors of a backward with the strides that kernels rely on."""
    return BackwardTensors(
        *_with_contiguous_rows(given.inputs),
        memory_order.in_order_of(given.q, given.out),
        memory_order.in_order_of(given.q, given.statistics),
        _contiguous_rows(given.dout),
        None if given.dlse is None else memory_order.in_order_of(given.q, given.dlse),
    )


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else memory_order.in_order_of(tensor, tensor)


def _with_contiguous_rows(tensors: Tensors) -> Tensors:
    """The tensors of a call with the strides that kernels rely on.

    A bias keeps its strides: a copy of one that was expanded may be larger than all the rest.
    """
    tensors = _with_contiguous_vectors(tensors)
    q, k, v = tensors.q, tensors.k, tensors.v
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return tensors
    return tensors._replace(q=_contiguous_rows(q), k=_contiguous_rows(k), v=_contiguous_rows(v))


# Sinks, slopes, lengths, offsets and page tables: kernels are told where a row of these begins, and
# no stride within it.
_VECTORS = (
    *("sinks", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "page_table", "kv_starts"),
    "alibi_slopes",
)
_vectors_of = attrgetter(*_VECTORS)


def _with_contiguous_vectors(tensors: Tensors) -> Tensors:
    vectors = _vectors_of(tensors)
    if all(x is None or x.stride(-1) == 1 for x in vectors):
        return tensors
    contiguous = (None if x is None else _contiguous_rows(x) for x in vectors)
    return tensors._replace(**dict(zip(_VECTORS, contiguous, strict=True)))
