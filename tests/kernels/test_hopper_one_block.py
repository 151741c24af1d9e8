"""The Hopper forward of keys that are one block on a GPU: the error rule, and the bits of the other
kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hopper_forward_calls import (
    as_packed,
    by_dtype,
    check_bits,
    check_what_is_not_finite,
    hopper_run,
    on_hopper,
    with_lengths,
)
from problems import Case, assert_allowed, draw, draw_varlen, pose, same_bits

from lockstep.kernels.hopper.forward import plan

pytestmark = on_hopper


def check(case) -> None:
    assert plan.has_one_block(pose(case)[0])
    check_bits(case)


@by_dtype
@pytest.mark.parametrize(
    ("Sq", "Skv"), [(300, 77), (64, 1), (130, 32), (100, 64), (65, 90), (2200, 128), (200, 97)]
)
def test_lengths(Sq, Skv, dtype):
    torch.manual_seed(Sq)
    check(draw(Sq, Skv, B=3, Hq=4, Hkv=2, D=64, dtype=dtype))


@pytest.mark.parametrize("options", [{"scale": -0.3}, {"scale": 0.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("D", [40, 64, 80, 128])
def test_options(D, options: dict[str, Any]):
    torch.manual_seed(D)
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    check(draw(150, 60, B=2, Hq=4, Hkv=4, D=D, dtype=torch.bfloat16).replaced(**options))


@by_dtype
@pytest.mark.parametrize(
    ("D", "Skv"), [(80, 64), (128, 40), (96, 1), (72, 63), (128, 100), (80, 77), (112, 112)]
)
def test_wide_heads(D, Skv, dtype):
    torch.manual_seed(D)
    check(draw(200, Skv, B=3, Hq=4, Hkv=2, D=D, dtype=dtype))


@pytest.mark.parametrize(("D", "mean"), [(64, 30), (80, 55), (128, 50), (64, 120)])
def test_packed(D, mean):
    """Sequences with few keys, some with more, and some with none; then also one that is so long
    that the kernel for all calls has all of them."""
    torch.manual_seed(D)
    lens = [mean] * 60 + [1, 0, 64, 65, 128, 129, 300, mean - 1]
    long = 128 * len(lens)
    both = draw_varlen([*lens, long], [*lens, long], Hq=4, Hkv=2, D=D, dtype=torch.bfloat16)
    n = sum(lens)
    of_few = {name: x[:n] if name in "qkv" else x[:-1] for name, x in both.tensors.items()}
    case = Case(of_few, both.options)
    assert plan.one_block_keys(pose(case)[0]) == (64 if mean < 60 else 128)
    assert not plan.one_block_keys(pose(both)[0])
    out, lse = hopper_run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")
    other, other_lse = hopper_run(both)
    assert same_bits(out, other[:n])
    assert same_bits(lse, other_lse[:n])


def test_packed_sequences_with_wrong_offsets():
    """Rows of a bad sequence are NaN, and others have the bits they would have."""
    torch.manual_seed(0)
    lens = [50] * 80
    case = draw_varlen(lens, lens, Hq=4, Hkv=4, D=80, dtype=torch.bfloat16)
    assert plan.one_block_keys(pose(case)[0]) == 64
    clean, _ = hopper_run(case)
    case.tensors["cu_seqlens_k"] = case.tensors["cu_seqlens_k"].clone()
    case.tensors["cu_seqlens_k"][7] = 10**6
    out, _ = hopper_run(case)
    assert out[300:400].isnan().all()
    assert same_bits(out[:300], clean[:300])
    assert same_bits(out[400:], clean[400:])


def test_tiles_of_a_program():
    """More tiles than programs, so that some programs have tiles of two heads."""
    torch.manual_seed(0)
    check(draw(64 * 71 + 3, 77, B=4, Hq=8, Hkv=8, D=64, dtype=torch.bfloat16))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("S", "D"), [(42, 80), (30, 64), (70, 128)])
def test_heads_of_a_program(S, D, causal):
    """Programs have tiles of several heads, of which some share their keys."""
    torch.manual_seed(S)
    check(draw(S, S, B=70, Hq=12, Hkv=4, D=D, dtype=torch.bfloat16, causal=causal))


@by_dtype
@pytest.mark.parametrize(
    ("Sq", "Skv"),
    [*((S, S) for S in (1, 17, 42, 63, 64, 65, 100, 128)), (300, 77), (40, 64), (20, 128)],
)
@pytest.mark.parametrize("sigma", [1, 3, 30])
def test_causal(Sq, Skv, sigma, dtype):
    torch.manual_seed(Sq)
    for D in (64, 80, 128) if Skv <= 112 else (64,):
        case = draw(Sq, Skv, B=2, Hq=4, Hkv=2, D=D, dtype=dtype, causal=True)
        case.tensors["q"] *= sigma
        check(case)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "scale": -0.3},
        {"causal": True, "scale": 0.0},
        {"causal": True, "sinks": True},
        {"window": (None, 5)},
        {"window": (4000, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("D", [40, 96])
def test_options_under_a_mask(D, options: dict[str, Any]):
    """A window that hides no key is none."""
    torch.manual_seed(D)
    if "sinks" in options:
        options = {"causal": True, "sinks": torch.randn(4)}
    check(draw(90, 60, B=2, Hq=4, Hkv=4, D=D, dtype=torch.bfloat16).replaced(**options))


@pytest.mark.parametrize(("S", "D"), [(60, 64), (128, 64), (42, 80), (100, 128)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_hidden_keys_leave_no_trace(S, D, value):
    """Whatever is in keys and values that a row does not see, in some tiles of a program."""
    torch.manual_seed(S)
    seen = S // 3
    case = draw(S, S, B=60, Hq=8, Hkv=4, D=D, dtype=torch.bfloat16, causal=True)
    clean, clean_lse = hopper_run(case)
    case.tensors["k"][7:30:5, 1:3, seen:] = value
    case.tensors["v"][::7, :, seen:] = value
    for each in (case, as_packed(case)):
        out, lse = hopper_run(each)
        if out.ndim == 3:
            out = out.view(60, S, 8, D).transpose(1, 2)
            lse = lse.view(60, S, 8).transpose(1, 2)
        assert same_bits(out[:, :, :seen], clean[:, :, :seen])
        assert same_bits(lse[:, :, :seen], clean_lse[:, :, :seen])
        assert not out[::7, :, seen:].isfinite().any()
        assert same_bits(out[1], clean[1])


@pytest.mark.parametrize(("D", "mean"), [(64, 40), (80, 42), (64, 90)])
def test_packed_under_a_mask(D, mean):
    torch.manual_seed(D)
    lens = [mean] * 60 + [1, 0, 64, 65, 128, 129, 300, mean - 1]
    case = draw_varlen(lens, lens, Hq=8, Hkv=2, D=D, dtype=torch.bfloat16).replaced(causal=True)
    assert plan.one_block_keys(pose(case)[0]) == (64 if mean < 60 else 128)
    out, lse = hopper_run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")
    alone = Case({name: x[:mean] for name, x in case.tensors.items() if name in "qkv"}, {})
    alone = Case({name: x.transpose(0, 1)[None] for name, x in alone.tensors.items()}, case.options)
    other, other_lse = hopper_run(with_lengths(alone))
    assert same_bits(out[:mean], other[0].transpose(0, 1))
    assert same_bits(lse[:mean], other_lse[0].transpose(0, 1))


def test_large_scores():
    """Scores of millions leave other rows their bits."""
    torch.manual_seed(0)
    case = draw(150, 77, B=2, Hq=3, Hkv=3, D=64, dtype=torch.bfloat16)
    calm, calm_lse = hopper_run(case)
    case.tensors["q"][0, 1, 7] *= 1e6
    check(case)
    out, lse = hopper_run(case)
    assert not out.isnan().any()
    assert same_bits(out[0, 0], calm[0, 0])
    assert same_bits(lse[0, 1, 8:], calm_lse[0, 1, 8:])


def test_what_is_not_finite_stays_in_its_head():
    check_what_is_not_finite(77)
