"""The Hopper forward of keys that stay in shared memory on a GPU: the error rule, and the bits of
the kernel for all calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hopper_forward_calls import by_dtype, check_bits, hopper_run, on_hopper
from problems import Case, draw, pose, same_bits

from lockstep.kernels.hopper.forward import launch
from lockstep.kernels.hopper.forward.kept_keys import plan

pytestmark = on_hopper


@pytest.fixture(autouse=True)
def _keeps_what_fits(monkeypatch):
    """Whether it pays or not."""

    def rest_of(problem, block):
        return next((n for n in (0, plan.REST) if problem.Skv <= block + n), None)

    monkeypatch.setattr(plan, "rest_of", rest_of)
    monkeypatch.setattr(launch, "has_one_block", lambda problem: False)


def check(case: Case) -> None:
    assert plan.kept_sizes(pose(case)[0]) is not None
    check_bits(case)


@by_dtype
@pytest.mark.parametrize(
    ("D", "Dv", "Sq", "Skv"),
    [
        (72, 72, 157, 157),
        (192, 128, 70, 62),
        (192, 128, 300, 82),
        (256, 256, 65, 64),
        (160, 160, 90, 79),
        (96, 96, 1, 150),
        (64, 64, 190, 190),
        (40, 24, 33, 130),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(D, Dv, Sq, Skv, causal, dtype):
    torch.manual_seed(Sq)
    case = draw(Sq, Skv, B=3, Hq=8, Hkv=2, D=D, Dv=Dv, dtype=dtype, causal=causal)
    for sigma in (1, 30):
        case.tensors["q"] *= sigma
        check(case)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1), (24, 3)])
def test_heads_that_share_tiles(heads):
    torch.manual_seed(0)
    Hq, Hkv = heads
    check(draw(70, 150, B=5, Hq=Hq, Hkv=Hkv, D=88, dtype=torch.bfloat16, causal=True))


@pytest.mark.parametrize("options", [{"causal": True, "scale": -0.3}, {"window": (None, 9)}])
@pytest.mark.parametrize(("D", "Skv"), [(88, 150), (192, 60)])
def test_options(D, Skv, options: dict[str, Any]):
    torch.manual_seed(0)
    case = draw(150, Skv, B=2, Hq=4, Hkv=2, D=D, dtype=torch.bfloat16, **options)
    check(case.replaced(sinks=torch.randn(4)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_hidden_keys_leave_no_trace(value):
    torch.manual_seed(0)
    case = draw(150, 150, B=4, Hq=4, Hkv=2, D=72, dtype=torch.bfloat16, causal=True)
    clean, clean_lse = hopper_run(case)
    case.tensors["k"][1, :, 140:] = value
    case.tensors["v"][2:, :, 70:] = value
    out, lse = hopper_run(case)
    for b, seen in ((0, 150), (1, 140), (2, 70), (3, 70)):
        assert same_bits(out[b, :, :seen], clean[b, :, :seen])
        assert same_bits(lse[b, :, :seen], clean_lse[b, :, :seen])
        assert not out[b, :, seen:].isfinite().any()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_run_away(causal):
    """Scores that rise by hundreds after the first block, and scores of millions: such rows are
    computed again, and leave the others their bits."""
    torch.manual_seed(0)
    case = draw(150, 150, B=2, Hq=3, Hkv=3, D=72, dtype=torch.bfloat16, causal=causal)
    calm, calm_lse = hopper_run(case)
    q, k = case.tensors["q"], case.tensors["k"]
    k[1, 2, 140] = q[1, 2, 145] * 60
    q[0, 1, 7] *= 1e6
    check(case)
    out, lse = hopper_run(case)
    assert not out.isnan().any()
    assert same_bits(out[0, 0], calm[0, 0])
    assert same_bits(lse[0, 1, 8:], calm_lse[0, 1, 8:])


def test_programs_with_many_tiles(monkeypatch):
    """Keys change between tiles of one program, and stay for others."""
    real = launch.kept_keys_launch
    monkeypatch.setattr(launch, "kept_keys_launch", lambda *args: real(*args[:-1], 2))
    torch.manual_seed(0)
    check(draw(200, 60, B=7, Hq=6, Hkv=3, D=192, Dv=128, dtype=torch.bfloat16))
