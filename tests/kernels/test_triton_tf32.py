"""float32 products rounded to tf32, which a caller has to allow."""

from __future__ import annotations

import pytest
import torch
from problems import same_bits

pytest.importorskip("triton")
from triton_device import DEVICE, GPU, needs_triton

import lockstep
from lockstep import reference
from lockstep.problem import Options, Tensors, describe

pytestmark = needs_triton
on_a_gpu = pytest.mark.gpu
# tf32 keeps 10 bits behind the point and cuts off the rest: on average 2^-11 of each factor.
ROUGH, FINE = 6e-3, 1e-5
SIZES = [(64, 64), (128, 40), (200, 256)]
# Several tiles of both; few of them in the interpreter, which takes long over each.
Hq, Hkv, Sq, Skv = (4, 2, 70, 90) if GPU else (2, 1, 20, 40)


def inputs(D: int, Dv: int, Sq: int = Sq, B: int = 1) -> list[torch.Tensor]:
    shapes = (B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv)
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


def results(module, tensors, **options) -> list[torch.Tensor]:
    """out, then the gradients of q, k and v."""
    out = module.attention(*tensors, causal=True, **options)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def off(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def assert_as_exact_as_allowed(D: int, Dv: int) -> None:
    tensors = inputs(D, Dv)
    exact = results(reference, [x.detach().double().requires_grad_() for x in tensors])
    fine = results(lockstep, tensors, kernel="triton")
    rough = results(lockstep, tensors, kernel="triton", allow_tf32=True)
    for a, b, truth in zip(fine, rough, exact, strict=True):
        assert off(a, truth) < FINE
        assert off(b, truth) < ROUGH
        # The interpreter computes in float32 all the same.
        assert not GPU or off(b, truth) > 10 * FINE


def assert_decode_agrees_with_prefill() -> None:
    q, k, v = (x.detach() for x in inputs(64, 64, Sq=Skv, B=2))
    options = {"causal": True, "query_invariant": True, "allow_tf32": True, "kernel": "triton"}
    whole = lockstep.attention(q, k, v, **options)
    for i in (0, 17, Skv - 1):
        keys, values = k[1:, :, : i + 1], v[1:, :, : i + 1]
        alone = lockstep.attention(q[1:, :, i : i + 1], keys, values, **options)
        assert same_bits(alone, whole[1:, :, i : i + 1])


@pytest.mark.parametrize(("D", "Dv"), SIZES)
def test_as_exact_as_allowed(D, Dv):
    assert_as_exact_as_allowed(D, Dv)


def test_decode_agrees_with_prefill():
    assert_decode_agrees_with_prefill()


@on_a_gpu
@pytest.mark.parametrize(("D", "Dv"), [*SIZES, (512, 512)])
def test_as_exact_as_allowed_on_a_gpu(D, Dv):
    assert_as_exact_as_allowed(D, Dv)


@on_a_gpu
def test_decode_agrees_with_prefill_on_a_gpu():
    assert_decode_agrees_with_prefill()


def test_only_float32_has_something_to_allow():
    options = Options(allow_tf32=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.empty(1, 1, 1, 16, dtype=dtype)
        problem = describe(Tensors(x, x, x), options)
        assert problem.allow_tf32 == (dtype == torch.float32)
        assert problem.allow_tf32 == str(problem).endswith("allow_tf32")
