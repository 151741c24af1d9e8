"""Sequences of one key tile in the Hopper backward, on a GPU: dQ is stored without sums, and has
the bits that sums would have."""

from __future__ import annotations

import pytest
import torch
from hopper_forward_calls import on_hopper
from problems import Case, draw, draw_douts, pose, same_bits
from test_hopper_backward import _seed_on_gpu, check, gradients  # noqa: F401

from lockstep.kernels.hopper.backward.narrow import call as narrow

pytestmark = on_hopper
SIZES = [(1, 1), (46, 46), (128, 128), (129, 77), (300, 128), (1500, 77), (5, 100)]
OPTIONS = [{}, {"causal": True}, {"window": (30, 20)}]


def is_whole(case: Case) -> bool:
    problem, _ = pose(case)
    return narrow.has_whole_parts(problem, narrow.cut_of(problem))


def drawn(Sq, Skv, B=3, Hq=4, Hkv=2, **how) -> Case:
    return draw(Sq, Skv, B=B, Hq=Hq, Hkv=Hkv, **{"dtype": torch.bfloat16, **how})


def spoil_memory() -> None:
    """Memory that calls get from now on holds NaN."""
    for size in (1 << 16, 1 << 20, 1 << 24):
        for _ in range(4):
            torch.full((size,), float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (40, 40), (72, 72), (96, 40), (128, 128)])
def test_bits_are_those_of_sums(D, Dv, options, monkeypatch):
    for n, sizes in enumerate(SIZES):
        case = drawn(*sizes, D=D, Dv=Dv, **options)
        if n == 3:
            # Tokens first.
            tensors = {m: x.transpose(1, 2).contiguous().transpose(1, 2)
                       for m, x in case.tensors.items()}  # fmt: skip
            case = Case(tensors, case.options)
        douts = draw_douts(case)
        spoil_memory()
        found = gradients(case, douts)
        for programs in (1, 132):
            with monkeypatch.context() as patch:
                patch.setattr(narrow, "processors", lambda _, n=programs: n)
                patch.setattr(narrow, "has_whole_parts", lambda *_: False)
                patch.setattr(narrow, "has_small_tiles", lambda *_: False)
                summed = gradients(case, douts)
            assert all(same_bits(found[name], x) for name, x in summed.items())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("D", [64, 80])
def test_error_rule(D, options):
    for sizes in SIZES:
        check(drawn(*sizes, D=D, **options))
    case = drawn(300, 100, D=D, **options)
    assert is_whole(case) == (not options)
    check(case.replaced(q=case.tensors["q"] * 30))


@pytest.mark.parametrize("D", [64, 128])
def test_fp16_softcap_scale_and_sinks(D):
    check(drawn(90, 90, D=D, dtype=torch.float16, causal=True, softcap=5.0))
    check(drawn(90, 90, D=D, scale=-0.2))
    check(drawn(90, 90, D=D, causal=True).replaced(sinks=torch.randn(4)))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_what_is_not_finite_is_where_sums_have_it(name, value, D, monkeypatch):
    case = drawn(90, 90, D=D, causal=True)
    dout, dlse = draw_douts(case)
    changed = dict(case.tensors) | {"dout": dout.clone()}
    changed[name] = changed[name].clone()
    changed[name][0, :, 50, 3] = value
    spoilt, douts = case.replaced(**{n: changed[n] for n in "qkv"}), (changed["dout"], dlse)
    found = gradients(spoilt, douts)
    assert any(x.isnan().any() for x in found.values())
    monkeypatch.setattr(narrow, "has_whole_parts", lambda *_: False)
    assert all(same_bits(found[n], x) for n, x in gradients(spoilt, douts).items())
