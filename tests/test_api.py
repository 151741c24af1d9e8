"""The public calls as a user meets them: import, autocast, return values, documented examples."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import lockstep
from lockstep import api, reference
from lockstep.api.packed import _bound_of_call


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def runs(dtype: torch.dtype) -> bool:
    x = rand(1, 1, 1, 8, dtype=dtype)
    return lockstep.explain(x, x, x).kernel is not None


@pytest.mark.slow
def test_import_brings_no_compiler_and_compiles_nothing():
    """Nor does the command line, numba at least."""
    script = """
import sys, torch
before = set(sys.modules)
import lockstep
new = set(sys.modules) - before
heavy = {"numba", "llvmlite", "triton", "torch._dynamo", "torch._inductor", "scipy", "matplotlib"}
print(sorted(heavy & new))
import lockstep.cli
print("numba" in sys.modules)
# What the README names works after `import lockstep` alone.
for name in ("integrations.sdpa.activate", "flash_attn.activate", "audit.model"):
    assert callable(eval(f"lockstep.{name}")), name
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "False"]


def test_oracle_has_the_signature_of_the_call():
    for name in ("attention", "attention_varlen", "attention_paged"):
        call = inspect.signature(getattr(lockstep, name)).parameters
        oracle = inspect.signature(getattr(reference, name)).parameters
        # What chooses among kernels, and what they may do, means nothing to the oracle.
        of_kernels = ("kernel", "query_invariant", "allow_tf32", "constant_time", "secret_lengths")
        assert list(oracle) == [p for p in call if p not in of_kernels]
        assert all(oracle[p].default == call[p].default for p in oracle)


def test_on_a_gpu_calls_with_bounds_of_queries_share_what_is_prepared():
    on_gpu, table = SimpleNamespace(is_cuda=True), object()
    for given, known in ((0, 1), (5, 8), (64, 64), (100, None)):
        assert _bound_of_call(given, on_gpu, table) == known
        assert _bound_of_call(given, on_gpu, None) is None
    for wrong in (-1, True, 1.5, "1", 10**30):
        assert _bound_of_call(wrong, on_gpu, table) is wrong
    # There lengths are compared with it.
    assert _bound_of_call(5, SimpleNamespace(is_cuda=False), table) == 5


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


def calls_in(dtype: torch.dtype):
    """Each call with arguments that it takes, by name."""
    x, packed, pages = rand(2, 2, 6, 8), rand(6, 2, 8), rand(3, 4, 2, 8)
    offsets, table, lens = (
        torch.tensor([0, 2, 6]),
        torch.tensor([[0, 2], [1, 2]]),
        torch.tensor([5, 8]),
    )
    sinks = rand(2).to(dtype)
    x, packed, pages = (t.to(dtype) for t in (x, packed, pages))
    bias, paged_bias = rand(6, 6).to(dtype), rand(6, 8).to(dtype)
    dense = {"q": x, "k": x, "v": x, "bias": bias, "sinks": sinks, "kv_lens": torch.tensor([6, 3])}
    varlen = {"q": packed, "k": packed, "v": packed, "sinks": sinks}
    paged = {"q": x, "k_pages": pages, "v_pages": pages, "bias": paged_bias, "sinks": sinks}
    return {
        lockstep.attention: dense,
        lockstep.attention_varlen: varlen | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets},
        lockstep.attention_paged: paged | {"page_table": table, "kv_lens": lens},
    }


NOT_CAST = [torch.bool, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", NOT_CAST)
@pytest.mark.parametrize("call", calls_in(torch.float32), ids=lambda call: call.__name__)
def test_autocast_hides_no_wrong_dtype(call, dtype):
    """One argument after the other, of every call."""
    right = calls_in(torch.float32)[call]
    for name, tensor in right.items():
        if dtype == torch.int64 and not tensor.is_floating_point():
            continue
        wrong = right | {name: tensor.to(dtype)}
        short = str(dtype).removeprefix("torch.")
        with torch.autocast("cpu"), pytest.raises(TypeError, match=f"^{name} takes .* got {short}"):
            call(**wrong)
        with pytest.raises(TypeError, match=f"^{name} takes .* got {short}"):
            call(**wrong)


@pytest.mark.parametrize("call", calls_in(torch.float32), ids=lambda call: call.__name__)
def test_autocast_gives_the_bits_of_a_call_with_cast_tensors(call):
    right = calls_in(torch.float32)[call]
    given = {n: x.bfloat16() if n[0] in "qkv" and n != "kv_lens" else x for n, x in right.items()}
    expected = call(**given)
    assert expected.dtype == torch.bfloat16
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(**right), expected)
        assert call(**right).dtype == torch.float32


def test_zeros_without_memory_are_zeros():
    """What autograd makes of a gradient that is not there."""
    for call, right in calls_in(torch.float32).items():
        for name, tensor in right.items():
            given = (
                torch.zeros_like(tensor),
                torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
            )
            try:
                expected = call(**right | {name: given[0]})
            except ValueError:
                with pytest.raises(ValueError, match=f"^{name} takes"):
                    call(**right | {name: given[1]})
                continue
            for _ in range(2):
                assert torch.equal(call(**right | {name: given[1]}), expected)


def test_a_gradient_of_zeros_without_memory_is_zero():
    q = rand(1, 2, 6, 8, dtype=torch.float32).requires_grad_()
    for _ in range(2):
        out = lockstep.attention(q, q, q)
        (dq,) = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))
        assert dq.eq(0).all()


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
