"""The error rule where rounding errors of a sum do not cancel: many terms, equal or of one sign.

PyTorch sums in as many chains as a vector has lanes, so it errs little here.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from problems import assert_exact, draw

CASES = {
    # The cap is reached: scores are one of two numbers.
    "two weights": partial(
        draw, 3, 255, Hq=1, Hkv=1, D=1, Dv=2, numbers="normal, sigma 1000", softcap=0.5
    ),
    "constant keys and values": partial(draw, 3, 255, D=64, Dv=16, numbers="constant rows"),
    "many rows to a key": partial(draw, 12, 100, Hq=32, Hkv=1, D=32, Dv=64, numbers="zeros"),
    "scores of one sign": partial(draw, 1, 18, D=128, Dv=16, numbers="alternating signs"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_rule_holds(name):
    for seed in range(20):
        torch.manual_seed(seed)
        assert_exact(CASES[name](), gradients=True, kernel="cpu")
