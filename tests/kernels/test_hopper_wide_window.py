"""The Hopper forward of wide windows on a GPU: maxima rise in the first two blocks of a row."""

from __future__ import annotations

import math

import pytest
import torch
from hopper_forward_calls import as_packed, check_bits, hopper_run, on_gpu, on_hopper
from kernel_calls import forward
from problems import Case, draw, pose, same_bits

from lockstep.kernels import hopper
from lockstep.kernels.hopper.forward import launch, plan

pytestmark = on_hopper

LEFT = 3100
WINDOW = {"window": (LEFT, 0)}
by_width = pytest.mark.parametrize("D", [64, 128, 256])


def draw_wide(Sq: int, Skv: int, D: int, sigma: float = 1.0, **options) -> Case:
    torch.manual_seed(D)
    case = draw(Sq, Skv, D=D, dtype=torch.bfloat16, **WINDOW | options)
    assert plan.fixes_maximum(pose(case)[0])
    return case.replaced(**{x: (case.tensors[x] * sigma).bfloat16() for x in ("q", "k")})


@by_width
@pytest.mark.parametrize("sigma", [1.0, 3.0, 30.0])
def test_error_rule_and_layouts(sigma, D):
    """With the highest sigma, rows are computed again."""
    check_bits(draw_wide(300, 3555, D, sigma))


@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"sinks": True}], ids=str)
def test_options(options):
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    check_bits(draw_wide(200, 3500, 128, 3.0, Hq=4, **options))


@by_width
def test_garbage_behind_a_mask_stays_there(D):
    case = draw_wide(400, 3555, D, 3.0, B=2)
    clean, clean_lse = hopper_run(case)
    v = case.tensors["v"].clone()
    # Keys of the first and second blocks of rows, and of the last ones.
    nonfinite = {(0, 0, 130, 3): math.nan, (0, 1, 255, 9): math.inf, (1, 0, 300, 63): -math.inf}
    nonfinite |= {(1, 1, 3500, 0): math.inf, (1, 1, 3510, 0): -math.inf}
    expected = clean.clone()
    for (b, h, key, column), value in nonfinite.items():
        v[b, h, key, column] = value
        rows = slice(max(key - 3155, 0), max(key + LEFT + 1 - 3155, 0))
        expected[b, h, rows, column] += value
    out, lse = hopper_run(case.replaced(v=v))
    assert same_bits(lse, clean_lse)
    assert same_bits(out, expected)


@by_width
def test_bits_do_not_depend_on_the_other_queries(D):
    case = draw_wide(4000, 4000, D, 3.0)
    whole = hopper_run(case)
    for first, n in ((0, 100), (3177, 300), (3984, 16)):
        keys = slice(0, first + n)
        parts = {"q": slice(first, first + n), "k": keys, "v": keys}
        piece = Case({x: case.tensors[x][:, :, rows] for x, rows in parts.items()}, case.options)
        for mine, together in zip(hopper_run(piece), whole, strict=True):
            assert same_bits(mine, together[:, :, first : first + n])


@pytest.mark.parametrize(
    ("D", "dtype", "window", "softcap"),
    [
        (64, torch.bfloat16, 3200, None),
        (128, torch.bfloat16, 3200, 20.0),
        (256, torch.bfloat16, 700, None),
        (80, torch.float16, 700, None),
    ],
)
def test_a_window_that_hides_no_key_is_none(monkeypatch, D, dtype, window, softcap):
    """A call without its window has the bits of one with it, and of packed sequences, which keep
    theirs."""
    how = {"dtype": dtype, "window": (window - 1, 0), "softcap": softcap}
    for S in (100, 333, window):
        torch.manual_seed(S)
        case = draw(S, S, B=2, Hq=4, Hkv=2, D=D, **how)
        found = [x.cpu() for x in forward(hopper.KERNEL, *pose(on_gpu(case)))]
        with monkeypatch.context() as patch:
            patch.setattr(launch, "without_idle_window", lambda problem: problem)
            kept = [x.cpu() for x in forward(hopper.KERNEL, *pose(on_gpu(case)))]
            packed = forward(hopper.KERNEL, *pose(on_gpu(as_packed(case))))[0].cpu()
        assert all(same_bits(x, y) for x, y in zip(found, kept, strict=True))
        assert same_bits(found[0].transpose(1, 2).reshape(packed.shape), packed)
