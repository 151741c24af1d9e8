"""Gradients of the Triton kernels: right in the interpreter and on a GPU.

Kernels that are to be interpreted must know when they are defined: `test_triton_interpreter.py`
runs the tests below that need the interpreter in a process of their own.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from problems import (
    Case,
    assert_allowed,
    assert_exact,
    draw,
    draw_douts,
    draw_varlen,
    pose,
    run,
    same_bits,
    statistics_of,
    strided_biases,
)

from lockstep import reference
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.memory_order import in_order_of, is_tokens_first

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import interpreter  # noqa: F401

from lockstep.kernels.triton import backward as triton_backward  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gradients(case: Case, douts) -> dict[str, torch.Tensor]:
    """All gradients of a call, from the oracle's out and lse: no forward kernel is involved."""
    problem, tensors = pose(case)
    exact = run(case, reference)
    needs = Needs(*(getattr(tensors, name) is not None for name in Needs._fields))
    saved = BackwardTensors(
        *tensors,
        in_order_of(tensors.q, exact.out.to(problem.dtype)),
        in_order_of(tensors.q, statistics_of(problem, exact.lse)),
        douts[0].to(problem.dtype),
        in_order_of(tensors.q, douts[1].to(problem.lse_dtype)),
    )
    grads = triton_backward.prepare_backward(problem, saved, needs)(saved, saved.addresses())
    return {name: grad for name, grad in grads._asdict().items() if grad is not None}


def check(case: Case) -> None:
    """The error rule for gradients."""
    douts = draw_douts(case)
    found = {f"d{name}": grad for name, grad in gradients(case, douts).items()}
    assert_allowed(case, found, douts, "triton")


@pytest.fixture(autouse=True)
def _in_bounds():
    """Where kernels are interpreted, every access is looked at."""
    if not INTERPRETED:
        yield
        return
    from bounds import checked

    with checked():
        yield


@interpreted
def test_an_access_beyond_a_tensor_is_seen(monkeypatch):
    from bounds import OutOfBounds

    case = draw(40, 40, D=16, dtype=F16)
    short = torch.empty(1, 2, 39, 16, dtype=F16)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, **__: short)
    with pytest.raises(Exception, match=OutOfBounds.__name__):
        gradients(case, draw_douts(case))


@interpreted
@pytest.mark.parametrize(
    ("Sq", "Skv", "sizes"),
    [
        (40, 70, {"D": 16, "dtype": F32}),
        (70, 100, {"D": 33, "Dv": 20, "Hq": 4, "dtype": F16}),
        (130, 80, {"D": 16, "dtype": BF16}),
        (40, 70, {"D": 80, "dtype": F16}),
        (1, 1, {"D": 1, "dtype": BF16}),
    ],
    ids=["fp32", "odd-dims", "more-queries", "wide", "one"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_shapes(Sq, Skv, sizes, causal):
    check(draw(Sq, Skv, causal=causal, **sizes))


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"window": (17, 5), "softcap": 5.0},
        {"window": (20, None)},
        {"window": (None, 3)},
        {"scale": -0.3, "causal": True},
    ],
    ids=str,
)
def test_options(options):
    check(draw(90, 140, D=16, dtype=F16, **options))


@interpreted
def test_sinks_are_summed_over_the_batch():
    sinks = torch.tensor([0.5, -math.inf, 3.0, -2.0])
    check(draw(33, 70, B=2, Hq=4, D=16, dtype=BF16, sinks=sinks, causal=True))


@interpreted
@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 1, 1, 40), (1, 2, 40, 40), (40, 1), ()])
def test_bias_broadcasts(shape):
    """fp32, because the terms of a row cancel, and what is left is the rounding of out."""
    check(draw(40, 40, B=2, D=16, dtype=F32, bias=torch.randn(shape), softcap=10.0))


@interpreted
@pytest.mark.parametrize("name", strided_biases(1, 1, 1, 1))
def test_strides_of_a_bias_change_no_bit(name):
    bias = strided_biases(2, 2, 17, 20)[name]
    case = draw(17, 20, B=2, D=16, dtype=F32, bias=bias)
    douts = draw_douts(case)
    got, expected = gradients(case, douts), gradients(case.replaced(bias=bias.contiguous()), douts)
    for what in expected:
        assert same_bits(got[what], expected[what]), what


