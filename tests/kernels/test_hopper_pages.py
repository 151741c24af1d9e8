"""The Hopper forward on keys in pages: right, and with the bits of keys in one tensor."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Case, Result, assert_allowed, assert_same_bits, draw, paginate, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

BF16, F16 = torch.bfloat16, torch.float16
LENS = [1500, 700, 0, 129]


def attend(case: Case, kernel: str = "hopper") -> Result:
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    result = run(Case(tensors, case.options), kernel=kernel)
    return Result(result.out.cpu(), result.lse.cpu())


def dense(D=128, Sq=200, lens=LENS, dtype=BF16, Hq=4, Hkv=2, **options) -> Case:
    options = {"causal": True} | options
    sizes = {"B": len(lens), "Hq": Hq, "Hkv": Hkv, "D": D, "dtype": dtype}
    return draw(Sq, max(lens), kv_lens=torch.tensor(lens), **sizes, **options)


CASES = {
    "pages of 16": ({}, 16),
    "pages of 48": ({}, 48),
    "pages of 64": ({"D": 64, "dtype": F16}, 64),
    "pages of 256": ({"D": 256}, 256),
    "D 96": ({"D": 96}, 32),
    "D 192, 128 of values": ({"D": 192, "Dv": 128}, 16),
    "D 160": ({"D": 160}, 16),
    "window": ({"causal": False, "window": (100, 20)}, 16),
    "softcap": ({"softcap": 20.0, "causal": False}, 16),
    "sinks": ({"sinks": torch.tensor([1.0, -2.0, 0.0, 9.0]), "dtype": F16}, 128),
}


@pytest.mark.parametrize("name", CASES)
def test_pages_are_right_and_change_no_bit(name):
    sizes, page = CASES[name]
    case = dense(**sizes)
    paged = paginate(case, page, garbage=math.nan)
    result = attend(paged)
    assert_allowed(paged, result.items(), kernel="hopper")
    assert_same_bits(result, attend(case))


@pytest.mark.parametrize("number", [-1, 1 << 20])
def test_a_page_that_does_not_exist(number):
    """Rows that see it become NaN, and no others."""
    case = paginate(dense(lens=[600, 600], Sq=300), 16)
    table = case.tensors["page_table"].clone()
    table[0, 30] = number  # keys 480 to 495, seen from query 180 on
    result, expected = attend(case.replaced(page_table=table)), attend(case)
    assert result.out[0, :, 180:].isnan().all()
    assert_same_bits(
        Result(result.out[0, :, :180], result.lse[0, :, :180]),
        Result(expected.out[0, :, :180], expected.lse[0, :, :180]),
    )
    assert_same_bits(Result(result.out[1], result.lse[1]), Result(expected.out[1], expected.lse[1]))


def test_a_wrong_length():
    case = paginate(dense(lens=[600, 600]), 16)
    result = attend(case.replaced(kv_lens=torch.tensor([600, 10_000])))
    expected = attend(case)
    assert result.out[1].isnan().all()
    assert torch.equal(result.out[0], expected.out[0])
