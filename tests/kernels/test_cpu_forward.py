"""The correctness rule for outputs of the CPU path, over shapes, dtypes, layouts and options."""

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
    draw_varlen,
    paginate,
    run,
    strided_biases,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])

OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (17, 5)},
    "window to the left": {"window": (30, None)},
    "causal window": {"window": (40, 0), "causal": True},
    "softcap": {"softcap": 5.0},
    "negative scale": {"scale": -0.3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, -math.inf])},
}


@by_dtype
@pytest.mark.parametrize("D", [1, 33, 64, 80, 128, 256, 512])
def test_head_dims(D, dtype):
    assert_exact(draw(63, 111, D=D, dtype=dtype), kernel="cpu")


@pytest.mark.parametrize("D", [1, 80, 512])
def test_head_dims_in_decoding(D):
    # Enough sequences that a maximum means something where a row is one number.
    assert_exact(draw(1, 300, B=32, D=D), kernel="cpu")


@by_dtype
@pytest.mark.parametrize(
    ("Sq", "Skv"), [(1, 1), (1, 63), (63, 1), (1, 1023), (111, 63), (111, 1023), (1023, 111)]
)
def test_lengths(Sq, Skv, dtype):
    assert_exact(draw(Sq, Skv, dtype=dtype), kernel="cpu")
    assert_exact(draw(Sq, Skv, dtype=dtype, causal=True), kernel="cpu")


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 1), (6, 2), (9, 3), (12, 1)])
@pytest.mark.parametrize("Sq", [1, 3, 63])
def test_grouped_heads(Sq, Hq, Hkv):
    assert_exact(draw(Sq, 300, B=2, Hq=Hq, Hkv=Hkv, D=33, causal=True), kernel="cpu")


@by_dtype
@pytest.mark.parametrize(("D", "Dv"), [(33, 80), (128, 1), (1, 64), (64, 256)])
@pytest.mark.parametrize("Sq", [2, 40])
def test_value_dim_of_its_own(Sq, D, Dv, dtype):
    assert_exact(draw(Sq, 111, D=D, Dv=Dv, dtype=dtype), kernel="cpu")


@by_dtype
@pytest.mark.parametrize("Sq", [2, 111])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, Sq, dtype):
    assert_exact(draw(Sq, 300, Hq=4, dtype=dtype, **OPTIONS[name]), kernel="cpu")


@pytest.mark.parametrize("Sq", [3, 63])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 1, 1), (1, 1, 1, 300), (2, 1, 1, 1), (1, 4, "Sq", 300), ("Sq", 1), ("Sq", 300)],
    ids=str,
)
def test_bias_broadcasts(Sq, shape):
    bias = torch.randn([Sq if size == "Sq" else size for size in shape])
    assert_exact(draw(Sq, 300, B=2, Hq=4, bias=bias, softcap=10.0), kernel="cpu")


@pytest.mark.parametrize("Sq", [3, 63])
@pytest.mark.parametrize("name", strided_biases(1, 1, 1, 1))
def test_strides_of_a_bias_change_no_bit(name, Sq):
    bias = strided_biases(2, 2, Sq, 300)[name]
    case = draw(Sq, 300, B=2, D=16, bias=bias)
    expected = run(case.replaced(bias=bias.contiguous()), kernel="cpu")
    assert_same_bits(run(case, kernel="cpu"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", ["same", torch.float32])
def test_bias_that_hides_keys(dtype, bias_dtype):
    bias = torch.randn(20, 300).to(dtype if bias_dtype == "same" else bias_dtype)
    bias[torch.rand(20, 300) < 0.3] = -math.inf
    bias[4] = -math.inf
    assert_exact(draw(20, 300, dtype=dtype, bias=bias), kernel="cpu")


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("Sq", [2, 63])
def test_kv_lens(Sq, integer):
    kv_lens = torch.tensor([0, 1, 256, 300], dtype=integer)
    assert_exact(draw(Sq, 300, B=4, kv_lens=kv_lens, causal=True), kernel="cpu")


@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_nothing_to_attend(B, Sq, Skv):
    case = draw(Sq, Skv, B=B)
    result = run(case, kernel="cpu")
    assert result.out.shape == (B, 2, Sq, 64)
    assert result.lse.shape == (B, 2, Sq)
    assert result.out.eq(0).all()
    assert result.lse.eq(-math.inf).all()


def test_many_rows_of_sequences_without_keys():
    case = draw(65, 2, B=2, kv_lens=torch.tensor([0, 0]))
    assert_exact(case, gradients=True, kernel="cpu")
    assert not run(case, kernel="cpu").out.any()


def test_rows_that_see_nothing():
    result = run(draw(10, 4, causal=True), kernel="cpu")
    assert result.out[:, :, :6].eq(0).all()
    assert result.lse[:, :, :6].eq(-math.inf).all()
    assert result.lse[:, :, 6:].isfinite().all()


@by_dtype
@pytest.mark.parametrize("Sq", [2, 63])
def test_strided_inputs(Sq, dtype):
    q = torch.randn(2, Sq, 4, 64).to(dtype).transpose(1, 2)
    k = torch.randn(2, 1, 64, 111).to(dtype).mT.expand(2, 2, 111, 64)
    v = torch.randn(2, 2, 222, 96).to(dtype)[:, :, ::2, 5:69]
    assert_exact(Case({"q": q, "k": k, "v": v}), kernel="cpu")


@by_dtype
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 3), "softcap": 8.0}])
def test_varlen(options, dtype):
    case = draw_varlen([1, 0, 63, 5, 30], [300, 7, 63, 0, 111], dtype=dtype, **options)
    assert_exact(case.replaced(sinks=torch.randn(4)), kernel="cpu")


@by_dtype
@pytest.mark.parametrize("page_size", [1, 16, 300])
def test_paged(page_size, dtype):
    dense = draw(5, 300, B=3, Hq=4, dtype=dtype, causal=True)
    case = paginate(dense.replaced(kv_lens=torch.tensor([300, 0, 77])), page_size)
    assert_exact(case, kernel="cpu")


def test_large_scores():
    case = draw(40, 300)
    assert_exact(case.replaced(q=case.tensors["q"] * 100), kernel="cpu")
