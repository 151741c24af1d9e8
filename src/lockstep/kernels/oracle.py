"""The float64 oracle as a kernel: float64 inputs run through `lockstep.reference`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from lockstep import numerics, reference
from lockstep.kernels.kernel import (
    BackwardTensors,
    Gradients,
    Kernel,
    Merge,
    Needs,
    Prepared,
    PreparedBackward,
    Result,
)
from lockstep.memory_order import in_order_of
from lockstep.problem import AttentionProblem, Tensors


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`"""
    return partial(_run, problem)


def _run(problem: AttentionProblem, tensors: Tensors, addresses: list[int]) -> Result:
    with torch.no_grad():
        out, lse = reference.evaluate(problem, tensors)
    # The backward evaluates everything again.
    statistics = lse.new_zeros(problem.statistics_shape) if problem.has_gradient else None
    out, lse = in_order_of(tensors.q, out), in_order_of(tensors.q, lse)
    return out, lse, None if statistics is None else in_order_of(tensors.q, statistics)


def prepare_backward(
    problem: AttentionProblem, tensors: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    return partial(_run_backward, problem, needs)


def _run_backward(
    problem: AttentionProblem, needs: Needs, tensors: BackwardTensors, addresses: list[int]
) -> Gradients:
    wanted = {n: getattr(tensors, n).detach() for n in needs._fields if getattr(needs, n)}
    if problem.B == 0:
        grads = tuple(map(torch.zeros_like, wanted.values()))
    else:
        with _autograd_inside_an_operator():
            for leaf in wanted.values():
                leaf.requires_grad_()
            out, lse = reference.evaluate(problem, tensors.inputs._replace(**wanted))
            loss = (out * tensors.dout).sum()
            if tensors.dlse is not None:
                loss = loss + (lse * tensors.dlse).sum()
            grads = torch.autograd.grad(loss, list(wanted.values()))
    found = {
        name: in_order_of(wanted[name], grad) if name in "qkv" else grad.contiguous()
        for name, grad in zip(wanted, grads, strict=True)
    }
    return Gradients(*(found.get(name) for name in Gradients._fields))


@contextmanager
def _autograd_inside_an_operator() -> Iterator[None]:
    """Torch switches autograd off below an operator, enable_grad() or not; this undoes it."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def supports(problem: AttentionProblem) -> str | None:
    if problem.dtype != torch.float64:
        return f"takes float64, got {str(problem.dtype).removeprefix('torch.')}"
    return None


KERNEL = Kernel(
    name="oracle",
    supports=supports,
    prepare=prepare,
    prepare_backward=prepare_backward,
    deterministic=False,
    batch_invariant=False,
    constant_time=False,
    merge=Merge(supports=lambda part: True, run=numerics.merge),
)
