"""The Hopper forward on a GPU with heads of 80, 96 and 129 to 160 columns, whose tiles come in
chunks of 32, and with their neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hopper_forward_calls import as_packed, check, hopper_run, on_hopper, with_lengths
from problems import draw, draw_varlen, same_bits

from lockstep.kernels.hopper.forward import launch

pytestmark = on_hopper
BF16 = torch.bfloat16
by_head_dim = pytest.mark.parametrize("D", [80, 160], ids=["D80", "D160"])

CALLS: dict[str, dict[str, Any]] = {
    "80-window": {"D": 80, "window": (300, 0)},
    "80-fp16": {"D": 80, "causal": True, "dtype": torch.float16},
    "80-narrow": {"D": 80, "window": (150, 20)},
    "160-narrow": {"D": 160, "window": (100, 0)},
    "80-softcap": {"D": 80, "causal": True, "softcap": 20.0},
    "160-sinks": {"D": 160, "causal": True, "sinks": torch.tensor([1.0, -2.0, 0.0, 9.0])},
    "80-128": {"D": 80, "Dv": 128},
    "160-64": {"D": 160, "Dv": 64},
    "96-full": {"D": 96},
    "72-80": {"D": 72, "Dv": 80},
    "192-96": {"D": 192, "Dv": 96, "causal": True},
    "160-full": {"D": 160},
    "160-window": {"D": 160, "window": (300, 0)},
    "160-softcap": {"D": 160, "causal": True, "softcap": 20.0},
    "160-fp16": {"D": 160, "causal": True, "dtype": torch.float16},
    "144-causal": {"D": 144, "causal": True},
    "136-160": {"D": 136, "Dv": 160},
    "64-152": {"D": 64, "Dv": 152},
    "112-full": {"D": 112},
}


@by_head_dim
def test_bits(D, monkeypatch):
    """They depend neither on who else is in the batch, nor on how sequences are given, nor on how
    many tiles a program has."""
    case = draw(1300, 1250, B=2, Hq=4, Hkv=2, D=D, dtype=BF16, causal=True)
    out, lse = hopper_run(case)
    alone = case.replaced(**{name: case.tensors[name][1:] for name in ("q", "k", "v")})
    assert same_bits(out[1:], hopper_run(alone)[0])
    packed, _ = hopper_run(as_packed(case))
    assert same_bits(out.transpose(1, 2).reshape(packed.shape), packed)
    monkeypatch.setattr(launch, "processors", lambda _: 3)
    for other in (with_lengths(case), case):
        found, found_lse = hopper_run(other)
        assert same_bits(out, found)
        assert same_bits(lse, found_lse)


@by_head_dim
def test_values_that_are_not_finite(D):
    """Rows that do not see them keep their bits, in all columns."""
    case = draw(1100, 1100, Hq=2, Hkv=2, D=D, dtype=BF16, causal=True)
    clean, _ = hopper_run(case)
    last = D - 3
    case.tensors["v"][0, 1, 200, last] = math.nan
    out, _ = hopper_run(case)
    assert same_bits(out[0, 0], clean[0, 0])
    assert same_bits(out[0, 1, :200], clean[0, 1, :200])
    assert out[0, 1, 200:, last].isnan().all()
    assert same_bits(out[0, 1, :, :last], clean[0, 1, :, :last])


@by_head_dim
def test_large_scores(D):
    case = draw(1100, 1300, Hq=4, Hkv=2, D=D, dtype=BF16, causal=True)
    for sigma in (3.0, 30.0):
        check(case.replaced(q=case.tensors["q"] * sigma, k=case.tensors["k"] * sigma))


@by_head_dim
def test_lengths(D):
    check(draw_varlen([1300, 1, 77, 1029], [1300, 40, 1500, 1029], D=D, dtype=BF16, causal=True))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "dtype": BF16} | CALLS[name]
    check(draw(1100, 1100, **sizes))
    check(draw(67, 1201, **sizes))
