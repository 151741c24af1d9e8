"""Tiles that the heads of a group share, on a GPU: they have the bits of tiles of one head."""

from __future__ import annotations

import math

import pytest
import torch
from hopper_forward_calls import as_packed, hopper_run, on_gpu, on_hopper, with_lengths
from kernel_calls import forward
from problems import Case, assert_allowed, draw, draw_varlen, paginate, pose, same_bits

from lockstep.kernels import hopper

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.forward import groups

pytestmark = on_hopper

BF16, FP16 = torch.bfloat16, torch.float16


def run(monkeypatch: pytest.MonkeyPatch, case: Case, shares: bool) -> list[torch.Tensor]:
    """out, lse and, unless keys are in pages, statistics, with tiles of groups or of heads."""
    with monkeypatch.context() as patch:
        patch.setattr(groups, "shares_tiles", lambda _: shares)
        found = forward(hopper.KERNEL, *pose(on_gpu(case)))
    return [x.cpu() for x in found if x is not None]


def check(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """The error rule, and the bits of tiles of heads."""
    shared, apart = (run(monkeypatch, case, x) for x in (True, False))
    assert all(same_bits(x, y) for x, y in zip(shared, apart, strict=True))
    assert_allowed(case, {"out": shared[0], "lse": shared[1]}, kernel="hopper")


@pytest.mark.parametrize("sigma", [1, 3, 30])
@pytest.mark.parametrize(
    ("D", "dtype", "Hq", "options"),
    [
        (64, BF16, 8, {"causal": True}),
        (128, BF16, 10, {"causal": True}),
        (128, BF16, 8, {"causal": True, "softcap": 50.0}),
        (64, FP16, 14, {"causal": True, "softcap": 20.0}),
        (128, FP16, 6, {"causal": True}),
        (256, BF16, 16, {}),
        (160, BF16, 4, {"causal": True}),
        (128, BF16, 24, {"window": (700, 0)}),
    ],
    ids=str,
)
def test_error_rule_and_bits(monkeypatch, D, dtype, Hq, options, sigma):
    for Sq, Skv in ((71, 71), (33, 1200), (130, 400), (90, 20)):
        torch.manual_seed(Sq)
        case = draw(Sq, Skv, B=3, Hq=Hq, Hkv=2, D=D, dtype=dtype, **options)
        case.tensors["q"] *= sigma
        check(monkeypatch, case)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_packed_sequences_with_sinks(monkeypatch, D):
    q_lens, kv_lens = [65, 1, 8, 0, 130, 63], [70, 1, 9, 3, 130, 400]
    case = draw_varlen(
        q_lens, kv_lens, Hq=12, Hkv=2, D=D, dtype=BF16, causal=True, sinks=torch.randn(12)
    )
    check(monkeypatch, case)


def test_dense_is_packed_is_one_with_lengths(monkeypatch):
    case = draw(70, 300, B=3, Hq=10, Hkv=2, D=128, dtype=BF16, causal=True)
    out, lse, _ = run(monkeypatch, case, True)
    lengths = run(monkeypatch, with_lengths(case), True)
    assert same_bits(out, lengths[0])
    packed, packed_lse, _ = run(monkeypatch, as_packed(case), True)
    assert same_bits(out.transpose(1, 2).reshape(packed.shape), packed)
    assert same_bits(lse.transpose(1, 2).reshape(packed_lse.shape), packed_lse)


def test_pages(monkeypatch):
    case = draw(150, 300, B=3, Hq=10, Hkv=2, D=128, dtype=BF16, causal=True)
    case = case.replaced(kv_lens=torch.tensor([300, 150, 171]))
    check(monkeypatch, paginate(case, 16, garbage=math.nan))


def test_garbage_in_another_head_or_sequence_stays_there(monkeypatch):
    """Heads of other groups are neighbours in memory, and rows of other heads are in a tile."""
    case = draw_varlen([71, 60, 90], [71, 60, 90], Hq=10, Hkv=2, D=128, dtype=BF16, causal=True)
    clean = run(monkeypatch, case, True)
    q = case.tensors["q"].clone()
    q[:71, 3] = math.nan
    q[71:131] = math.inf
    found = run(monkeypatch, case.replaced(q=q), True)
    others = [h for h in range(10) if h != 3]
    for x, y in zip(found, clean, strict=True):
        assert same_bits(x[:71, others], y[:71, others])
        assert same_bits(x[131:], y[131:])
        assert x[:71, 3].isnan().any()


def test_no_row_is_left_out(monkeypatch):
    """Memory that the results are in holds NaN before."""
    for Sq, Hq in ((1, 4), (9, 6), (127, 10), (300, 16)):
        poison = torch.full((1 << 24,), math.nan, device="cuda")
        del poison
        out, lse, _ = run(monkeypatch, draw(Sq, 300, Hq=Hq, D=128, dtype=BF16), True)
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_calls_that_have_them():
    """The choice of the launch itself, without a word from the test."""
    case = draw(40, 1100, B=16, Hq=40, Hkv=8, D=128, dtype=BF16, causal=True)
    assert groups.shares_tiles(pose(on_gpu(case))[0])
    out, lse = hopper_run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")
