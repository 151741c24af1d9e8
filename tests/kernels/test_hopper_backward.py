"""The Hopper backward on a GPU: the correctness rule, garbage, bits, and no hang.

Compiling takes most of the time, so a test runs all shapes that share a build.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hopper_cases import DV, KINDS, random_case
from hopper_forward_calls import by_dtype, on_hopper
from kernel_calls import backward as run_backward
from kernel_calls import forward as run_forward
from problems import (
    Case,
    assert_allowed,
    draw,
    draw_douts,
    draw_varlen,
    pose,
    run,
    same_bits,
    statistics_of,
)

from lockstep import reference
from lockstep.kernels.hopper import KERNEL
from lockstep.kernels.hopper.backward.cuts import Cuts
from lockstep.kernels.hopper.backward.medium import call as medium
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.memory_order import in_order_of

pytestmark = on_hopper

by_head_dim = pytest.mark.parametrize("D", DV)


@pytest.fixture(autouse=True)
def _seed_on_gpu():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


def gradients(case: Case, douts: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dq, dk, dv and dsinks of the Hopper kernel, out and lse taken from the oracle."""
    problem, tensors = pose(case)
    assert KERNEL.supports_backward(problem) is None
    saved = run(case, reference)
    rows = (saved.out.to(problem.dtype), statistics_of(problem, saved.lse), *douts)
    if problem.layout == "dense":
        # As an operator hands them to a kernel.
        rows = tuple(in_order_of(tensors.q, x) for x in rows)
    needs = Needs(True, True, True, False, tensors.sinks is not None)
    found = run_backward(KERNEL, problem, BackwardTensors(*tensors, *rows), needs)
    return {f"d{name}": x for name, x in found._asdict().items() if x is not None}


def check(case: Case) -> None:
    """The error rule for gradients."""
    douts = draw_douts(case)
    assert_allowed(case, gradients(case, douts), douts, "hopper")


@by_dtype
@by_head_dim
@pytest.mark.parametrize("causal", [False, True])
def test_dense(causal, D, dtype):
    for Sq, Skv in ((256, 256), (1, 1), (63, 111), (300, 129), (129, 300)):
        check(draw(Sq, Skv, B=2, Hq=4, Hkv=2, D=D, Dv=DV[D], dtype=dtype, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("D", "Dv"),
    [
        *((8, 8), (16, 40), (40, 16), (8, 64), (40, 40), (96, 96), (96, 32), (64, 128)),
        *((192, 192), (160, 128), (136, 64), (160, 160), (136, 256), (64, 200), (256, 8)),
    ],
)
def test_other_head_dims(D, Dv, causal):
    check(draw(190, 201, D=D, Dv=Dv, dtype=torch.bfloat16, causal=causal))


@by_head_dim
@pytest.mark.parametrize(
    "variants",
    [
        [{"window": (100, 30)}, {"window": (0, 0)}, {"window": (70, None), "causal": True}],
        [{"window": (None, 200)}, {"window": (None, 0)}],
        [{"scale": -0.1, "causal": True}],
        [{"window": (300, None)}],
        [{"softcap": 3.0}],
        [{"softcap": 3.0, "causal": True}],
        [{"scale": 0.3}],
    ],
    ids=lambda variants: str(variants[0]),
)
def test_options(variants, D):
    for options in variants:
        check(draw(333, 517, D=D, Dv=DV[D], dtype=torch.bfloat16, **options))


@by_head_dim
def test_sinks(D):
    case = draw(200, 300, B=2, Hq=4, Hkv=2, D=D, Dv=DV[D], dtype=torch.bfloat16, causal=True)
    check(case.replaced(sinks=torch.randn(4)))


@by_head_dim
def test_rows_and_keys_that_see_nothing_get_zero(D):
    case = draw(400, 150, D=D, Dv=DV[D], dtype=torch.bfloat16, causal=True)
    found = gradients(case, draw_douts(case))
    assert not found["dq"][:, :, :250].any()
    case = draw(100, 400, D=D, Dv=DV[D], dtype=torch.bfloat16, window=(20, 0))
    found = gradients(case, draw_douts(case))
    assert not found["dk"][:, :, :280].any()
    assert not found["dv"][:, :, :280].any()


@by_head_dim
def test_kv_lens(D):
    case = draw(129, 400, B=4, D=D, Dv=DV[D], dtype=torch.bfloat16, causal=True)
    check(case.replaced(kv_lens=torch.tensor([0, 1, 256, 400])))


@by_head_dim
def test_varlen(D):
    lens = [1, 130, 64, 0, 257], [5, 130, 200, 30, 100]
    check(draw_varlen(*lens, D=D, Dv=DV[D], dtype=torch.bfloat16, causal=True))
    check(draw_varlen(*lens, D=D, Dv=DV[D], dtype=torch.bfloat16, window=(50, 20)))


@by_head_dim
def test_strides(D):
    """Views with rows far apart, and ones that no tensor map takes."""
    case = draw(150, 170, B=2, D=D, Dv=DV[D], dtype=torch.bfloat16)
    douts = draw_douts(case)
    expected = gradients(case, douts)
    spread = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in case.tensors.items()}
    odd = {n: torch.nn.functional.pad(x, (0, 1))[..., :-1] for n, x in case.tensors.items()}
    for views in (spread, odd):
        found = gradients(Case(views, case.options), douts)
        assert all(same_bits(found[name], expected[name]) for name in expected)


