"""The Hopper forward on a GPU: the error rule, and no hang. `test_hopper_forward_bits.py` has bits
and garbage."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hopper_cases import KINDS, random_case
from hopper_forward_calls import by_build, by_dtype, check, hopper_run, launch, on_gpu, on_hopper
from problems import Case, draw, draw_varlen, same_bits

from lockstep.kernels import hopper

pytestmark = on_hopper
HEAD_DIMS = (64, 72, 112, 128, 160, 192, 256)


def follow_each_other(monkeypatch, case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Results with few programs, each of which has many tiles, and with one tile to a program."""
    for programs in (1, 3, 1000):
        monkeypatch.setattr(hopper_launch(), "processors", lambda _, n=programs: n)
        yield hopper_run(case)


def hopper_launch():
    from lockstep.kernels.hopper.forward import launch

    return launch


def test_no_hang(monkeypatch):
    """10,000 launches over random shapes of a few builds, into memory full of NaN, on one program
    or many. A hang is a hang, so run this under a timeout."""
    draws = random.Random(0)
    monkeypatch.setattr(hopper_launch(), "processors", lambda _: draws.choice((1, 7, 132)))
    pool = torch.randn(1 << 22, device="cuda", dtype=torch.bfloat16)
    unwritten = torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(10_000):
        out, lse = launch(random_case(draws, pool, *draws.choice(KINDS)))
        unwritten += out.isnan().sum() + lse.isnan().sum()
        # The next results lie where these did.
        out.fill_(math.nan)
        lse.fill_(math.nan)
        del out, lse
        if i % 500 == 499:
            assert int(unwritten) == 0


@by_build
@pytest.mark.parametrize("kind", ["causal", "full", "window", "kv_lens", "varlen"])
def test_tiles_that_follow_each_other(kind, D, dtype, monkeypatch):
    """Consumers of a tile see different blocks: lengths that differ by no multiple of 64."""
    options: dict[str, Any] = {"window": (150, 20)} if kind == "window" else {"causal": True}
    case = draw(700, 650, B=2, Hq=4, Hkv=2, D=D, dtype=dtype, **options)
    if kind == "full":
        case = case.replaced(causal=False)
    elif kind == "kv_lens":
        case = case.replaced(kv_lens=torch.tensor([650, 300]))
    elif kind == "varlen":
        case = draw_varlen([300, 7, 500], [333, 40, 450], D=D, dtype=dtype, **options)
    few, some, many = follow_each_other(monkeypatch, case)
    check(case)
    for a, b, c in zip(few, some, many, strict=True):
        assert same_bits(a, b)
        assert same_bits(b, c)


@by_dtype
@pytest.mark.parametrize("D", [8, 32, *HEAD_DIMS])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims(D, causal, dtype):
    check(draw(111, 300, D=D, dtype=dtype, causal=causal))


@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (64, 128), (40, 256), (256, 176)])
def test_value_dim_of_its_own(D, Dv):
    check(draw(100, 200, D=D, Dv=Dv, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("Sq", "Skv"), [(16, 1), (63, 64), (64, 63), (191, 129), (193, 127), (1023, 1023), (300, 111)]
)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(Sq, Skv, D, causal):
    check(draw(Sq, Skv, D=D, dtype=torch.bfloat16, causal=causal))


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 1), (6, 2), (9, 3)])
def test_grouped_heads(Hq, Hkv):
    check(draw(130, 300, B=2, Hq=Hq, Hkv=Hkv, dtype=torch.bfloat16, causal=True))


@pytest.mark.parametrize(("D", "dtype"), [(64, torch.float16), (128, torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": (17, 5)},
        {"window": (0, 0)},
        {"window": (None, 40)},
        {"window": (200, None)},
        {"window": (129, None), "causal": True},
        {"softcap": 5.0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"softcap": 20.0, "window": (64, 0)},
    ],
    ids=str,
)
def test_options(options, D, dtype):
    check(draw(300, 500, D=D, dtype=dtype, **options))


@by_dtype
@pytest.mark.parametrize("sink_dtype", [torch.float32, None], ids=["fp32", "same"])
def test_sinks(dtype, sink_dtype):
    sinks = torch.tensor([0.5, -1.0, 30.0, -math.inf]).to(sink_dtype or dtype)
    check(draw(130, 300, Hq=4, dtype=dtype, sinks=sinks, causal=True))


@by_build
def test_kv_lens(D, dtype):
    lens = torch.tensor([0, 1, 128, 255, 300])
    check(draw(200, 300, B=5, D=D, dtype=dtype, kv_lens=lens))
    check(draw(200, 300, B=5, D=D, dtype=dtype, kv_lens=lens.int(), causal=True))


@by_build
def test_varlen(D, dtype):
    q_lens, kv_lens = [1, 300, 0, 64, 7, 192, 500], [300, 1, 40, 0, 129, 192, 500]
    check(draw_varlen(q_lens, kv_lens, D=D, dtype=dtype))
    check(draw_varlen(q_lens, kv_lens, D=D, dtype=dtype, causal=True))
    check(draw_varlen(q_lens, kv_lens, D=D, dtype=dtype, window=(30, 10), sinks=torch.randn(4)))


def long_tailed(**options: Any) -> Case:
    """More tiles than any GPU has SMs, in sequences of very different lengths."""
    lens = [40, 3000, 7, 500, 129, 0, 1100, 64]
    return draw_varlen(lens, lens, Hq=8, Hkv=2, dtype=torch.bfloat16, causal=True, **options)


def test_who_draws_a_tile_changes_no_bit(monkeypatch):
    """Nor does a second pass, which few programs make over more tiles than a mark has bits."""
    case = long_tailed(D=128)
    v = case.tensors["v"]
    v[50, 0, 3], v[2900, 1, 5], v[3600, 0, 0] = math.nan, math.inf, math.nan
    few, some, many = follow_each_other(monkeypatch, case)
    for a, b, c in zip(few, some, many, strict=True):
        assert same_bits(a, b)
        assert same_bits(b, c)
    offset = 0
    for n in case.tensors["cu_seqlens_q"].diff().tolist():
        rows = slice(offset, offset + n)
        offset += n
        if n < hopper.MIN_QUERIES:
            continue
        alone = {x: case.tensors[x][rows].transpose(0, 1)[None] for x in ("q", "k", "v")}
        out, lse = hopper_run(Case(alone, {"causal": True}))
        assert same_bits(out[0].transpose(0, 1), many[0][rows])
        assert same_bits(lse[0].transpose(0, 1), many[1][rows])


def test_tickets_of_launches_do_not_mix():
    """Packed launches side by side on several streams, and from a graph."""
    case = on_gpu(long_tailed(D=64))
    expected = launch(case)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(launch(case))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = launch(case)
    for _ in range(3):
        for x in replayed:
            x.fill_(math.nan)
        graph.replay()
        results.append(tuple(x.clone() for x in replayed))
    torch.cuda.synchronize()
    for out, lse in results:
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])


