"""The correctness rule for gradients of the CPU path, through out and lse alike."""

from __future__ import annotations

import math

import pytest
import torch
from problems import (
    DTYPES,
    Case,
    assert_exact,
    assert_same_bits,
    draw,
    draw_douts,
    draw_varlen,
    run,
    strided_biases,
)

import lockstep

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])


def check(case: Case) -> None:
    assert_exact(case, gradients=True, kernel="cpu")


@by_dtype
@pytest.mark.parametrize("D", [1, 33, 64, 80, 128, 256, 512])
def test_head_dims(D, dtype):
    check(draw(63, 111, D=D, dtype=dtype))


@by_dtype
@pytest.mark.parametrize(("Sq", "Skv"), [(1, 1), (1, 300), (63, 1), (111, 1023), (300, 111)])
def test_lengths(Sq, Skv, dtype):
    check(draw(Sq, Skv, D=32, dtype=dtype))
    check(draw(Sq, Skv, D=32, dtype=dtype, causal=True))


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 1), (6, 2), (9, 3)])
@pytest.mark.parametrize("Sq", [3, 63])
def test_grouped_heads(Sq, Hq, Hkv):
    check(draw(Sq, 300, B=2, Hq=Hq, Hkv=Hkv, D=33, causal=True))


@by_dtype
@pytest.mark.parametrize(("D", "Dv"), [(33, 80), (128, 1), (1, 64)])
def test_value_dim_of_its_own(D, Dv, dtype):
    check(draw(40, 111, D=D, Dv=Dv, dtype=dtype))


@by_dtype
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (17, 5)}, {"softcap": 5.0}, {"scale": -0.3}],
    ids=lambda options: next(iter(options)),
)
def test_options(options, dtype):
    check(draw(63, 300, dtype=dtype, **options))


@by_dtype
def test_sinks(dtype):
    sinks = torch.tensor([0.5, -1.0, 3.0, -2.0]).to(dtype)
    check(draw(63, 300, Hq=4, dtype=dtype, sinks=sinks, causal=True))


@pytest.mark.parametrize(
    "shape", [(2, 4, 1, 1), (1, 1, 1, 300), (2, 1, 1, 1), (1, 4, 63, 300), (63, 1), ()], ids=str
)
def test_bias_broadcasts(shape):
    check(draw(63, 300, B=2, Hq=4, D=16, bias=torch.randn(shape), softcap=10.0))


@pytest.mark.parametrize("name", strided_biases(1, 1, 1, 1))
def test_strides_of_a_bias_change_no_bit(name):
    bias = strided_biases(2, 2, 40, 300)[name]
    case = draw(40, 300, B=2, D=16, bias=bias, causal=True)
    douts = draw_douts(case)
    expected = run(case.replaced(bias=bias.contiguous()), douts=douts, kernel="cpu")
    assert_same_bits(run(case, douts=douts, kernel="cpu"), expected)


@pytest.mark.parametrize("shape", [(40, 1), (40,), (3, 1, 40)], ids=str)
def test_an_expanded_bias_gives_its_gradient_to_what_it_was_made_of(shape):
    part = torch.randn(shape, requires_grad=True)
    q, k, v, dout = torch.randn(4, 2, 3, 40, 16)
    grads = []
    for bias in (part.expand(2, 3, 40, 40), part):
        out, lse = lockstep.attention(q, k, v, bias=bias, causal=True, return_lse=True)
        grads += torch.autograd.grad((out * dout).sum() + lse.sum(), part)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@by_dtype
def test_bias_that_hides_keys(dtype):
    bias = torch.randn(63, 111).to(dtype)
    bias[torch.rand(63, 111) < 0.3] = -math.inf
    bias[4] = -math.inf
    check(draw(63, 111, dtype=dtype, bias=bias))


def test_kv_lens():
    check(draw(40, 300, B=4, kv_lens=torch.tensor([0, 1, 256, 300]), causal=True))


@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_to_attend(B, Sq, Skv):
    case = draw(Sq, Skv, B=B, sinks=torch.zeros(2))
    for name, grad in run(case, douts=draw_douts(case), kernel="cpu").grads.items():
        assert grad.shape == case.tensors[name].shape
        # With neither keys nor values, only the lse depends on anything: on the sink.
        assert name == "sinks" or grad.eq(0).all()


@by_dtype
def test_strided_inputs(dtype):
    q = torch.randn(2, 63, 4, 64).to(dtype).transpose(1, 2)
    k = torch.randn(2, 2, 64, 111).to(dtype).mT
    v = torch.randn(2, 2, 222, 96).to(dtype)[:, :, ::2, 5:69]
    check(Case({"q": q, "k": k, "v": v}))


def test_expanded_gradient_of_the_output():
    case = draw(63, 111)
    dlse = torch.zeros(1, 2, 63)
    ones = torch.ones(1, 2, 63, 64)
    whole = run(case, douts=(ones, dlse)).items()
    expanded = run(case, douts=(torch.ones(()).expand_as(ones), dlse)).items()
    for what, grad in whole.items():
        assert torch.equal(grad, expanded[what])


@by_dtype
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 3), "softcap": 8.0}])
def test_varlen(options, dtype):
    case = draw_varlen([1, 0, 63, 5, 30], [300, 7, 63, 0, 111], dtype=dtype, **options)
    check(case.replaced(sinks=torch.randn(4)))


def test_only_what_is_asked_for():
    case = draw(40, 111, sinks=torch.zeros(2))
    douts = draw_douts(case)
    all_of_them = run(case, douts=douts).grads
    for name in ("q", "k", "v", "sinks"):
        leaf = case.tensors[name].clone().requires_grad_()
        results = case.replaced(**{name: leaf}).call(lockstep)
        (grad,) = torch.autograd.grad(results, leaf, douts)
        assert torch.equal(grad, all_of_them[name])
