"""Every kernel on a GPU keeps its claims about bits; one that adds with atomics is caught."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep import dispatch
from lockstep.audit import batch_invariance, determinism
from lockstep.audit.calls import Batch, Shape, draw
from lockstep.audit.checks import run
from lockstep.problem import Options, Tensors, describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = Shape(device="cuda", dtype=torch.bfloat16, B=4, Hq=8, Hkv=2, S=777, D=128)
CHECKS = (*determinism.CHECKS, *batch_invariance.CHECKS)
by_kernel = pytest.mark.parametrize(
    "kernel", [k for k in dispatch.KERNELS if k.name not in ("cpu", "oracle")], ids=lambda k: k.name
)


def held(check, shape, kernel) -> None:
    outcome = run(check, shape, kernel)
    assert outcome.ok, f"{outcome.what}: {outcome.difference}"


def needs_support(kernel, shape) -> None:
    x = torch.empty(1, shape.Hq, 128, shape.D, dtype=shape.dtype, device="cuda")
    refusal = kernel.supports(describe(Tensors(x, x, x), Options()))
    if refusal is not None:
        pytest.skip(refusal)


@by_kernel
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_claims(kernel, check, dtype):
    shape = replace(SHAPE, dtype=dtype, S=777 if dtype == torch.bfloat16 else 300)
    needs_support(kernel, shape)
    held(check, shape, kernel)


@by_kernel
@pytest.mark.parametrize("D", [64, 80, 256])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_claims_at_other_head_dims(kernel, check, D):
    shape = replace(SHAPE, D=D, S=300, repeats=5)
    needs_support(kernel, shape)
    held(check, shape, kernel)


@by_kernel
def test_a_thousand_repetitions(kernel):
    needs_support(kernel, SHAPE)
    held(determinism.CHECKS[0], replace(SHAPE, repeats=1000), kernel)


@by_kernel
def test_a_long_cache_decoded_alone_and_in_any_batch(kernel):
    """Long enough that the keys of one sequence are split over many programs."""
    shape = replace(SHAPE, S=9000, B=3)
    needs_support(kernel, shape)
    batch = draw(shape, kernel, "causal")
    last: Batch = replace(batch, q=batch.q[:, :, -1:], dout=batch.dout[:, :, -1:])
    alone = last.take([0]).forward()
    whole = batch.take([0]).forward()
    for name in ("out", "lse"):
        if kernel.query_invariant:
            assert torch.equal(alone[name][:, :, 0], whole[name][:, :, -1])
        for copies in (2, 40):
            crowd = last.take([1] * copies + [0]).forward()
            assert torch.equal(crowd[name][-1:], alone[name])


def test_the_audit_catches_atomics(monkeypatch):
    sys.path.insert(0, str(Path(__file__).parent))
    from atomic_dq import KERNEL

    monkeypatch.setattr(dispatch, "KERNELS", (KERNEL, *dispatch.KERNELS))
    shape = replace(SHAPE, dtype=torch.float32, S=2048, D=64, repeats=50)
    outcome = run(determinism.CHECKS[0], shape, KERNEL)
    assert not outcome.ok, "fifty sums by atomics came out the same"
    assert outcome.difference.tensor == "dq"
    assert outcome.what.startswith("causal")
