"""The Hopper forward of few keys on a GPU: the error rule, and the bits of the other kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_calls import forward
from problems import Case, assert_allowed, draw, pose, same_bits

from lockstep.kernels import hopper
from lockstep.kernels.hopper.forward import plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@pytest.fixture(autouse=True)
def _few_heads_are_many(monkeypatch):
    monkeypatch.setattr(plan, "MANY_HEADS", 0)


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    on_gpu = Case({name: x.cuda() for name, x in case.tensors.items()}, case.options)
    out, lse = forward(hopper.KERNEL, *pose(on_gpu))[:2]
    return out.cpu(), lse.cpu()


def as_packed(case: Case) -> Case:
    """The same sequences one behind the other, which the other kernel takes."""
    tensors = dict(case.tensors)
    for name, offsets in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", None)):
        x = tensors[name]
        B, H, S, D = x.shape
        tensors[name] = x.transpose(1, 2).reshape(B * S, H, D)
        if offsets:
            tensors[offsets] = torch.arange(B + 1) * S
    return Case(tensors, case.options)


def check(case: Case) -> None:
    assert plan.keeps_keys(pose(case)[0])
    check_bits(case)


def check_bits(case: Case) -> None:
    """The error rule, and the bits of packed sequences."""
    B, Hq, Sq, _ = case.tensors["q"].shape
    out, lse = run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")
    packed, packed_lse = run(as_packed(case))
    assert same_bits(out.transpose(1, 2).reshape(packed.shape), packed)
    assert same_bits(lse.transpose(1, 2).reshape(B * Sq, Hq), packed_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("Sq", "Skv"),
    [(197, 197), (130, 129), (2200, 150), (65, 256), (300, 257), (60, 384)],
)
def test_lengths(Sq, Skv, dtype):
    torch.manual_seed(Sq)
    check(draw(Sq, Skv, B=3, Hq=4, Hkv=2, D=64, dtype=dtype))


def test_tiles_of_a_head_are_shared_out(monkeypatch):
    """Five programs with two tiles each, and one of them with one."""
    monkeypatch.setattr(plan, "MANY_HEADS", 100)
    monkeypatch.setattr(plan, "PROGRAMS", 4)
    torch.manual_seed(0)
    case = draw(560, 200, B=1, Hq=2, Hkv=2, D=64, dtype=torch.bfloat16)
    assert plan.kept_tiles(pose(case)[0]) == 2
    check(case)


@pytest.mark.parametrize(
    "options",
    [{"scale": -0.3}, {"scale": 0.0}, {"sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("D", [40, 64])
def test_options(D, options: dict[str, Any]):
    torch.manual_seed(D)
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    check(draw(150, 200, B=2, Hq=4, Hkv=4, D=D, dtype=torch.bfloat16).replaced(**options))


def test_rows_that_run_away():
    """Scores that rise by hundreds after the first block, and scores of millions: such rows are
    computed again, and leave the others their bits."""
    torch.manual_seed(0)
    Skv = 200
    case = draw(150, Skv, B=2, Hq=3, Hkv=3, D=64, dtype=torch.bfloat16)
    calm, calm_lse = run(case)
    q, k = case.tensors["q"], case.tensors["k"]
    k[1, 2, Skv - 1] = q[1, 2, 100] * 60
    q[0, 1, 7] *= 1e6
    check(case)
    out, lse = run(case)
    assert not out.isnan().any()
    assert same_bits(out[0, 0], calm[0, 0])
    assert same_bits(lse[0, 1, 8:], calm_lse[0, 1, 8:])


def test_what_is_not_finite_stays_in_its_head():
    torch.manual_seed(0)
    case = draw(100, 197, B=2, Hq=2, Hkv=2, D=64, dtype=torch.bfloat16)
    clean, _ = run(case)
    case.tensors["v"][0, 1, 3, 5] = math.nan
    case.tensors["k"][1, 0, 3, 5] = math.nan
    out, _ = run(case)
    assert same_bits(out[0, 0], clean[0, 0])
    assert same_bits(out[1, 1], clean[1, 1])
    assert out[0, 1, :, 5].isnan().all()
    assert not out[0, 1, :, :5].isnan().any()
    assert out[1, 0].isnan().all()