@by_head_dim
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_nothing_beyond_a_length_leaks(garbage, D):
    case = draw(100, 300, B=2, D=D, Dv=DV[D], dtype=torch.bfloat16)
    lens = torch.tensor([77, 200])
    case = case.replaced(kv_lens=lens)
    douts = draw_douts(case)
    expected = gradients(case, douts)
    for name in ("k", "v"):
        for b, length in enumerate(lens):
            case.tensors[name][b, :, length:] = garbage
    found = gradients(case, douts)
    assert all(same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        *((64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float16)),
        *((192, torch.bfloat16), (256, torch.bfloat16), (192, torch.float16)),
    ],
)
def test_garbage_stays_with_those_who_see_it(D, dtype):
    """A query or dO that is not finite reaches the keys its row sees; a key or value, the rows that
    see it: whole rows of gradients, and no other."""
    Sq, Skv = 300, 400
    case = draw(Sq, Skv, D=D, Dv=DV[D], dtype=dtype, causal=True)
    dout, dlse = draw_douts(case)
    clean = gradients(case, (dout, dlse))

    def dirty(name: str, head: int, row: int, value: float) -> dict[str, torch.Tensor]:
        tensors = {**case.tensors, "dout": dout}
        tensors[name] = tensors[name].clone()
        tensors[name][0, head, row, 5] = value
        return gradients(
            Case({n: tensors[n] for n in "qkv"}, case.options), (tensors["dout"], dlse)
        )

    for name, head, row, value in (("q", 0, 140, math.nan), ("dout", 1, 150, math.inf)):
        found, seen = dirty(name, head, row, value), row + Skv - Sq + 1
        others = [i for i in range(Sq) if i != row]
        assert same_bits(found["dq"][0, head, others], clean["dq"][0, head, others])
        assert not found["dq"][0, head, row].isfinite().any()
        for what in ("dk", "dv"):
            assert same_bits(found[what][0, head, seen:], clean[what][0, head, seen:])
            assert not found[what][0, head, :seen].isfinite().all(-1).any()
            assert same_bits(found[what][0, 1 - head], clean[what][0, 1 - head])
    for name, head, key in (("k", 0, 250), ("v", 1, 260)):
        found, first = dirty(name, head, key, math.nan), key - (Skv - Sq)
        assert same_bits(found["dq"][0, head, :first], clean["dq"][0, head, :first])
        assert not found["dq"][0, head, first:].isfinite().all(-1).any()
        assert same_bits(found["dq"][0, 1 - head], clean["dq"][0, 1 - head])


@by_head_dim
def test_keys_that_no_row_sees_do_not_leak(D):
    case = draw(100, 400, D=D, Dv=DV[D], dtype=torch.bfloat16, window=(20, 0))
    douts = draw_douts(case)
    clean = gradients(case, douts)
    for name in ("k", "v"):
        case.tensors[name][:, :, :280] = math.nan
    found = gradients(case, douts)
    assert all(same_bits(found[name], clean[name]) for name in clean)


