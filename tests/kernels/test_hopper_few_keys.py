"""The Hopper forward of few keys on a GPU: the error rule, and the bits of the other kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hopper_forward_calls import (
    by_dtype,
    check_bits,
    check_what_is_not_finite,
    hopper_run,
    on_hopper,
)
from problems import Case, draw, pose, same_bits

from lockstep.kernels.hopper.forward import launch, plan

pytestmark = on_hopper


@pytest.fixture(autouse=True)
def _few_heads_are_many(monkeypatch):
    monkeypatch.setattr(plan, "MANY_HEADS", 0)
    monkeypatch.setattr(launch, "kept_sizes", lambda problem: None)
    monkeypatch.setattr(plan, "ONE_LOOP_UNMASKED", 0)


@pytest.fixture
def _keeps_keys(monkeypatch):
    """Also under a mask, where few heads are, however many there are."""
    monkeypatch.setattr(
        launch, "keeps_keys", lambda problem: problem.layout == "dense" and not problem.has_kv_lens
    )


def check(case: Case) -> None:
    assert plan.keeps_keys(pose(case)[0])
    check_bits(case)


@by_dtype
@pytest.mark.parametrize(
    ("Sq", "Skv"),
    [(197, 197), (130, 129), (2200, 150), (65, 256), (300, 257), (60, 384)],
)
def test_lengths(Sq, Skv, dtype):
    torch.manual_seed(Sq)
    check(draw(Sq, Skv, B=3, Hq=4, Hkv=2, D=64, dtype=dtype))


@by_dtype
@pytest.mark.parametrize("sigma", [1, 3, 30])
@pytest.mark.parametrize(("Sq", "Skv"), [(197, 197), (256, 256), (60, 150), (300, 257), (129, 129)])
@pytest.mark.usefixtures("_keeps_keys")
def test_causal(Sq, Skv, sigma, dtype):
    torch.manual_seed(Sq)
    case = draw(Sq, Skv, B=3, Hq=4, Hkv=2, D=64, dtype=dtype, causal=True)
    case.tensors["q"] *= sigma
    check_bits(case)


@pytest.mark.parametrize("options", [{"causal": True, "scale": -0.3}, {"window": (None, 9)}])
@pytest.mark.usefixtures("_keeps_keys")
def test_options_under_a_mask(options: dict[str, Any]):
    torch.manual_seed(0)
    case = draw(150, 200, B=2, Hq=4, Hkv=4, D=40, dtype=torch.bfloat16, **options)
    check_bits(case.replaced(sinks=torch.randn(4)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.usefixtures("_keeps_keys")
def test_hidden_keys_leave_no_trace(value):
    torch.manual_seed(0)
    case = draw(200, 200, B=4, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, causal=True)
    clean, clean_lse = hopper_run(case)
    case.tensors["k"][1, :, 150:] = value
    case.tensors["v"][2:, :, 70:] = value
    out, lse = hopper_run(case)
    for b, seen in ((0, 200), (1, 150), (2, 70), (3, 70)):
        assert same_bits(out[b, :, :seen], clean[b, :, :seen])
        assert same_bits(lse[b, :, :seen], clean_lse[b, :, :seen])
        assert not out[b, :, seen:].isfinite().any()


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("_keeps_keys")
def test_rows_that_run_away(causal):
    """Scores that rise by hundreds after the first block, and scores of millions: such rows are
    computed again, and leave the others their bits."""
    torch.manual_seed(0)
    Skv = 200
    case = draw(150, Skv, B=2, Hq=3, Hkv=3, D=64, dtype=torch.bfloat16, causal=causal)
    calm, calm_lse = hopper_run(case)
    q, k = case.tensors["q"], case.tensors["k"]
    k[1, 2, 140] = q[1, 2, 100] * 60
    q[0, 1, 7] *= 1e6
    check_bits(case)
    out, lse = hopper_run(case)
    assert not out.isnan().any()
    assert same_bits(out[0, 0], calm[0, 0])
    assert same_bits(lse[0, 1, 8:], calm_lse[0, 1, 8:])


def test_what_is_not_finite_stays_in_its_head():
    check_what_is_not_finite(197)