@pytest.mark.parametrize("how", ["heads last", "sliced", "odd offset", "expanded"])
def test_strides(how):
    case = draw(130, 200, B=2, Hq=4, Hkv=4, dtype=torch.bfloat16, causal=True)
    expected = hopper_run(case)
    tensors = on_gpu(case).tensors
    if how == "heads last":
        tensors = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in tensors.items()}
    elif how == "sliced":
        tensors = {n: torch.cat([x, x], -1)[..., : x.shape[-1]] for n, x in tensors.items()}
    elif how == "odd offset":
        tensors = {n: torch.cat([x[..., :1], x], -1)[..., 1:] for n, x in tensors.items()}
    else:
        tensors["k"] = tensors["k"][:, :1].expand_as(tensors["k"])
        expected = hopper_run(case.replaced(k=case.tensors["k"][:, :1].repeat(1, 4, 1, 1)))
    for ours, exact in zip(launch(Case(tensors, case.options)), expected, strict=True):
        assert same_bits(ours.cpu(), exact)


@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 16, 3), (2, 16, 0)])
def test_nothing_to_attend(B, Sq, Skv):
    case = draw(Sq, Skv, B=B, dtype=torch.bfloat16, sinks=torch.ones(2))
    out, lse = hopper_run(case)
    assert (out == 0).all()
    assert (lse == 1).all()


def test_every_element_is_written_and_launches_repeat():
    case = on_gpu(draw(777, 777, B=3, Hq=8, Hkv=8, D=128, dtype=torch.bfloat16, causal=True))
    first, first_lse = launch(case)
    assert not first.isnan().any()
    for _ in range(20):
        torch.full((3, 8, 777, 128), math.nan, device="cuda", dtype=torch.bfloat16)  # poison
        out, lse = launch(case)
        assert same_bits(first, out)
        assert same_bits(first_lse, lse)


def test_long_rows_over_and_over():
    """Many blocks to a tile, few tiles: each launch against the first."""
    for D in (64, 128, 256):
        case = on_gpu(draw(1023, 1023, D=D, dtype=torch.bfloat16))
        first, first_lse = launch(case)
        for _ in range(500):
            out, lse = launch(case)
            assert same_bits(first, out)
            assert same_bits(first_lse, lse)


@pytest.mark.parametrize("seed", range(20))
def test_the_rule_holds_for_any_numbers(seed):
    torch.manual_seed(seed)
    check(draw(1023, 1023, D=128, dtype=torch.bfloat16))


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_a_large_weight_is_exact(D):
    """Rows in which the last key, alone in its block, has a good part of the weight, and what it
    adds is taken away by others: rounding that weight would show."""
    Sq, Skv = 128, 257
    case = draw(Sq, Skv, Hq=1, Hkv=1, D=D, dtype=torch.bfloat16, scale=1.0)
    q, k, v = (torch.zeros_like(case.tensors[name]) for name in "qkv")
    # Steps of a bf16 number: weights from 88 to 103, of all roundings.
    q[0, 0, :, 0] = 4.46875 + torch.arange(Sq) % 5 / 32
    q[0, 0, :, 1] = torch.arange(Sq) / 4096
    k[..., -1, :2] = 1.0
    v[..., :-1, :] = -0.375
    v[..., -1, :] = 1.0
    case = Case({**case.tensors, "q": q, "k": k, "v": v}, case.options)
    out, lse = hopper_run(case)
    w = q[0, 0].double().sum(-1).exp()
    exact = (w - 96) / (w + 256)
    error = (out[0, 0].double() - exact.unsqueeze(-1)).abs()
    # Out is rounded; a weight that was, too, would change it by up to 1/2000.
    assert (error <= exact.abs().unsqueeze(-1) / 256 + 2e-5).all()
    assert ((lse[0, 0].double() - (w + 256).log()).abs() <= 4e-6).all()
