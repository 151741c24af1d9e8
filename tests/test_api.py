"""The public calls as a user meets them: import, autocast, return values, documented examples."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import lockstep
from lockstep import api, reference


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def runs(dtype: torch.dtype) -> bool:
    x = rand(1, 1, 1, 8, dtype=dtype)
    return lockstep.explain(x, x, x).kernel is not None


def test_import_brings_no_compiler_and_compiles_nothing():
    script = """
import sys, torch
before = set(sys.modules)
import lockstep
new = set(sys.modules) - before
heavy = {"numba", "llvmlite", "triton", "torch._dynamo", "torch._inductor", "scipy", "matplotlib"}
print(sorted(heavy & new))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_oracle_has_the_signature_of_the_call():
    for name in ("attention", "attention_varlen", "attention_paged"):
        call = inspect.signature(getattr(lockstep, name)).parameters
        oracle = inspect.signature(getattr(reference, name)).parameters
        # What chooses among kernels, and what they may do, means nothing to the oracle.
        of_kernels = ("kernel", "query_invariant", "allow_tf32")
        assert list(oracle) == [p for p in call if p not in of_kernels]
        assert all(oracle[p].default == call[p].default for p in oracle)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"window": (2, 1)}])
def test_calls_give_what_the_oracle_gives(options):
    q, k, v = rand(2, 4, 5, 8), rand(2, 2, 7, 8), rand(2, 2, 7, 6)
    out, lse = lockstep.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(lockstep.attention(q, k, v, **options), expected)


def test_window_may_be_a_list():
    q = rand(1, 1, 6, 4)
    assert torch.equal(
        lockstep.attention(q, q, q, window=[2, 0]), lockstep.attention(q, q, q, window=(2, 0))
    )


def test_integer_scale():
    q = rand(1, 1, 6, 4)
    assert torch.equal(lockstep.attention(q, q, q, scale=1), lockstep.attention(q, q, q, scale=1.0))


def test_inputs_are_left_alone():
    tensors = {"q": rand(2, 4, 5, 8), "k": rand(2, 2, 7, 8), "v": rand(2, 2, 7, 6)}
    tensors |= {"bias": rand(5, 7), "sinks": rand(4), "kv_lens": torch.tensor([0, 7])}
    before = {name: x.clone() for name, x in tensors.items()}
    lockstep.attention(**tensors)
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_scaled_dot_product_attention_casts(dtype):
    if not runs(dtype):
        pytest.skip(f"no kernel for {dtype} here")
    q = rand(1, 2, 6, 8, dtype=torch.float32).requires_grad_()
    bias, sinks = torch.zeros(6, 6), torch.full((2,), -torch.inf)
    with torch.autocast("cpu", dtype=dtype):
        out = lockstep.attention(q, q, q, bias=bias, sinks=sinks)
        expected = scaled_dot_product_attention(q, q, q)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_decides_the_kernel():
    q = rand(1, 2, 6, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lockstep.explain(q, q, q).problem.dtype == torch.bfloat16
        assert lockstep.explain(q, q, q, bias=q[0, 0, :, :6]).problem.bias_dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert lockstep.explain(q, q, q).problem.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    q = rand(1, 2, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lockstep.attention(q, q, q).dtype == torch.float64


@pytest.mark.parametrize(
    "call", [api.attention, api.attention_varlen, api.attention_paged, api.merge, api.explain]
)
def test_documented_examples(call):
    if not runs(torch.float32):
        pytest.skip("no kernel for float32 here")
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(call, call.__name__, globs={"torch": torch, "lockstep": lockstep})
    assert example.examples
    results = doctest.DocTestRunner().run(example)
    assert results.failed == 0
