"""Queries that are shared out among programs in the Hopper backward, on a GPU: the correctness
rule, and bits."""

from __future__ import annotations

import math

import pytest
import torch
from hopper_forward_calls import on_hopper
from kernel_calls import backward as run_backward
from problems import Case, draw, draw_douts, draw_varlen, pose, run, same_bits, statistics_of
from test_hopper_backward import _seed_on_gpu, check, gradients  # noqa: F401

from lockstep import reference
from lockstep.kernels.hopper import KERNEL
from lockstep.kernels.hopper.backward import shares
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.backward.wide import call as wide
from lockstep.kernels.kernel import BackwardTensors, Needs

pytestmark = on_hopper
OPTIONS = [{}, {"causal": True}, {"window": (400, 30)}]
# Sq, Skv, Hq, Hkv
SIZES = [(1400, 77, 4, 4), (600, 300, 6, 2), (300, 517, 8, 1)]
# Queries and keys of packed sequences, of which some are shared out.
LENGTHS = [(700, 77), (1, 5), (300, 517), (0, 30), (40, 0), (600, 300), (900, 1200)]
by_head_dim = pytest.mark.parametrize("D", [64, 128, 256])


@pytest.fixture(autouse=True)
def _share_short_loops(monkeypatch):
    monkeypatch.setattr(shares, "LEAST_STEPS", 1)
    monkeypatch.setattr(shares, "LEAST_STEPS_WITH_MASK", 2)


def is_shared(case: Case) -> bool:
    """Whether the queries of a call may be shared out."""
    problem, tensors = pose(case)
    return (narrow if tensors.q.shape[-1] <= 128 else wide).cut_of(problem).shares is not None


def drawn(Sq, Skv, Hq, Hkv, B=2, **how) -> Case:
    case = draw(Sq, Skv, B=B, Hq=Hq, Hkv=Hkv, **{"dtype": torch.bfloat16, **how})
    masked = how.get("causal") or how.get("window")
    assert is_shared(case) == (not masked or Hq > Hkv)
    return case


def packed(lengths, Hq, Hkv, **how) -> Case:
    case = draw_varlen(
        *([pair[i] for pair in lengths] for i in (0, 1)),
        Hq=Hq,
        Hkv=Hkv,
        **{"dtype": torch.bfloat16, **how},
    )
    assert is_shared(case)
    return case


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (96, 40), (256, 256), (160, 136)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_error_rule(options, D, Dv):
    for sizes in SIZES:
        check(drawn(*sizes, D=D, Dv=Dv, **options))
    check(packed(LENGTHS, 6, 2, D=D, Dv=Dv, **options))
    case = drawn(300, 517, 8, 1, B=4, D=D, Dv=Dv, **options)
    check(case.replaced(kv_lens=torch.tensor([517, 0, 77, 300])))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("options", [{"softcap": 3.0, "causal": True}, {"scale": -0.1}], ids=str)
def test_options(options, D):
    for sizes in SIZES:
        check(drawn(*sizes, D=D, **options))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("sigma", [3.0, 30.0])
def test_large_scores(sigma, D):
    for causal in (False, True):
        case = drawn(600, 300, 8, 2, D=D, causal=causal)
        check(case.replaced(q=case.tensors["q"] * sigma))


def test_sinks_and_fp16():
    case = drawn(600, 300, 8, 2, D=64, dtype=torch.float16, causal=True)
    check(case.replaced(sinks=torch.randn(8)))


@by_head_dim
@pytest.mark.parametrize("causal", [False, True])
def test_bits(causal, D, monkeypatch):
    """The same call again, a sequence alone, and with few programs."""
    for sizes in SIZES:
        case = drawn(*sizes, D=D, causal=causal)
        douts = draw_douts(case)
        together = gradients(case, douts)
        alone = Case({n: x[1:2] for n, x in case.tensors.items()}, case.options)
        single = gradients(alone, tuple(x[1:2] for x in douts))
        for name, x in together.items():
            assert same_bits(single[name], x[1:2])
        for programs in (1, 3, 132):
            with monkeypatch.context() as patch:
                patch.setattr(narrow, "processors", lambda _, n=programs: n)
                found = gradients(case, douts)
            assert all(same_bits(found[name], x) for name, x in together.items())


