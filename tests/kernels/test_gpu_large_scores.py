"""Peaked rows and scores of any size on a GPU: as exact as FlashAttention 2, or exact."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from problems import Case, assert_exact, supporting
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lockstep
from lockstep import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HALF = (torch.bfloat16, torch.float16)
by_half = pytest.mark.parametrize("dtype", HALF, ids=["bf16", "fp16"])


def draw_on_gpu(Sq: int, Skv: int, D: int, sigma: float, dtype: torch.dtype) -> list[Tensor]:
    """q and k times sigma, v, dout: [2, 4, ., D]"""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, S, D, device="cuda") for S in (Sq, Skv, Skv, Sq))
    return [x.to(dtype) for x in (q * sigma, k * sigma, v, dout)]


def results(attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return [x.detach().double() for x in (out, *grads)]


def kernels_for(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    case = Case({"q": q, "k": k, "v": v}, {})
    return [kernel.name for kernel in supporting(case, backward=True)]


@by_half
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0, 30.0])
def test_peaked_rows_are_as_exact_as_those_of_flash_attention_2(sigma, D, dtype):
    tensors = draw_on_gpu(1023, 1023, D, sigma, dtype)
    wide = [x.double() for x in tensors]
    exact = results(reference.attention, *wide)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = results(F.scaled_dot_product_attention, *tensors)
    for name in kernels_for(*tensors[:3]):
        ours = results(lambda *qkv, name=name: lockstep.attention(*qkv, kernel=name), *tensors)
        names = ("out", "dq", "dk", "dv")
        for what, mine, other, right in zip(names, ours, theirs, exact, strict=True):
            rms = ((mine - right).square().mean() / (other - right).square().mean()).sqrt()
            assert rms <= 1.1, f"{name}: {what} has {float(rms):.2f} times the error"


def largest_error(sigma: float, D: int, theirs, n_keys: int = 1023, **options) -> float:
    """The largest error of out over that of `theirs`: the mean of many draws, since that of one is
    an extreme value."""
    torch.manual_seed(int(sigma))
    known = {name: options[name] for name in options.keys() & {"window"}}
    ratios = []
    for _draw in range(24):
        q = torch.randn(1, 4, 1023, D, device="cuda")
        k, v = (torch.randn(1, 4, n_keys, D, device="cuda") for _ in range(2))
        q, k, v = (x.bfloat16() for x in (q * sigma, k * sigma, v))
        exact = reference.attention(q.double(), k.double(), v.double(), **known)
        ours = lockstep.attention(q, k, v, **options)
        mine, other = ((x.double() - exact).abs().max() for x in (ours, theirs(q, k, v)))
        ratios.append((mine / other).log())
    return float(torch.stack(ratios).mean().exp())


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("D", [64, 80, 128, 192])
@pytest.mark.parametrize("sigma", [1.0, 2.0, 3.0, 30.0])
def test_largest_errors_are_those_of_flash_attention_2(sigma, D):
    assert largest_error(sigma, D, flash_attention_2) <= 1.15


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("sigma", [1.0, 3.0, 30.0])
def test_largest_errors_of_query_invariant_calls(sigma, D):
    """What decode computes has the same bits."""
    assert largest_error(sigma, D, flash_attention_2, query_invariant=True) <= 1.15


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("left", [299, 1000])
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_largest_errors_with_a_window(sigma, left, D):
    """Beside another kernel. All rows see as many keys; some see one key of their first block."""
    options = {"window": (left, 0)}
    theirs = partial(lockstep.attention, kernel="triton", **options)
    assert largest_error(sigma, D, theirs, 1023 + left, **options) <= 1.1


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("sigma", [1.0, 30.0, 300.0, 3e3])
def test_the_only_key_has_all_the_weight(sigma, D, dtype):
    """Whatever its score is: out is v, and dv the sum of dout."""
    q, k, v, dout = draw_on_gpu(40, 1, D, sigma, dtype)
    for name in kernels_for(q, k, v):
        out, _, _, dv = results(
            lambda *qkv, name=name: lockstep.attention(*qkv, kernel=name), q, k, v, dout
        )
        assert torch.equal(out, v.double().expand_as(out)), name
        summed = dout.double().sum(2, keepdim=True)
        scale = dout.double().abs().sum(2, keepdim=True).max()
        assert (dv - summed).abs().max() <= 2 * torch.finfo(dtype).eps * scale, name


@by_half
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large_scores_in_some_tiles_leave_the_others_alone(causal, D, dtype):
    """One head of a group has large scores, and so have some rows of another head."""
    torch.manual_seed(1)
    q = torch.randn(1, 4, 400, D, device="cuda")
    k, v = (torch.randn(1, 1, 300, D, device="cuda") for _ in "kv")
    q[:, 1] *= 1000
    q[:, 2, 130:200] *= 1000
    tensors = {name: x.to(dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    with torch.device("cuda"):
        assert_exact(Case(tensors, {"causal": causal}), gradients=True)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large_scores_of_one_head_leave_the_bits_of_others(causal, D):
    """Calls without any run other code."""
    q, k, v, dout = draw_on_gpu(700, 700, D, 1.0, torch.bfloat16)
    without = results(lambda *qkv: lockstep.attention(*qkv, causal=causal), q, k, v, dout)
    q[1, 2] *= 1000
    found = results(lambda *qkv: lockstep.attention(*qkv, causal=causal), q, k, v, dout)
    for mine, other in zip(found, without, strict=True):
        assert not torch.equal(mine[1, 2], other[1, 2])
        mine[1, 2] = other[1, 2]
        assert torch.equal(mine, other)
