"""The correctness rule at any finite scores: large inputs, large biases, exact cases, long rows."""

from __future__ import annotations

import math

import pytest
import torch
from problems import (
    DTYPES,
    Case,
    assert_all_exact,
    assert_exact,
    draw,
    draw_douts,
    run,
    same_bits,
)
from torch import Tensor

import lockstep
from lockstep import reference

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
by_rows = pytest.mark.parametrize("Sq", [3, 111])
SIGMAS = (1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 3e4)


def check(case: Case) -> None:
    """The rule, forward and backward."""
    assert_exact(case, gradients=True, kernel="cpu")


def scaled(case: Case, sigma: float) -> Case:
    """q and k times sigma, within what the dtype holds."""
    limit = torch.finfo(case.tensors["q"].dtype).max
    changes = {n: (case.tensors[n].float() * sigma).clamp(-limit, limit) for n in ("q", "k")}
    return case.replaced(**{n: x.to(case.tensors["q"].dtype) for n, x in changes.items()})


@by_dtype
@pytest.mark.parametrize(("D", "Sq"), [(64, 3), (96, 111), (128, 3), (128, 111)])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_large_inputs(sigma, D, Sq, dtype):
    check(scaled(draw(Sq, 300, D=D, dtype=dtype), sigma))


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.tensor([30.0, -1e4])},
        {"softcap": 30.0},
        {"scale": -1.7},
        {"causal": True, "bias": torch.randn(40, 300)},
    ],
    ids=lambda options: "-".join(options),
)
def test_large_inputs_with_options(options, sigma):
    check(scaled(draw(40, 300, D=80, **options), sigma))


@by_dtype
@by_rows
@pytest.mark.parametrize("D", [64, 128, 256])
def test_integers(D, Sq, dtype):
    """Scores are whole numbers: PyTorch's are exact, and so have to be ours."""
    case = draw(Sq, 300, D=D, dtype=dtype)
    whole = {n: torch.randint(-4, 5, case.tensors[n].shape).to(dtype) for n in ("q", "k")}
    check(case.replaced(**whole, scale=1.0))


@by_dtype
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_one_key_has_weight_one(sigma, D, dtype):
    case = scaled(draw(40, 1, D=D, dtype=dtype), sigma)
    douts = draw_douts(case)[0], torch.zeros(1, 2, 40)
    result = run(case, douts=douts, kernel="cpu")
    assert same_bits(result.out, case.tensors["v"].expand_as(result.out) + 0.0)
    assert result.grads["q"].eq(0).all()
    assert result.grads["k"].eq(0).all()
    for i in range(40):
        row = {"q": case.tensors["q"][:, :, i : i + 1]}
        dout = douts[0][:, :, i : i + 1]
        alone = run(case.replaced(**row), douts=(dout, torch.zeros(1, 2, 1)), kernel="cpu")
        assert same_bits(alone.grads["v"], dout + 0.0)


@by_dtype
@by_rows
@pytest.mark.parametrize("height", [5.0, 50.0, 500.0, 5e3])
def test_one_dominant_key(height, Sq, dtype):
    case = draw(Sq, 300, D=128, dtype=dtype)
    k = case.tensors["k"].clone()
    k[:, :, 123] = (case.tensors["q"][:, :, 0].float() * height).to(dtype)
    check(case.replaced(k=k))


@by_dtype
@by_rows
@pytest.mark.parametrize("sigma", [1.0, 100.0, 1e4])
def test_constant_rows(sigma, Sq, dtype):
    """Every key is the same: weights are equal, however large the score."""
    case = scaled(draw(Sq, 300, D=96, dtype=dtype), sigma)
    check(case.replaced(k=case.tensors["k"][:, :, :1].expand(1, 2, 300, 96)))


@by_dtype
@by_rows
@pytest.mark.parametrize("sigma", [1.0, 100.0, 1e4])
def test_alternating_signs(sigma, Sq, dtype):
    """Products cancel within a score, and scores alternate from key to key."""
    case = scaled(draw(Sq, 300, D=96, dtype=dtype), sigma)
    d_signs = 1.0 - 2.0 * (torch.arange(96) % 2)
    kv_signs = 1.0 - 2.0 * (torch.arange(300) % 2)
    k = case.tensors["k"].abs() * (d_signs * kv_signs[:, None]).to(dtype)
    check(case.replaced(q=case.tensors["q"].abs(), k=k))


def _large_biases(dtype: torch.dtype) -> list[float]:
    lowest = torch.finfo(dtype).min
    values = (-1e4, 1e4, -1e5, -1e6, -1e9, -1e30, 1e9)
    return [b for b in values if abs(b) <= -lowest] + [lowest]


