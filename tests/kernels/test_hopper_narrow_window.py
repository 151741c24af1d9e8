"""The Hopper forward of narrow windows on a GPU: the error rule, and bits that follow from a row
and its keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hopper_forward_calls import by_dtype, check_bits, hopper_run, on_hopper
from problems import (
    Case,
    assert_allowed,
    draw,
    draw_douts,
    draw_varlen,
    paginate,
    pose,
    same_bits,
)
from problems import run as run_call

import lockstep
from lockstep.kernels.hopper.forward.narrow_window import plan as window_plan

pytestmark = on_hopper

CAUSAL = {"window": (127, 0)}
BF16 = torch.bfloat16


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    assert window_plan.has_narrow_window(pose(case)[0])
    return hopper_run(case)


def check(case: Case) -> None:
    assert window_plan.has_narrow_window(pose(case)[0])
    check_bits(case)


@by_dtype
@pytest.mark.parametrize(
    ("Sq", "Skv"), [(300, 300), (64, 64), (1, 1), (130, 701), (100, 40), (2200, 2200), (77, 200)]
)
def test_lengths(Sq, Skv, dtype):
    torch.manual_seed(Sq)
    check(draw(Sq, Skv, B=3, Hq=16, Hkv=2, D=64, dtype=dtype, **CAUSAL))


@pytest.mark.parametrize(("Hq", "D"), [(2, 64), (6, 64), (4, 64), (16, 64), (20, 128), (8, 96)])
def test_heads(Hq, D):
    """As many heads of a tile as divide a group, up to eight."""
    torch.manual_seed(Hq)
    check(draw(333, 350, B=2, Hq=Hq, Hkv=1, D=D, dtype=BF16, **CAUSAL))


@pytest.mark.parametrize(
    ("Hq", "window"),
    [(8, (64, 64)), (8, (0, 0)), (2, (17, 5)), (4, (100, 28)), (8, (120, 8)), (8, (255, 0))],
)
def test_windows(Hq, window):
    torch.manual_seed(Hq)
    check(draw(333, 333, B=2, Hq=Hq, Hkv=1, D=64, dtype=BF16, window=window))


@pytest.mark.parametrize("options", [{"scale": -0.3}, {"scale": 0.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(40, 64), (64, 24)])
def test_options(D, Dv, options: dict[str, Any]):
    torch.manual_seed(D)
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    check(draw(150, 177, B=2, Hq=4, Hkv=1, D=D, Dv=Dv, dtype=BF16, **CAUSAL).replaced(**options))


@pytest.mark.parametrize("page", [16, 48, 128])
def test_pages(page):
    """Bits of pages are those of one tensor, and so is what sees no key of a page."""
    torch.manual_seed(page)
    lens = torch.tensor([500, 0, 77, 399])
    case = draw(200, 500, B=4, Hq=8, Hkv=1, D=64, dtype=BF16, kv_lens=lens, **CAUSAL)
    out, lse = run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")
    paged, paged_lse = run(paginate(case, page, garbage=math.nan))
    assert same_bits(paged, out)
    assert same_bits(paged_lse, lse)


@by_dtype
@pytest.mark.parametrize(("Hq", "window"), [(8, (127, 0)), (4, (64, 64)), (2, (17, 5))])
def test_bits_do_not_depend_on_the_other_queries(Hq, window, dtype):
    case = draw(900, 900, Hq=Hq, Hkv=1, dtype=dtype, window=window)
    whole = run(case)
    for first, n in ((0, 100), (300, 16), (377, 300), (884, 16)):
        end = min(first + n + window[1], 900)
        # The last row sees as many keys as it does in the whole.
        shifted = {"q": slice(end - window[1] - n, end), "k": slice(0, end), "v": slice(0, end)}
        piece = Case({x: case.tensors[x][:, :, rows] for x, rows in shifted.items()}, case.options)
        begin = end - window[1] - n
        for mine, together in zip(run(piece), whole, strict=True):
            assert same_bits(mine[:, :, :n], together[:, :, begin : begin + n])


def test_bits_do_not_depend_on_the_heads():
    """Nor on how many of them a tile has."""
    case = draw(500, 500, Hq=8, Hkv=1, dtype=BF16, **CAUSAL)
    out, lse = run(case)
    for heads in (slice(0, 2), slice(2, 6), slice(1, 7)):
        some, some_lse = run(case.replaced(q=case.tensors["q"][:, heads]))
        assert same_bits(some, out[:, heads])
        assert same_bits(some_lse, lse[:, heads])


def test_many_packed_sequences():
    torch.manual_seed(0)
    q_lens = torch.randint(0, 300, (70,)).tolist()
    kv_lens = [n + d for n, d in zip(q_lens, torch.randint(0, 50, (70,)).tolist(), strict=True)]
    sinks = torch.randn(16)
    case = draw_varlen(q_lens, kv_lens, Hq=16, dtype=BF16, sinks=sinks, **CAUSAL)
    out, lse = run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")


@by_dtype
@pytest.mark.parametrize(
    ("Hq", "D", "window"), [(16, 64, (127, 0)), (4, 64, (48, 64)), (8, 128, (127, 0))]
)
def test_garbage_behind_a_mask_stays_there(Hq, D, window, dtype):
    """Bit for bit: rows that do not see it cannot tell; rows that do see it, and nothing else."""
    case = draw(300, 300, B=2, Hq=Hq, D=D, dtype=dtype, window=window)
    clean, clean_lse = run(case)
    v = case.tensors["v"].clone()
    nonfinite = {(0, 0, 130, 3): math.nan, (0, 1, 150, 9): math.inf, (1, 0, 7, 63): -math.inf}
    nonfinite |= {(1, 1, 200, 0): math.inf, (1, 1, 210, 0): -math.inf}
    expected = clean.clone()
    for (b, h, key, column), value in nonfinite.items():
        v[b, h, key, column] = value
        heads = slice(h * Hq // 2, (h + 1) * Hq // 2)
        rows = slice(max(key - window[1], 0), key + window[0] + 1)
        expected[b, heads, rows, column] += value
    out, lse = run(case.replaced(v=v))
    assert same_bits(lse, clean_lse)
    assert same_bits(out, expected)


def test_large_scores():
    """Scores of millions leave other rows their bits."""
    torch.manual_seed(0)
    case = draw(150, 150, B=2, Hq=8, Hkv=1, dtype=BF16, **CAUSAL)
    calm, calm_lse = run(case)
    case.tensors["q"][0, 1, 7] *= 1e6
    check(case)
    out, lse = run(case)
    assert not out.isnan().any()
    assert same_bits(out[0, 0], calm[0, 0])
    assert same_bits(lse[0, 1, 8:], calm_lse[0, 1, 8:])


def test_gradients():
    """The backward takes the statistics of this forward."""
    with torch.device("cuda"):
        case = draw(300, 300, B=2, Hq=8, Hkv=1, dtype=BF16, sinks=torch.randn(8), **CAUSAL)
        assert window_plan.has_narrow_window(pose(case)[0])
        douts = draw_douts(case)
        results = run_call(case, lockstep, douts, kernel="hopper").items()
        assert_allowed(case, results, douts, "hopper")
