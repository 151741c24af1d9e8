"""What a row does not see has no influence on it, whatever is written there."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Case, assert_same_bits, draw_douts, run


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("Sq", [3, 40])
def test_garbage_in_a_key_behind_a_bias_of_minus_inf(Sq, garbage):
    k, v = torch.randn(2, 1, 2, 300, 16)
    bias = torch.zeros(Sq, 300)
    bias[:, 7] = -math.inf
    clean = Case({"q": torch.randn(1, 2, Sq, 16), "k": k, "v": v, "bias": bias})
    dirty = k.clone()
    dirty[:, :, 7] = garbage
    douts = draw_douts(clean)
    assert_same_bits(run(clean.replaced(k=dirty), douts=douts), run(clean, douts=douts))


def test_a_sink_of_minus_inf_in_a_row_without_keys():
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    case = Case(
        {"q": q, "k": k, "v": v, "sinks": torch.tensor([0.3, -math.inf])}
        | {"kv_lens": torch.tensor([0])}
    )
    result = run(case, douts=(torch.randn(1, 2, 5, 16), torch.zeros(1, 2, 5)))
    assert result.out.eq(0).all()
    assert result.lse[0, 1].eq(-math.inf).all()
    assert result.grads["sinks"][1] == 0