@by_dtype
@by_rows
@pytest.mark.parametrize("part", ["row", "half", "scattered"])
@pytest.mark.parametrize("i", range(8))
def test_large_finite_biases(i, part, Sq, dtype):
    values = _large_biases(dtype)
    if i >= len(values):
        pytest.skip("beyond this dtype")
    bias = torch.zeros(Sq, 300, dtype=dtype)
    if part == "row":
        bias[:2] = values[i]
    elif part == "half":
        bias[:2, :150] = values[i]
    else:
        bias[torch.rand(Sq, 300) < 0.3] = values[i]
    check(draw(Sq, 300, dtype=dtype, bias=bias))


@by_dtype
@by_rows
def test_a_row_of_the_lowest_bias_averages_v(Sq, dtype):
    case = draw(Sq, 300, dtype=dtype, bias=torch.full((Sq, 300), torch.finfo(dtype).min).to(dtype))
    # Beside a bias of this size, fp16 keeps some scores; beside 3.4e38 no dtype keeps any.
    if dtype == torch.float16:
        case = case.replaced(q=torch.zeros_like(case.tensors["q"]))
    result = run(case, kernel="cpu")
    mean = case.tensors["v"].double().mean(2, keepdim=True).expand_as(result.out)
    torch.testing.assert_close(result.out, mean.to(dtype), rtol=1e-2, atol=1e-6)
    assert result.lse.isfinite().all()


@by_rows
def test_large_sinks(Sq):
    for sink in (-3.4e38, -1e9, 1e4, 1e9, 3.4e38):
        check(draw(Sq, 300, sinks=torch.tensor([sink, 0.0])))


@by_rows
@pytest.mark.parametrize(
    "option",
    [{"scale": s} for s in (0.0, 1e-37, 1e37, -1e37)] + [{"softcap": s} for s in (1e-37, 1e36)],
    ids=str,
)
def test_options_at_the_ends_of_their_range(option, Sq):
    """Queries of 0 have scores of 0, whatever these are multiplied with or divided by."""
    case = draw(Sq, 300, **option)
    case = case.replaced(q=torch.zeros_like(case.tensors["q"]))
    result, exact = (run(case, module) for module in (lockstep, reference))
    torch.testing.assert_close(result.out.double(), exact.out, rtol=1e-6, atol=1e-6)
    douts = draw_douts(case)
    assert not any(grad.isnan().any() for grad in run(case, douts=douts).grads.values())
    if "softcap" in option:
        assert_all_exact(draw(Sq, 300, **option))


@by_rows
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_products_overflow_only_where_scores_do(sign, Sq):
    """q·k of 8e38, scores of 1e38: the largest wins, and rows of nothing but -1e38 are not empty.

    Near the oracle, for PyTorch's operators overflow.
    """
    case = draw(Sq, 300)
    q, k = sign * case.tensors["q"].abs(), case.tensors["k"].abs()
    case = case.replaced(q=q * 4e18, k=k * 4e18)
    assert (q.double() @ k.double().mT * 1.6e37).abs().max() > torch.finfo(torch.float32).max
    assert_all_exact(case)


def _long(n: int, v: Tensor) -> tuple[Tensor, Tensor]:
    """The largest error of attention over n keys of D 8, ours and that of softmax · v in fp32."""
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, n, 8)
    scores = q @ k.mT / math.sqrt(8)
    exact = torch.softmax(scores.double(), -1) @ v.double()
    plain = torch.softmax(scores, -1) @ v
    ours = lockstep.attention(q, k, v, kernel="cpu")
    return (ours - exact).abs().max(), (plain - exact).abs().max()


@pytest.mark.parametrize("n", [1 << 17, 1 << 20])
@pytest.mark.parametrize("values", ["constant", "around one"])
def test_long_rows(values, n):
    v = torch.randn(1, 1, 1, 8).expand(1, 1, n, 8) if values == "constant" else None
    v = 1 + torch.randn(1, 1, n, 8) if v is None else v.contiguous()
    ours, plain = _long(n, v)
    # Sums of 256 keys, of 64 spans, of up to 64 groups: a few hundred roundings at worst.
    assert ours <= 2 * plain
    assert ours <= 32 * torch.finfo(torch.float32).eps * v.abs().max()


def test_equal_keys_and_values_stay_what_they_are():
    """A million equal keys: sums that round the same way each time must not drift."""
    n = 1 << 20
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 1, 8).expand(1, 1, n, 8)
    v = torch.randn(1, 1, 1, 8)
    out = lockstep.attention(q, k, v.expand(1, 1, n, 8), kernel="cpu")
    torch.testing.assert_close(out, v.expand_as(out), rtol=1e-5, atol=0)
