"""What a row does not see has no influence on it, whatever is written there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from problems import Case, assert_same_bits, draw, draw_douts, run

from lockstep.kernels.cpu import backward


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


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many there are."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


SIZES = [(1, 1), (5, 300), (300, 5), (400, 257), (130, 64)]


@pytest.mark.parametrize("kv_lens", [None, [0, 3]], ids=["whole", "lengths"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 0)}], ids=str)
@pytest.mark.parametrize(("Sq", "Skv"), SIZES)
def test_garbage_where_gradients_are_written(Sq, Skv, options, kv_lens, monkeypatch, threads):
    """Rows that see no key, and keys that no row sees, have gradients, too."""
    lengths = {} if kv_lens is None else {"kv_lens": torch.tensor(kv_lens).clamp(max=Skv)}
    case = draw(Sq, Skv, B=2, Hq=4, Hkv=2, D=24, **lengths, **options)
    douts, filled = draw_douts(case), []
    expected = run(case, douts=douts)
    new = backward.empty_like

    def full_of_nan(*args) -> torch.Tensor:
        filled.append(args)
        return new(*args).fill_(math.nan)

    monkeypatch.setattr(backward, "empty_like", full_of_nan)
    for number in (1, 2, 7):
        threads(number)
        assert_same_bits(run(case, douts=douts), expected)
    assert bool(filled) == (kv_lens is None)