@by_head_dim
@pytest.mark.parametrize(("Sq", "lens"), [(87, [63, 63]), (300, [200, 141])])
def test_rows_that_see_a_sink_alone_do_not_leak(D, Sq, lens):
    """Their q is in no score, so nothing in m or lse tells that it is not finite."""
    right, sinks = 17, torch.randn(2)
    case = draw(
        Sq, lens[0], B=2, D=D, Dv=DV[D], dtype=torch.float16, window=(None, right), sinks=sinks
    )
    if lens[0] != lens[1]:
        case = case.replaced(kv_lens=torch.tensor(lens))
    douts = draw_douts(case)
    clean = gradients(case, douts)
    for b, n in enumerate(lens):
        case.tensors["q"][b, :, : Sq - n - right] = math.nan
    found = gradients(case, douts)
    assert all(same_bits(found[name], clean[name]) for name in clean)


@by_head_dim
def test_neighbours_do_not_leak(D):
    case = draw_varlen([70, 90, 80], [70, 90, 80], D=D, Dv=DV[D], dtype=torch.bfloat16)
    dout, dlse = draw_douts(case)
    expected = gradients(case, (dout, dlse))
    for name in ("q", "k", "v"):
        case.tensors[name][70:160] = float("nan")
    dout[70:160] = float("nan")
    found = gradients(case, (dout, dlse))
    for name in expected:
        assert same_bits(found[name][:70], expected[name][:70])
        assert same_bits(found[name][160:], expected[name][160:])


@by_head_dim
@pytest.mark.parametrize("causal", [False, True])
def test_bits(causal, D):
    """The same call again, and a sequence alone, in another place, and packed."""
    case = draw(700, 900, B=3, Hq=4, Hkv=2, D=D, Dv=DV[D], dtype=torch.bfloat16, causal=causal)
    douts = draw_douts(case)
    together = gradients(case, douts)
    for _ in range(5):
        again = gradients(case, douts)
        assert all(same_bits(again[name], together[name]) for name in together)
    rotated = Case({n: x.roll(1, 0) for n, x in case.tensors.items()}, case.options)
    elsewhere = gradients(rotated, tuple(x.roll(1, 0) for x in douts))
    alone = Case({n: x[1:2] for n, x in case.tensors.items()}, case.options)
    single = gradients(alone, tuple(x[1:2] for x in douts))
    q, k, v = (case.tensors[n].transpose(1, 2).flatten(0, 1) for n in "qkv")
    cu = {f"cu_seqlens_{n}": torch.arange(4) * s for n, s in (("q", 700), ("k", 900))}
    packed = gradients(
        Case({"q": q, "k": k, "v": v, **cu}, case.options),
        tuple(x.transpose(1, 2).flatten(0, 1) for x in douts),
    )
    for name in together:
        assert same_bits(elsewhere[name].roll(-1, 0), together[name])
        assert same_bits(single[name], together[name][1:2])
        of_batch = together[name].transpose(1, 2).flatten(0, 1)
        assert same_bits(packed[name], of_batch)


@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (150, 40)}], ids=["none", "causal", "window"]
)
def test_how_many_programs_share_the_tickets_changes_no_bit(options, D, monkeypatch):
    """Some loops are over at once: those of keys beyond a length."""
    case = draw(300, 700, B=2, Hq=4, Hkv=2, D=D, Dv=DV[D], dtype=torch.bfloat16, **options)
    case = case.replaced(kv_lens=torch.tensor([130, 640]))
    douts = draw_douts(case)
    expected = gradients(case, douts)
    for programs in (1, 2, 3, 7):
        for design in (narrow, medium):
            monkeypatch.setattr(design, "processors", lambda _, n=programs: n)
        found = gradients(case, douts)
        assert all(same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
def test_both_schedules_have_the_same_bits(options, monkeypatch):
    """At D 64 length and window decide which one it is: `narrow.is_together`."""
    for Sq, Skv in ((1, 1), (63, 111), (333, 517), (640, 512)):
        case = draw(Sq, Skv, B=2, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, **options)
        douts = draw_douts(case)
        found = []
        for is_together in (True, False):
            monkeypatch.setattr(narrow, "is_together", lambda *_, found=is_together: found)
            found.append(gradients(case, douts))
        assert all(same_bits(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("D", [64, 72, 128])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 30)}], ids=str)
