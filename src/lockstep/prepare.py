"""From tensors and options to what runs them: the problem they pose, the kernel for it, and what
that kernel makes of both. `call_cache` keeps it for calls like this one.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor

from lockstep import dispatch
from lockstep.cache import Cache
from lockstep.checks import are_values_checked, check_values
from lockstep.kernels.cpu.processes import fork_safe
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

# What was found for a call, by all that it depends on.
_PLANS: Cache[tuple[Any, ...], tuple[AttentionProblem, Kernel]] = Cache(limit=4096)


def _plan(
    tensors: Tensors, options: Options, name: str | None, *, backward: bool = False
) -> tuple[AttentionProblem, Kernel]:
    """The problem and the kernel for it: the same objects again for a call of the same kind."""
    kinds = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    key = (options, name, backward, dispatch.KERNELS, *kinds)
    plan = _PLANS.get(key)
    if plan is None:
        problem = describe(tensors, options)
        # Kernels look at the current device.
        with torch.cuda.device_of(tensors.q):
            plan = _PLANS[key] = problem, dispatch.select(problem, name, backward=backward)
    return plan


def prepare(tensors: Tensors, options: Options, name: str | None) -> Prepared:
    """What runs this call, and others like it."""
    problem, kernel = _plan(tensors, options, name)
    rows = _with_contiguous_rows(tensors)
    run = kernel.prepare(problem, rows)
    is_checked = are_values_checked(problem)
    if rows is tensors and not is_checked:
        return run

    @fork_safe
    def check_and_run(tensors: Tensors, addresses: list[int]) -> Result:
        if is_checked:
            check_values(problem, tensors)
        rows = _with_contiguous_rows(tensors)
        return run(rows, addresses if rows is tensors else rows.addresses())

    return check_and_run


def prepare_backward(
    given: BackwardTensors, options: Options, name: str | None, needs: Needs
) -> PreparedBackward:
    """What derives this call, and others like it."""
    problem, kernel = _plan(given.inputs, options, name, backward=True)
    rows = _with_contiguous_results(given)
    assert kernel.prepare_backward is not None
    run = kernel.prepare_backward(problem, rows, needs)
    is_checked = are_values_checked(problem)
    if not is_checked and all(map(is_, rows, given)):
        return run

    @fork_safe
    def check_and_run(given: BackwardTensors, addresses: list[int]) -> Gradients:
        if is_checked:
            check_values(problem, given.inputs)
        rows = _with_contiguous_results(given)
        return run(rows, rows.addresses())

    return check_and_run


def _with_contiguous_results(given: BackwardTensors) -> BackwardTensors:
    """What a backward takes."""
    return BackwardTensors(
        *_with_contiguous_rows(given.inputs),
        given.out.contiguous(),
        given.statistics.contiguous(),
        _contiguous_rows(given.dout),
        None if given.dlse is None else given.dlse.contiguous(),
    )


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _with_contiguous_rows(tensors: Tensors) -> Tensors:
    """A bias keeps its strides: a copy of one that was expanded may be larger than all the rest."""
    tensors = _with_contiguous_numbers(tensors)
    q, k, v = tensors[:3]
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return tensors
    return tensors._replace(q=_contiguous_rows(q), k=_contiguous_rows(k), v=_contiguous_rows(v))


def _with_contiguous_numbers(tensors: Tensors) -> Tensors:
    """Sinks, lengths, offsets and page tables: of these, kernels know where a row begins."""
    numbers = tensors[4:]
    if all(x is None or x.stride(-1) == 1 for x in numbers):
        return tensors
    return Tensors(*tensors[:4], *(None if x is None else _contiguous_rows(x) for x in numbers))
