"""PyTorch's own sample calls of scaled_dot_product_attention, with Lockstep behind them.

Its wheel has them for its tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from lockstep.integrations import sdpa

pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAME = "nn.functional.scaled_dot_product_attention"


@cache
def operator() -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    (found,) = (op for op in op_db if op.name == NAME)
    return found


def results(op: Any, given: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returns, and the gradients of the tensors it was given."""
    torch.manual_seed(0)
    out = op(*given, **options)
    leaves = [x for x in (*given, *options.values()) if isinstance(x, torch.Tensor)]
    leaves = [x for x in leaves if x.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def in_float64(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def assert_as_near(found: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Three times as far from the exact result as PyTorch's at most, and a few roundings."""
    rounding = 4 * torch.finfo(found.dtype).eps * float(exact.abs().max())
    error, their_error = (float((x.double() - exact).abs().max()) for x in (found, theirs))
    assert error <= 3 * their_error + rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples(dtype, counted):
    op, n_samples = operator(), 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        given, options = (sample.input, *sample.args), sample.kwargs
        theirs = results(op, given, options)
        with sdpa.active():
            found = results(op, given, options)
        n_samples += 1
        if options.get("dropout_p"):
            # Their kernel, with their random numbers.
            assert all(map(torch.equal, found, theirs))
            continue
        wide = {name: in_float64(value) for name, value in options.items()}
        exact = results(op, tuple(map(in_float64, given)), wide)
        for results_of_one in zip(found, theirs, exact, strict=True):
            assert_as_near(*results_of_one)
    assert n_samples >= 20
    assert counted, "no sample reached Lockstep"