@interpreted
def test_bias_that_hides_keys():
    bias = torch.randn(40, 70).to(BF16)
    bias[torch.rand(40, 70) < 0.3] = -math.inf
    bias[4] = -math.inf
    check(draw(40, 70, D=16, dtype=BF16, bias=bias))


@interpreted
def test_kv_lens():
    check(draw(40, 130, B=4, D=16, dtype=F16, kv_lens=torch.tensor([0, 1, 64, 130]), causal=True))


@interpreted
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 3), "softcap": 8.0}], ids=str)
def test_varlen(options):
    case = draw_varlen([1, 0, 63, 5], [40, 7, 63, 0], Hq=2, Hkv=1, D=16, dtype=F16, **options)
    check(case.replaced(sinks=torch.randn(2)))


@interpreted
def test_varlen_in_float32():
    check(draw_varlen([1, 0, 33, 5], [40, 7, 33, 0], Hq=2, Hkv=1, D=20, causal=True))


@interpreted
@pytest.mark.parametrize("dtype", [F16, F32], ids=["fp16", "fp32"])
def test_strided_inputs(dtype):
    """Rows at odd addresses, heads behind tokens, one key head for all."""
    q = torch.randn(1, 40, 2, 24).to(dtype).transpose(1, 2)[..., 3:19]
    k = torch.randn(1, 1, 50, 16).to(dtype).expand(1, 2, 50, 16)
    v = torch.randn(1, 2, 100, 16).to(dtype)[:, :, ::2]
    check(Case({"q": q, "k": k, "v": v}))


@interpreted
def test_gradients_lie_as_their_tensors_do():
    case = draw(20, 40, B=2, Hq=4, Hkv=2, D=16, causal=True)
    douts = draw_douts(case)
    expected = gradients(case, douts)
    for names in ("qk", "v", "qkv"):
        moved = {n: case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in names}
        for name, grad in gradients(case.replaced(**moved), douts).items():
            assert same_bits(grad, expected[name])
            assert is_tokens_first(grad) == (name in names)


@interpreted
@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_to_attend(B, Sq, Skv):
    case = draw(Sq, Skv, B=B, D=16, sinks=torch.zeros(2))
    douts = draw_douts(case)
    for name, grad in gradients(case, douts).items():
        assert grad.shape == case.tensors[name].shape
        if name != "sinks":
            assert grad.eq(0).all()
        elif Skv == 0:
            # Lse is the sink itself.
            torch.testing.assert_close(grad, douts[1].sum((0, 2)))


@interpreted
def test_gradients_of_a_sequence_do_not_know_what_is_around_it():
    """Alone, between others, and with NaN behind its keys: the same tiles in the same order."""
    alone = draw(70, 90, Hq=4, D=16, dtype=F16, causal=True)
    others = draw(70, 90, B=2, Hq=4, D=16, dtype=F16)
    own, other = draw_douts(alone), draw_douts(others)
    expected = gradients(alone, own)

    def between(x, y, value=0.0, pad=0):
        x, y = (torch.nn.functional.pad(t, (0, 0, 0, pad), value=value) for t in (x, y))
        return torch.cat([y[:1], x, y[1:]])

    names = ("q", "k", "v")
    batch = {n: between(alone.tensors[n], others.tensors[n]) for n in names}
    batch |= {n: between(alone.tensors[n], others.tensors[n], math.nan, 50) for n in ("k", "v")}
    crowd = alone.replaced(**batch, kv_lens=torch.tensor([31, 90, 70]))
    dlse = torch.cat([other[1][:1], own[1], other[1][1:]])
    found = gradients(crowd, (between(own[0], other[0]), dlse))
    for name in names:
        mine = found[name][1:2, :, : expected[name].shape[2]]
        assert torch.equal(mine, expected[name]), name
    for name in ("k", "v"):
        assert found[name][1, :, 90:].eq(0).all()


@interpreted
def test_gradients_of_packed_sequences_are_those_of_dense_ones():
    lens = [5, 70, 33], [40, 70, 50]
    case = draw_varlen(*lens, Hq=2, Hkv=1, D=16, dtype=F16, causal=True)
    douts = draw_douts(case)
    packed = gradients(case, douts)
    starts = case.tensors["cu_seqlens_q"].tolist(), case.tensors["cu_seqlens_k"].tolist()
    for b in range(3):
        q_tokens, k_tokens = (slice(start[b], start[b + 1]) for start in starts)
        own = {"q": q_tokens, "k": k_tokens, "v": k_tokens}

        def dense(x, tokens):
            return x[tokens].transpose(0, 1)[None].contiguous()

        tensors = {n: dense(case.tensors[n], tokens) for n, tokens in own.items()}
        alone = gradients(Case(tensors, case.options), tuple(dense(s, q_tokens) for s in douts))
        for name, tokens in own.items():
            assert torch.equal(alone[name], dense(packed[name], tokens)), name


