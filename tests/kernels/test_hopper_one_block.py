"""The Hopper forward of keys that are one block on a GPU: the error rule, and the bits of the other
kernel."""

from __future__ import annotations

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
@pytest.mark.parametrize(("D", "Skv"), [(80, 64), (128, 40), (96, 1), (72, 63)])
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
    """Five tiles for each program but the last of a head, which has fewer."""
    torch.manual_seed(0)
    case = draw(64 * 71 + 3, 77, B=4, Hq=8, Hkv=8, D=64, dtype=torch.bfloat16)
    assert 1 < plan.one_block_tiles(pose(case)[0]) < 72
    check(case)


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
