"""The Triton forward against the oracle: every option, layout and dtype.

On small tiles, so that the interpreter can do it; on a GPU also on the real ones.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import repeatable_draws  # noqa: F401
import torch
from hypothesis import HealthCheck, given, settings
from problems import (
    DTYPES,
    Case,
    assert_same_bits,
    draw,
    draw_varlen,
    paginate,
    ragged,
    run,
    same_bits,
    strided_biases,
)

pytest.importorskip("triton")
from triton_device import (
    GPU,
    attend,
    check,
    needs_triton,
    use_multiprocessors,
    use_small_tiles,
)

from lockstep import reference

pytestmark = needs_triton
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (17, 5)},
    "window to the left": {"window": (30, None)},
    "causal window": {"window": (40, 0), "causal": True},
    "softcap": {"softcap": 5.0},
    "negative scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, -math.inf])},
}
# What a drawn problem is compiled for: D, dtype, query heads to a key head, and which options it
# has. Lengths and values are drawn: each line takes few builds.
DRAWN = {
    "causal": (128, torch.bfloat16, 5, ("causal",)),
    "causal, lengths, sinks": (64, torch.float16, 1, ("causal", "kv_lens", "sinks")),
    "window, softcap": (96, torch.bfloat16, 2, ("window", "softcap")),
    "window to the left, lengths": (40, torch.float32, 4, ("left", "kv_lens")),
    "plain": (16, torch.float16, 3, ()),
}


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


small = pytest.mark.usefixtures("small_tiles")


@small
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    check(draw(9, 70, Hq=4, D=16, **OPTIONS[name]))


@small
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    check(draw(9, 70, Hq=4, D=16, dtype=dtype, causal=True, softcap=20.0))


@small
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (33, 40), (40, 16), (80, 24)])
def test_head_dims(D, Dv):
    check(draw(5, 40, D=D, Dv=Dv))


@small
@pytest.mark.parametrize(("Sq", "Skv"), [(1, 1), (1, 33), (17, 1), (40, 63), (63, 17)])
def test_lengths(Sq, Skv):
    check(draw(Sq, Skv, D=16, causal=True))


@small
@pytest.mark.parametrize(("Hq", "Hkv"), [(6, 2), (5, 1)])
def test_grouped_heads(Hq, Hkv):
    check(draw(7, 50, B=2, Hq=Hq, Hkv=Hkv, D=16, causal=True, sinks=torch.randn(Hq)))


@small
@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (1, 1, 1, 50), (1, 4, 7, 50), (7, 1)], ids=str)
def test_bias_broadcasts(shape):
    check(draw(7, 50, B=2, Hq=4, D=16, bias=torch.randn(shape), softcap=10.0))


@small
@pytest.mark.parametrize("name", strided_biases(1, 1, 1, 1))
def test_strides_of_a_bias_change_no_bit(name):
    bias = strided_biases(2, 2, 7, 50)[name]
    case = draw(7, 50, B=2, D=16, bias=bias)
    assert_same_bits(attend(case), attend(case.replaced(bias=bias.contiguous())))


@small
def test_bias_that_hides_keys():
    bias = torch.randn(7, 50)
    bias[torch.rand(7, 50) < 0.3] = -math.inf
    bias[4] = -math.inf
    check(draw(7, 50, D=16, dtype=torch.float16, bias=bias))


@small
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_kv_lens(integer):
    check(draw(3, 50, B=4, D=16, kv_lens=torch.tensor([0, 1, 32, 50], dtype=integer), causal=True))


@small
@pytest.mark.parametrize(
    ("Hkv", "options"), [(2, {}), (4, {"window": (9, 3), "softcap": 8.0})], ids=str
)
def test_varlen(Hkv, options):
    case = draw_varlen([1, 0, 23, 5, 9], [40, 7, 23, 0, 50], Hkv=Hkv, D=16, **options)
    check(case.replaced(sinks=torch.randn(4)))


@small
@pytest.mark.parametrize("page_size", [1, 5, 16, 48])
def test_paged(page_size):
    dense = draw(3, 50, B=3, Hq=4, D=16, causal=True, kv_lens=torch.tensor([50, 0, 33]))
    paged = paginate(dense, page_size, garbage=math.nan)
    assert same_bits(attend(paged).out, attend(dense).out)
    check(paginate(dense, page_size))


@small
@pytest.mark.parametrize(("page_size", "Hkv", "multiprocessors"), [(5, 1, 1000), (16, 2, 1)])
def test_ragged_pages(page_size, Hkv, multiprocessors, monkeypatch):
    use_multiprocessors(monkeypatch, multiprocessors)
    lens = torch.tensor([80, 0, 33, 7])
    dense = draw(9, 80, B=4, Hq=2, Hkv=Hkv, D=16, causal=True, kv_lens=lens)
    paged, q_lens = paginate(dense, page_size), [1, 5, 9, 7]
    case = ragged(paged, q_lens)
    check(case)
    together, row = attend(case), 0
    for b, n in enumerate(q_lens):
        own = {x: paged.tensors[x][b : b + 1] for x in ("page_table", "kv_lens")}
        alone = attend(paged.replaced(q=paged.tensors["q"][b : b + 1, :, 9 - n :], **own))
        assert same_bits(together.out[row : row + n].transpose(0, 1)[None], alone.out)
        assert same_bits(together.lse[row : row + n].T[None], alone.lse)
        row += n


@small
def test_strided_inputs():
    q = torch.randn(2, 7, 4, 16).transpose(1, 2)
    k = torch.randn(2, 1, 16, 40).mT.expand(2, 2, 40, 16)
    v = torch.randn(2, 2, 80, 24)[:, :, ::2, 5:21]
    check(Case({"q": q, "k": k, "v": v}))


@small
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_results_lie_as_the_queries_do(multiprocessors, monkeypatch):
    use_multiprocessors(monkeypatch, multiprocessors)
    case = draw(3, 100, B=2, Hq=4, Hkv=2, D=16, causal=True, query_invariant=True)
    q = case.tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)
    got = attend(case.replaced(q=q))
    assert_same_bits(got, attend(case))
    assert got.out.transpose(1, 2).is_contiguous()
    assert got.lse.transpose(1, 2).is_contiguous()


@small
@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_nothing_to_attend(B, Sq, Skv):
    result = attend(draw(Sq, Skv, B=B, D=16))
    assert result.out.shape == (B, 2, Sq, 16)
    assert result.out.eq(0).all()
    assert result.lse.eq(-math.inf).all()


@small
def test_rows_that_see_nothing():
    result = attend(draw(20, 4, D=16, causal=True))
    assert result.out[:, :, :16].eq(0).all()
    assert result.lse[:, :, :16].eq(-math.inf).all()
    assert result.lse[:, :, 16:].isfinite().all()


@small
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hidden_by", ["causal", "window", "bias", "kv_lens"])
def test_garbage_reaches_only_rows_that_see_it(hidden_by, garbage):
    case = draw(20, 50, D=16)
    if hidden_by == "bias":
        bias = torch.zeros(20, 50)
        bias[:10, 41] = -math.inf
        case = case.replaced(bias=bias)
    elif hidden_by == "kv_lens":
        case = case.replaced(kv_lens=torch.tensor([41]), causal=True)
    else:
        case = case.replaced(
            **{"causal": {"causal": True}, "window": {"window": (9, 0)}}[hidden_by]
        )
    clean = attend(case)
    dirty = {name: case.tensors[name].clone() for name in ("k", "v")}
    for tensor in dirty.values():
        tensor[:, 0, 41] = garbage
    result, exact = attend(case.replaced(v=dirty["v"])), run(case.replaced(v=dirty["v"]), reference)
    assert torch.equal(result.out.isnan(), exact.out.isnan())
    assert torch.equal(result.out.isinf(), exact.out.isinf())
    untouched = exact.out.isfinite()
    assert torch.equal(result.out[untouched], clean.out[untouched])
    result = attend(case.replaced(k=dirty["k"]))
    rows = run(case.replaced(k=dirty["k"]), reference).lse.isfinite() & exact.out.isfinite().all(-1)
    assert torch.equal(result.out[rows], clean.out[rows])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
class TestOnAGpu:
    """The real tiles."""

    @pytest.mark.parametrize(
        ("D", "Dv"),
        [
            *[(16, 16), (32, 32), (72, 80), (80, 128), (192, 128), (256, 256), (512, 512)],
            *[(1, 1), (17, 63), (33, 1), (64, 17), (128, 1), (128, 17), (128, 32), (512, 111)],
        ],
    )
    def test_head_dims(self, D, Dv):
        check(draw(111, 600, D=D, Dv=Dv, dtype=torch.bfloat16, causal=True))

    @pytest.mark.parametrize("D", [1, 40, 64, 128, 256, 512])
    def test_head_dims_in_float32(self, D):
        check(draw(111, 300, D=D, causal=True))

    # One dtype and head dim for each: every build takes seconds.
    @pytest.mark.parametrize("Sq", [1, 63, 300])
    @pytest.mark.parametrize(
        ("name", "D", "dtype"),
        [
            (name, (64, 128)[i % 2], DTYPES[i % 3])
            for i, name in enumerate([*OPTIONS, *list(OPTIONS)[1:]])
        ],
    )
    def test_options(self, name, D, dtype, Sq):
        check(draw(Sq, 1100, Hq=4, Hkv=2, D=D, dtype=dtype, **OPTIONS[name]))

    @by_dtype
    @pytest.mark.parametrize("Sq", [2, 111])
    def test_bias(self, Sq, dtype):
        bias = torch.randn(2, 1, Sq, 700)
        bias[torch.rand(bias.shape) < 0.3] = -math.inf
        check(draw(Sq, 700, B=2, Hq=4, dtype=dtype, bias=bias))

    @pytest.mark.parametrize(
        ("page_size", "dtype"),
        [(1, torch.bfloat16), (16, torch.float32), (64, torch.float16), (256, torch.bfloat16)],
    )
    @pytest.mark.parametrize("Sq", [1, 70])
    def test_paged(self, Sq, page_size, dtype):
        dense = draw(Sq, 600, B=3, Hq=8, Hkv=2, D=128, dtype=dtype, causal=True)
        dense = dense.replaced(kv_lens=torch.tensor([600, 0, 277]))
        paged = paginate(dense, page_size, garbage=math.nan)
        assert same_bits(attend(paged).out, attend(dense).out)
        check(paginate(dense, page_size))

    @pytest.mark.parametrize(
        ("options", "dtype"),
        [
            ({}, torch.float32),
            ({"causal": True}, torch.bfloat16),
            ({"window": (90, 3)}, torch.float16),
        ],
        ids=str,
    )
    def test_varlen(self, options, dtype):
        lens = [1, 0, 263, 5, 700], [1300, 7, 263, 0, 911]
        check(draw_varlen(*lens, dtype=dtype, sinks=torch.randn(4), **options))

    @pytest.mark.parametrize("kind", DRAWN)
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(data=st.data())
    def test_drawn_problems(self, kind, data):
        torch.manual_seed(data.draw(st.integers(0, 2**16)))
        sizes = {n: data.draw(st.integers(*r)) for n, r in {"B": (1, 3), "Hkv": (1, 2)}.items()}
        Sq, Skv = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 1500))
        D, dtype, group, names = DRAWN[kind]
        Hq = sizes["Hkv"] * group
        reach = st.sampled_from([0, 17, 600])
        options = {
            "causal": lambda: True,
            "left": lambda: (data.draw(reach), None),
            "window": lambda: (data.draw(reach), data.draw(reach)),
            "softcap": lambda: data.draw(st.sampled_from([0.5, 50.0])),
            "sinks": lambda: torch.randn(Hq),
            "kv_lens": lambda: torch.randint(0, Skv + 1, (sizes["B"],)),
        }
        more = {name: options[name]() for name in names}
        if "left" in more:
            more["window"] = more.pop("left")
        check(draw(Sq, Skv, **sizes, Hq=Hq, D=D, dtype=dtype, **more))
