"""The Triton kernels in constant time: the error rule, secret lengths, values that are not finite.

On small tiles, so that the interpreter can do it.
"""

from __future__ import annotations

import pytest
import torch
from problems import Case, assert_allowed, draw, paginate, same_bits

pytest.importorskip("triton")
from triton_device import GPU, attend, needs_triton, use_multiprocessors, use_small_tiles

pytestmark = needs_triton
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (17, 5)},
    "lengths": {"causal": True, "kv_lens": torch.tensor([70, 33])},
    "sinks, cap": {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0])},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def in_constant_time(case: Case, **more):
    return attend(Case(case.tensors, {**case.options, "constant_time": True, **more}))


def check(case: Case, **more) -> None:
    assert_allowed(case, in_constant_time(case, **more).items(), kernel="triton")


@pytest.mark.parametrize("name", CASES)
def test_error_rule(name):
    check(draw(9, 70, B=2, D=16, **CASES[name]))


def test_a_hidden_pair_of_a_bias_stays_hidden():
    bias = torch.randn(1, 2, 9, 70)
    bias[:, :, :, 20:40] = -torch.inf
    case = draw(9, 70, D=16, bias=bias)
    clean = in_constant_time(case)
    v = case.tensors["v"].clone()
    v[:, :, 30] = torch.nan
    dirty = in_constant_time(case.replaced(v=v))
    assert same_bits(clean.out, dirty.out)
    assert same_bits(clean.lse, dirty.lse)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, None)}], ids=str)
@pytest.mark.parametrize("Sq", [1, 9])
def test_secret_lengths(Sq, options, monkeypatch):
    """All keys are loaded; none beyond a length is seen, whatever is there."""
    lens = torch.tensor([70, 33])
    case = draw(Sq, 70, B=2, D=16, kv_lens=lens, **options)
    for name in ("k", "v"):
        case.tensors[name][1, :, 33:] = torch.nan
    check(case, secret_lengths=True)
    use_multiprocessors(monkeypatch, 64)
    check(case, secret_lengths=True)


def test_secret_lengths_of_pages():
    lens = torch.tensor([70, 33])
    case = paginate(draw(1, 80, B=2, D=16, kv_lens=lens), 16, garbage=float("nan"))
    case.tensors["page_table"][1, 3:] = 1 << 20
    check(case, secret_lengths=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: on a CPU, lengths are checked before")
def test_a_wrong_secret_length_makes_its_own_sequence_nan():
    good = draw(3, 70, B=2, D=16, kv_lens=torch.tensor([70, 33]))
    bad = good.replaced(kv_lens=torch.tensor([70, 71]))
    a, b = (in_constant_time(case, secret_lengths=True) for case in (good, bad))
    assert same_bits(a.out[0], b.out[0])
    assert b.out[1].isnan().all()
    assert b.lse[1].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_see_values_that_are_not_finite_or_keep_their_bits(bad):
    case = draw(70, 70, D=16, causal=True)
    clean = in_constant_time(case)
    v = case.tensors["v"].clone()
    v[:, 0, 41, 5] = bad
    dirty = in_constant_time(case.replaced(v=v))
    assert same_bits(clean.lse, dirty.lse)
    assert same_bits(clean.out[:, 1], dirty.out[:, 1])
    assert same_bits(clean.out[:, 0, :41], dirty.out[:, 0, :41])
    assert not dirty.out[:, 0, 41:, 5].isfinite().any()
