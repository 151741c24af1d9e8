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
from problems import draw, pose, same_bits

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
@pytest.mark.parametrize("D", [40, 64])
def test_options(D, options: dict[str, Any]):
    torch.manual_seed(D)
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    check(draw(150, 77, B=2, Hq=4, Hkv=4, D=D, dtype=torch.bfloat16).replaced(**options))


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
