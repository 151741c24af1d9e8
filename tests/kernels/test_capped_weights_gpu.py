"""Weights under a softcap on a GPU: rows of all tiers."""

from __future__ import annotations

import pytest
import torch
from hopper_forward_calls import check, hopper_run, on_hopper
from problems import draw, same_bits

pytestmark = on_hopper


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (700, 0)}], ids=str)
@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0])
def test_a_row_goes_by_its_own_scores(sigma, options):
    """Rows of a warp may be in different tiers, and have the bits that they have beside others."""
    case = draw(300, 900, D=128, dtype=torch.bfloat16, softcap=50.0, **options)
    q = case.tensors["q"]
    q[:, :, ::3] *= sigma**2
    check(case)
    whole = hopper_run(case)
    calm = case.replaced(
        q=torch.where(torch.arange(300, device=q.device)[:, None] % 3 == 0, 0.0, q)
    )
    for mine, beside in zip(hopper_run(calm), whole, strict=True):
        for first in (1, 2):
            assert same_bits(mine[:, :, first::3], beside[:, :, first::3])


@pytest.mark.parametrize(
    ("softcap", "scale"), [(1000.0, None), (0.5, None), (50.0, 1e-6), (50.0, -0.1)]
)
def test_caps_and_scales_of_any_size(softcap, scale):
    """The last tiers are not for coefficients that float32 has no room for."""
    case = draw(200, 600, D=64, dtype=torch.bfloat16, causal=True, softcap=softcap, scale=scale)
    case.tensors["q"].mul_(10)
    check(case)
