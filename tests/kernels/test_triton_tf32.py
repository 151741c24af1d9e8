"""float32 products rounded to tf32, which a caller has to allow."""

from __future__ import annotations

import pytest
import torch
from problems import same_bits

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton_device import DEVICE, GPU, needs_triton

import lockstep
from lockstep import reference
from lockstep.kernels.triton.products import split
from lockstep.problem import Options, Tensors, describe

pytestmark = needs_triton
on_a_gpu = pytest.mark.gpu
# tf32 keeps 10 bits behind the point and cuts off the rest: on average 2^-11 of each factor.
ROUGH, FINE = 6e-3, 1e-5
SIZES = [(64, 64), (128, 40), (200, 256)]
# Several tiles of both; few of them in the interpreter, which takes long over each.
Hq, Hkv, Sq, Skv = (4, 2, 70, 90) if GPU else (2, 1, 20, 40)


@triton.jit
def store_split(x_ptr, terms_ptr):
    at = tl.arange(0, 16)
    first, second, third = split(tl.load(x_ptr + at))
    tl.store(terms_ptr + at, first)
    tl.store(terms_ptr + 16 + at, second)
    tl.store(terms_ptr + 32 + at, third)


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
        assert off(b, truth) > 10 * FINE


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


def split_of(value: float) -> torch.Tensor:
    """The three terms of a number, as float32."""
    x = torch.full((16,), value, device=DEVICE)
    terms = torch.empty((3, 16), dtype=torch.bfloat16, device=DEVICE)
    store_split[(1,)](x, terms)
    return terms[:, 0].float()


@pytest.mark.parametrize("value", [torch.finfo().max, 3.4e38, 0.1, -1 / 3, -1e-38, 1e-42, 0.0])
def test_a_number_is_the_sum_of_three_of_bf16(value):
    x = torch.tensor(value).double()
    # The least number of bf16 is 2^-133.
    assert abs(split_of(value).double().sum() - x) <= (0 if abs(x) > 2**-110 else 2**-133)


@on_a_gpu
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_has_a_finite_rest(value):
    first, *rest = split_of(value)
    assert torch.equal(first.nan_to_num(5), torch.tensor(value, device=DEVICE).nan_to_num(5))
    assert all(torch.isfinite(x) for x in rest)
