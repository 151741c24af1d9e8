"""Gradients of a call like an earlier one are prepared once, and those of no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_calls import backward, forget_calls
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep import dispatch, reference
from lockstep.kernels import oracle
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs
from lockstep.problem import AttentionProblem

F64 = torch.float64


@pytest.fixture
def prepares(monkeypatch) -> list[Needs]:
    """What `prepare_backward` was called for, with the oracle's gradients."""
    found = []

    def prepare_backward(problem: AttentionProblem, given: BackwardTensors, needs: Needs) -> Any:
        found.append(needs)

        def run(given: BackwardTensors, addresses: list[int]) -> Gradients:
            assert addresses == given.addresses()
            return backward(oracle.KERNEL, problem, given, needs)

        return run

    kernel = replace(oracle.KERNEL, prepare_backward=prepare_backward)
    monkeypatch.setattr(dispatch, "KERNELS", (kernel,))
    forget_calls(monkeypatch)
    return found


def leaves() -> list[torch.Tensor]:
    return [x.requires_grad_() for x in torch.randn(3, 1, 2, 6, 8, dtype=F64).unbind()]


def test_a_call_is_prepared_once(prepares):
    for _ in range(4):
        qkv = leaves()
        out = lockstep.attention(*qkv)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, qkv, dout)
        exact = torch.autograd.grad(reference.attention(*qkv), qkv, dout)
        assert all(map(torch.allclose, grads, exact))
    assert prepares == [Needs(True, True, True, False, False)]


CHANGES = {
    "strides of dout": lambda out: torch.randn(1, 6, 2, 8, dtype=F64).transpose(1, 2),
    "dout is one number": lambda out: torch.ones(1, 1, 1, 1, dtype=F64).expand_as(out),
    "alignment of dout": lambda out: torch.randn(out.numel() + 1, dtype=F64)[1:].view_as(out),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_prepared_anew(prepares, change):
    qkv = leaves()
    for n, make in enumerate((lambda out: torch.randn_like(out), CHANGES[change]), 1):
        for _ in range(3):
            out = lockstep.attention(*qkv)
            dout = make(out)
            grads = torch.autograd.grad(out, qkv, dout)
            exact = torch.autograd.grad(reference.attention(*qkv), qkv, dout)
            assert all(map(torch.allclose, grads, exact))
            assert len(prepares) == n


def test_other_needs_are_prepared_anew(prepares):
    qkv = leaves()
    for wanted in ((0, 1, 2), (1,), (0, 2), (1,), (0, 1, 2)):
        given = [x if i in wanted else x.detach() for i, x in enumerate(qkv)]
        out, lse = lockstep.attention(*given, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), [given[i] for i in wanted])
        assert all(x.isfinite().all() for x in grads)
    assert [needs[:3] for needs in prepares] == [
        (True, True, True),
        (False, True, False),
        (True, False, True),
    ]


def test_a_second_derivative_is_refused_every_time(prepares):
    qkv = leaves()
    for _ in range(3):
        torch.autograd.grad(lockstep.attention(*qkv).sum(), qkv)
        (dq,) = torch.autograd.grad(lockstep.attention(*qkv).sum(), qkv[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(dq.sum(), qkv[0])


def test_a_dispatch_mode_sees_the_backward_operator(prepares):
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    qkv = leaves()
    for _ in range(3):
        torch.autograd.grad(lockstep.attention(*qkv).sum(), qkv)
    out = lockstep.attention(*qkv).sum()
    with Spy():
        torch.autograd.grad(out, qkv)
    assert torch.ops.lockstep.attention_backward.default in seen