def test_sums_become_dq_with_the_same_bits_in_both_ways(options, D, monkeypatch):
    """By the loop with the last part of a tile, or by a launch: `narrow.is_finished_early`."""
    how = {"Hq": 2, "Hkv": 2, "D": D, "dtype": torch.bfloat16, **options}
    lens = [1, 130, 64, 0, 257, 90], [5, 130, 200, 30, 100, 0]
    cases = [draw(333, 517, B=2, **how), draw(640, 300, B=2, **how), draw_varlen(*lens, **how)]
    cases.append(cases[0].replaced(kv_lens=torch.tensor([0, 300])))
    for case in cases:
        douts = draw_douts(case)
        found = []
        for is_early in (True, False):
            monkeypatch.setattr(narrow, "is_finished_early", lambda _, found=is_early: found)
            found.append(gradients(case, douts))
        assert all(same_bits(x, found[1][name]) for name, x in found[0].items())


@by_head_dim
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_bits_with_garbage(name, value, D):
    """Who sees it, and what comes of it, is not left to chance."""
    case = draw(300, 300, Hq=8, Hkv=8, D=D, Dv=DV[D], dtype=torch.bfloat16, causal=True)
    dout, dlse = draw_douts(case)
    {**case.tensors, "dout": dout}[name][0, :, 5:300:64, 3] = value
    expected = gradients(case, (dout, dlse))
    for _ in range(8):
        again = gradients(case, (dout, dlse))
        assert all(same_bits(again[what], expected[what]) for what in expected)


@by_head_dim
@pytest.mark.parametrize("mask", ["none", "causal", "window", "left"])
def test_random_shapes_do_not_hang(mask, D):
    """Programs wait for each other, so every shape is a chance to wait forever."""
    draws = random.Random(mask)
    for _ in range(80):
        windows = {"window": (draws.randrange(300), draws.randrange(300)), "left": (5, None)}
        case = draw(
            draws.randrange(1, 900),
            # Not a multiple of a tile, so that one build will do.
            draws.randrange(0, 900, 128) + draws.randrange(1, 128),
            B=draws.randrange(1, 4),
            # A few tickets, or several for each program.
            Hq=(heads := draws.choice([2, 24])) * draws.choice([1, 2]),
            Hkv=heads,
            D=D,
            Dv=DV[D],
            dtype=torch.bfloat16,
            causal=mask == "causal",
            window=windows.get(mask),
        )
        found = gradients(case, draw_douts(case))
        assert all(bool(x.isfinite().all()) for x in found.values())


@pytest.mark.parametrize(("D", "kind"), KINDS, ids=str)
def test_no_hang(D, kind, monkeypatch):
    """10,000 launches in all, on one program or many, into memory full of NaN. A hang is a hang, so
    run this under a timeout."""
    draws = random.Random(kind)
    for design in (narrow, medium):
        monkeypatch.setattr(design, "processors", lambda _: draws.choice((1, 7, 132)))
    pool = torch.randn(1 << 22, dtype=torch.bfloat16)
    unwritten = torch.zeros((), dtype=torch.int64)
    needs = Needs(True, True, True, False, False)
    for i in range(10_000 // len(KINDS)):
        problem, tensors = pose(random_case(draws, pool, D, kind))
        out, _, statistics = run_forward(KERNEL, problem, tensors)
        dout = pool[: out.numel()].view(out.shape)
        saved = BackwardTensors(*tensors, out, statistics, dout, None)
        found = run_backward(KERNEL, problem, saved, needs)
        for x in (found.q, found.k, found.v):
            unwritten += x.isnan().sum()
            # The next results lie where these did.
            x.fill_(math.nan)
        del out, statistics, saved, found, x
        if i % 500 == 499:
            assert int(unwritten) == 0


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("group", [1, 3])
def test_bits_do_not_depend_on_cuts(D, group, monkeypatch):
    """With few programs, so that short sequences have several rounds."""
    for programs, Hkv, Sq, Skv in [(8, 9, 1321, 640), (13, 6, 1321, 777)]:
        case = draw(Sq, Skv, dtype=torch.bfloat16, B=2, Hq=Hkv * group, Hkv=Hkv, D=D)
        if programs == 13:
            case = case.replaced(q=case.tensors["q"] * 300)  # large scores
        problem, _ = pose(case)
        assert narrow.cuts_of(problem, narrow.cut_of(problem), programs, False).n_cut > 0
        douts = draw_douts(case)
        monkeypatch.setattr(narrow, "processors", lambda _, n=programs: n)
        found, again = gradients(case, douts), gradients(case, douts)
        with monkeypatch.context() as patch:
            patch.setattr(narrow, "plan_cuts", lambda *sizes: Cuts(sizes[5]))
            whole = gradients(case, douts)
        for name, x in whole.items():
            assert same_bits(found[name], x)
            assert same_bits(again[name], x)