@by_head_dim
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("least", [1, 4])
def test_bits_of_packed_sequences(options, D, least, monkeypatch):
    """Each has those of a call of its own, whatever is packed beside it; with more steps to a
    share, some are shared out and others are not."""
    monkeypatch.setattr(shares, "LEAST_STEPS", least)
    monkeypatch.setattr(shares, "LEAST_STEPS_WITH_MASK", 2 * least)
    Hq, Hkv = 6, 2
    case = packed(LENGTHS, Hq, Hkv, D=D, **options)
    douts = draw_douts(case)
    found = gradients(case, douts)
    at_q = at_k = 0
    for len_q, len_k in LENGTHS:
        q, k = slice(at_q, at_q + len_q), slice(at_k, at_k + len_k)
        at_q, at_k = at_q + len_q, at_k + len_k
        if not len_q or not len_k:
            assert not any(found[name][k].any() for name in ("dk", "dv"))
            continue
        rows = {"q": q, "k": k, "v": k}
        tensors = {n: case.tensors[n][at].transpose(0, 1)[None] for n, at in rows.items()}
        own = gradients(
            Case(tensors, case.options), tuple(x[q].transpose(0, 1)[None] for x in douts)
        )
        for name, at in rows.items():
            assert same_bits(own[f"d{name}"][0].transpose(0, 1), found[f"d{name}"][at])


@by_head_dim
@pytest.mark.parametrize("causal", [False, True])
def test_bits_with_lengths(causal, D):
    """Each sequence has those of a call that ends with its keys; keys beyond have no gradient."""
    lens = [517, 0, 77, 300]
    whole = drawn(300, 517, 8, 1, B=4, D=D, causal=causal)
    case = whole.replaced(kv_lens=torch.tensor(lens))
    douts = draw_douts(case)
    found = gradients(case, douts)
    for b, n in enumerate(lens):
        assert not any(found[name][b, :, n:].any() for name in ("dk", "dv"))
        if n:
            q, k, v = (whole.tensors[name][b : b + 1] for name in "qkv")
            tensors = {"q": q, "k": k[:, :, :n], "v": v[:, :, :n]}
            own = gradients(Case(tensors, whole.options), tuple(x[b : b + 1] for x in douts))
            assert same_bits(own["dq"], found["dq"][b : b + 1])
            for name in ("dk", "dv"):
                assert same_bits(own[name], found[name][b : b + 1, :, :n])


@pytest.mark.parametrize("D", [128, 256])
def test_wrong_offsets_leave_others_their_bits(D):
    """A bad sequence has NaN for gradients of its keys, and the others those of right offsets."""
    case = packed([(300, 300), (200, 200), (500, 500)], 8, 1, D=D, causal=True)
    douts = draw_douts(case)
    right = gradients(case, douts)
    saved = run(case, reference)
    wrong = {n: case.tensors[n].clone() for n in ("cu_seqlens_q", "cu_seqlens_k")}
    for offsets in wrong.values():
        offsets[2] = 100_000
    problem, tensors = pose(case.replaced(**wrong))
    rows = (saved.out.to(problem.dtype), statistics_of(problem, saved.lse), *douts)
    needs = Needs(True, True, True, False, False)
    found = run_backward(KERNEL, problem, BackwardTensors(*tensors, *rows), needs)
    for name in ("k", "v"):
        assert same_bits(getattr(found, name)[:300], right[f"d{name}"][:300])
        assert getattr(found, name)[300:].isnan().all()


@by_head_dim
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_what_is_not_finite_stays_with_those_who_see_it(name, value, D, monkeypatch):
    """It makes the same gradients NaN as in one loop, and leaves the bits of others."""
    case = drawn(300, 300, 8, 1, D=D, causal=True)
    dout, dlse = draw_douts(case)
    clean = gradients(case, (dout, dlse))
    changed = dict(case.tensors) | {"dout": dout.clone()}
    changed[name] = changed[name].clone()
    changed[name][0, :, 200, 3] = value
    spoilt, douts = case.replaced(**{n: changed[n] for n in "qkv"}), (changed["dout"], dlse)
    found = gradients(spoilt, douts)
    monkeypatch.setattr(shares, "FEW_LOOPS_WITH_MASK", 0)
    monkeypatch.setattr(shares, "MORE_SHARES_WITH_MASK", 0)
    in_one = gradients(spoilt, douts)
    assert any(x.isnan().any() for x in found.values())
    for gradient, x in found.items():
        assert same_bits(x[1], clean[gradient][1])
        assert torch.equal(x.isnan(), in_one[gradient].isnan())