def check_garbage(device: str, dtype: torch.dtype) -> None:
    """A query that is NaN and a dO that is infinite reach the keys their rows see, and no other."""
    case = draw(70, 100, D=16, dtype=dtype, causal=True)
    case = Case({name: x.to(device) for name, x in case.tensors.items()}, case.options)
    douts = tuple(x.to(device) for x in draw_douts(case))
    clean = gradients(case, douts)
    q, dout = case.tensors["q"].clone(), douts[0].clone()
    q[0, 0, 40, 3] = math.nan
    dout[0, 1, 50, 7] = math.inf
    dirty = gradients(case.replaced(q=q), (dout, douts[1]))
    for head, row in ((0, 40), (1, 50)):
        seen = row + 30 + 1
        for name in ("k", "v"):
            got, expected = dirty[name][0, head], clean[name][0, head]
            assert torch.equal(got[seen:], expected[seen:])
            assert not got[:seen].isfinite().all(-1).any()
        others = [i for i in range(70) if i != row]
        assert torch.equal(dirty["q"][0, head, others], clean["q"][0, head, others])
        assert not dirty["q"][0, head, row].isfinite().any()


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
def test_garbage_stays_with_the_rows_that_see_it(dtype):
    check_garbage("cpu", dtype)


# Each case is another three kernels to compile. `test_gpu_hypothesis` has lengths, sinks and more
# queries than keys.
GPU_CASES = {
    "D64": (F32, lambda dtype: draw(163, 311, D=64, dtype=dtype)),
    "D128-causal-grouped": (
        BF16,
        lambda dtype: draw(300, 511, B=2, Hq=6, Hkv=2, D=128, dtype=dtype, causal=True),
    ),
    "D128-in-float32": (F32, lambda dtype: draw(163, 311, D=128, dtype=dtype, causal=True)),
    "D72-packed-in-float32": (
        F32,
        lambda dtype: draw_varlen(
            [1, 0, 263, 5, 130], [300, 7, 263, 0, 211], D=72, dtype=dtype, causal=True
        ),
    ),
    "D80": (F16, lambda dtype: draw(163, 311, D=80, dtype=dtype, causal=True)),
    "D256": (BF16, lambda dtype: draw(163, 311, D=256, dtype=dtype, causal=True)),
    "D512": (F16, lambda dtype: draw(70, 80, D=512, dtype=dtype)),
    "narrow": (BF16, lambda dtype: draw(140, 211, D=16, Dv=1, dtype=dtype, causal=True)),
    "Dv": (F16, lambda dtype: draw(140, 211, D=33, Dv=80, dtype=dtype)),
    "window-softcap": (
        F16,
        lambda dtype: draw(263, 500, dtype=dtype, window=(100, 5), softcap=8.0),
    ),
    "bias": (
        F16,
        lambda dtype: draw(163, 300, B=2, Hq=4, dtype=dtype, bias=torch.randn(4, 163, 300)),
    ),
    "shared-bias": (
        F32,
        lambda dtype: draw(163, 300, B=2, Hq=4, dtype=dtype, bias=torch.randn(300)),
    ),
    "varlen": (
        F16,
        lambda dtype: draw_varlen(
            [1, 0, 263, 5, 130], [300, 7, 263, 0, 211], dtype=dtype, causal=True,
            sinks=torch.randn(4),
        ),
    ),
}  # fmt: skip


def gpu_case(name: str) -> Case:
    dtype, make = GPU_CASES[name]
    return make(dtype)


@pytest.fixture
def cuda_by_default():
    """Everything drawn, and what the yardsticks allocate, lies on the GPU."""
    with torch.device("cuda"):
        yield


@pytest.mark.usefixtures("cuda_by_default")
class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", GPU_CASES)
    def test_gradients(self, name):
        check(gpu_case(name))

    @pytest.mark.parametrize("name", ["D128-causal-grouped", "bias", "varlen"])
    def test_with_the_forward_kernel(self, name):
        assert_exact(gpu_case(name), gradients=True, kernel="triton")

    @pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
    def test_garbage_stays_with_the_rows_that_see_it(self, dtype):
        check_garbage("cuda", dtype)
