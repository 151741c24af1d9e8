"""The Hopper forward on a GPU: garbage stays where it is; bits follow from a row and its keys."""

from __future__ import annotations

import math

import pytest
import torch
from hopper_forward_calls import by_build, by_dtype, check, hopper_run, on_hopper
from problems import Case, draw, draw_varlen, pose, same_bits

from lockstep.kernels.hopper.forward import plan

pytestmark = on_hopper


@by_dtype
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_beyond_a_length_stays_there(garbage, dtype):
    lens = torch.tensor([0, 5, 128, 200])
    case = draw(150, 300, B=4, dtype=dtype, kv_lens=lens, causal=True)
    clean = hopper_run(case)
    for b, n in enumerate(lens.tolist()):
        for name in ("k", "v"):
            case.tensors[name][b, :, n:] = garbage
    for ours, expected in zip(hopper_run(case), clean, strict=True):
        assert same_bits(ours, expected)


def test_garbage_of_a_neighbour_stays_there():
    case = draw_varlen([100, 70, 200], [90, 70, 200], dtype=torch.bfloat16, causal=True)
    clean = hopper_run(case)
    for name in ("k", "v"):
        case.tensors[name][90:160] = math.nan
    for ours, expected in zip(hopper_run(case), clean, strict=True):
        assert same_bits(ours[:100], expected[:100])
        assert same_bits(ours[170:], expected[170:])
        assert ours[100:170].isnan().all()


@by_build
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, 20)}], ids=str)
def test_garbage_behind_a_mask_stays_there(D, dtype, options):
    """Bit for bit: rows that do not see it cannot tell; rows that do see it, and nothing else."""
    case = draw(300, 300, B=2, D=D, dtype=dtype, **options)
    clean, clean_lse = hopper_run(case)
    v = case.tensors["v"].clone()
    nonfinite = {(0, 0, 130, 3): math.nan, (0, 1, 150, 9): math.inf, (1, 0, 7, 63): -math.inf}
    nonfinite |= {(1, 1, 200, 0): math.inf, (1, 1, 210, 0): -math.inf}
    for at, value in nonfinite.items():
        v[at] = value
    out, lse = hopper_run(case.replaced(v=v))
    assert same_bits(lse, clean_lse)
    expected = clean.clone()
    first, last = (0, 300) if "causal" in options else (-20, 70)  # rows from the key that see it
    for (b, h, key, column), value in nonfinite.items():
        expected[b, h, max(key + first, 0) : key + last + 1, column] += value
    assert same_bits(out, expected)


@by_dtype
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
def test_garbage_in_keys_behind_a_mask_stays_there(dtype, options):
    case = draw(300, 300, D=128, dtype=dtype, causal=True, **options)
    clean, clean_lse = hopper_run(case)
    # With a softcap, two scores share a reciprocal: a number may not do what NaN does.
    for garbage in (7.0, math.nan):
        for name in ("k", "v"):
            case.tensors[name][:, :, 149:] = garbage
        out, lse = hopper_run(case)
        assert same_bits(out[:, :, :149], clean[:, :, :149])
        assert same_bits(lse[:, :, :149], clean_lse[:, :, :149])
    assert out[:, :, 149:].isnan().all()
    assert lse[:, :, 149:].isnan().all()


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_that_run_away(D, causal):
    """Scores that rise by hundreds after the first block: the second pass computes them."""
    case = draw(300, 600, B=2, Hq=3, Hkv=3, D=D, dtype=torch.bfloat16, causal=causal)
    alone = hopper_run(case)
    q, k = case.tensors["q"], case.tensors["k"]
    k[1, 2, 400] = q[1, 2, 200] * 60
    check(case)
    # Rows whose own scores stay low keep their bits.
    scores = q[1, 2].double() @ k[1, 2, 400].double() * D**-0.5
    calm = scores.abs() < 20
    calm[200] = False
    low = hopper_run(case.replaced(k=case.tensors["k"].clone()))
    assert calm.any()
    if causal:
        before = slice(0, 100)  # rows that do not see key 400
        assert same_bits(low[0][1, 2, before], alone[0][1, 2, before])
    assert same_bits(low[0][0], alone[0][0])


@by_build
def test_bits_do_not_depend_on_the_batch(D, dtype):
    case = draw(200, 333, B=5, Hq=4, Hkv=2, D=D, dtype=dtype, causal=True)
    whole = hopper_run(case)
    for b in range(5):
        one = case.replaced(**{n: case.tensors[n][b : b + 1] for n in ("q", "k", "v")})
        for mine, together in zip(hopper_run(one), whole, strict=True):
            assert same_bits(mine, together[b : b + 1])


@pytest.mark.parametrize("sigma", [1.0, 3.0, 30.0])
def test_bits_do_not_depend_on_the_height_of_tiles(sigma):
    """Three sequences of 11 heads have tiles of 192 rows, one of them alone has tiles of 128."""
    case = draw(1500, 1500, B=3, Hq=11, Hkv=11, D=64, dtype=torch.bfloat16)
    case = case.replaced(q=case.tensors["q"] * sigma, k=case.tensors["k"] * sigma)
    case.tensors["k"][1, 3, 700, 5] = math.inf
    whole = hopper_run(case)
    for b in range(3):
        one = case.replaced(**{n: case.tensors[n][b : b + 1] for n in ("q", "k", "v")})
        assert [plan.plan_of(pose(c)[0]).consumers for c in (case, one)] == [3, 2]
        for mine, together in zip(hopper_run(one), whole, strict=True):
            assert same_bits(mine, together[b : b + 1])


@pytest.mark.parametrize("D", [64, 128, 256])
def test_bits_do_not_depend_on_the_layout(D):
    lens = [200, 77, 300]
    packed = draw_varlen(lens, lens, D=D, dtype=torch.bfloat16, causal=True)
    out, lse = hopper_run(packed)
    offset = 0
    for n in lens:
        rows = slice(offset, offset + n)
        q, k, v = (packed.tensors[x][rows].transpose(0, 1)[None] for x in ("q", "k", "v"))
        mine, mine_lse = hopper_run(Case({"q": q, "k": k, "v": v}, {"causal": True}))
        assert same_bits(mine[0].transpose(0, 1), out[rows])
        assert same_bits(mine_lse[0].transpose(0, 1), lse[rows])
        offset += n


@by_build
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (150, 0)},
        {"window": (900, 0)},
        {"causal": True, "softcap": 50.0},
    ],
    ids=["causal", "window", "wider window", "softcap"],
)
def test_bits_do_not_depend_on_the_other_queries(D, dtype, options):
    case = draw(3000, 3000, D=D, dtype=dtype, **options)
    whole = hopper_run(case)
    for first, n in ((0, 100), (900, 16), (1777, 300), (2984, 16)):
        keys = slice(0, first + n)
        piece = Case(
            {
                "q": case.tensors["q"][:, :, first : first + n],
                "k": case.tensors["k"][:, :, keys],
                "v": case.tensors["v"][:, :, keys],
            },
            options,
        )
        for mine, together in zip(hopper_run(piece), whole, strict=True):
            assert same_bits(mine, together[:, :, first : first + n])
