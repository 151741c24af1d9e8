"""The kernel `amx`: bfloat16 by matrix units, or with `LOCKSTEP_EMULATE_AMX=1` by the same sums."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Case, Result, assert_exact, assert_same_bits, draw, draw_varlen, paginate, run

import lockstep
from lockstep.kernels.cpu.arithmetic.block import SPAN
from lockstep.kernels.cpu.carry import CarriedForward
from lockstep.kernels.cpu.compiler import matrix
from lockstep.problem import Options, Tensors, describe

REFUSAL = matrix.refusal()
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

BF16 = torch.bfloat16
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (17, 5)},
    "causal window": {"window": (40, 0), "causal": True},
    "softcap": {"softcap": 5.0},
    "negative scale": {"scale": -0.3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, -math.inf])},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    "all": {"causal": True, "window": (90, 0), "softcap": 9.0, "sinks": torch.randn(4)},
}
INFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
by_rows = pytest.mark.parametrize("Sq", [3, 63], ids=["narrow", "wide"])


def check(case: Case, *, gradients: bool = False) -> None:
    """The error rule."""
    assert_exact(case, gradients=gradients, kernel="amx")


def rows(result: Result, part: slice) -> Result:
    return Result(result.out[:, :, part], result.lse[:, :, part])


@pytest.mark.parametrize("D", [1, 8, 33, 64, 72, 80, 128, 160, 256])
def test_head_dims(D):
    check_head_dims(D, D)


@pytest.mark.parametrize(("D", "Dv"), [(33, 80), (128, 1), (1, 64), (64, 256), (15, 17)])
def test_value_dim_of_its_own(D, Dv):
    check_head_dims(D, Dv)


def check_head_dims(D, Dv):
    check(draw(63, 111, B=4, D=D, Dv=Dv, dtype=BF16, causal=True))
    # Enough sequences that a maximum means something where a row is one number.
    check(draw(2, 300, B=16, D=D, Dv=Dv, dtype=BF16))


@pytest.mark.parametrize(
    ("Sq", "Skv"),
    [(1, 1), (1, 63), (63, 1), (1, 1023), (5, 700), (111, 63), (111, 1023), (700, 111)],
)
def test_lengths(Sq, Skv):
    check(draw(Sq, Skv, dtype=BF16))
    check(draw(Sq, Skv, dtype=BF16, causal=True))


@by_rows
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, Sq):
    check(draw(Sq, 300, Hq=4, dtype=BF16, **OPTIONS[name]))


@by_rows
@pytest.mark.parametrize("Hq", [2, 6, 16])
def test_grouped_heads(Hq, Sq):
    check(draw(Sq, 300, B=2, Hq=Hq, Hkv=2, D=40, dtype=BF16, causal=True))


@by_rows
@pytest.mark.parametrize("sigma", ["normal, sigma 3", "normal, sigma 30", "one dominant key"])
def test_large_scores(sigma, Sq):
    check(draw(Sq, 300, numbers=sigma, dtype=BF16))


@by_rows
def test_bias_that_hides_keys(Sq):
    bias = torch.randn(4, Sq, 300)
    bias[torch.rand(4, Sq, 300) < 0.3] = -math.inf
    bias[:, 1] = -math.inf
    check(draw(Sq, 300, Hq=4, dtype=BF16, bias=bias, softcap=10.0))


@by_rows
def test_keys_that_begin_and_end(Sq):
    lens, starts = torch.tensor([0, 1, 256, 300]), torch.tensor([0, 0, 30, 290])
    case = draw(Sq, 300, B=4, dtype=BF16, causal=True, kv_lens=lens)
    check(case)
    check(case.replaced(kv_starts=starts))


def test_packed_sequences():
    case = draw_varlen([1, 0, 63, 5, 30], [300, 7, 63, 0, 111], dtype=BF16, causal=True)
    check(case.replaced(sinks=torch.randn(4)))


@by_rows
@pytest.mark.parametrize("page_size", [1, 16, 300])
def test_pages(page_size, Sq):
    kv_lens = torch.tensor([300, 0, 77])
    case = draw(Sq, 300, B=3, Hq=4, dtype=BF16, causal=True, kv_lens=kv_lens)
    paged = paginate(case, page_size, garbage=math.nan)
    check(paginate(case, page_size))
    assert_same_bits(run(paged, kernel="amx"), run(case, kernel="amx"))


@by_rows
def test_strides_do_not_matter(Sq):
    q = torch.randn(2, Sq, 4, 64).to(BF16).transpose(1, 2)
    k = torch.randn(2, 1, 64, 300).to(BF16).mT.expand(2, 2, 300, 64)
    v = torch.randn(2, 2, 600, 96).to(BF16)[:, :, ::2, 5:69]
    case = Case({"q": q, "k": k, "v": v})
    plain = Case({name: tensor.contiguous() for name, tensor in case.tensors.items()})
    check(case)
    assert_same_bits(run(case, kernel="amx"), run(plain, kernel="amx"))


@pytest.mark.parametrize("options", [{}, {"window": (70, 0)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(("Hq", "D", "Dv"), [(1, 64, 64), (2, 33, 40), (8, 80, 128), (12, 20, 7)])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_chunks_of_queries_have_the_bits_of_the_whole(size, Hq, D, Dv, options):
    """One row at a time, and eight heads in a group, lie on either side of narrow and wide."""
    Sq, Skv = 20, 563
    case = draw(Sq, Skv, Hq=Hq, Hkv=1, D=D, Dv=Dv, dtype=BF16, causal=True, **options)
    whole = run(case, kernel="amx")
    for first in range(0, Sq, size):
        chunk = slice(first, min(first + size, Sq))
        seen = Skv - Sq + chunk.stop
        part = case.replaced(q=case.tensors["q"][:, :, chunk])
        shorter = part.replaced(**{n: case.tensors[n][:, :, :seen] for n in ("k", "v")})
        hidden = part.replaced(kv_lens=torch.tensor([seen]))
        for alone in (shorter, hidden):
            assert_same_bits(run(alone, kernel="amx"), rows(whole, chunk))


@by_rows
def test_neighbours_place_and_size_of_the_batch(Sq):
    kv_lens = torch.tensor([300, 0, 257, 31])
    case = draw(Sq, 300, B=4, Hq=4, dtype=BF16, kv_lens=kv_lens, causal=True)
    whole = run(case, kernel="amx")
    for b in (slice(0, 1), slice(2, 3), slice(3, 4), slice(1, 4)):
        alone = run(case.replaced(**{n: x[b] for n, x in case.tensors.items()}), kernel="amx")
        assert_same_bits(alone, Result(whole.out[b], whole.lse[b]))


@pytest.mark.parametrize("Sq", [1, 63, 200])
def test_twice_and_on_any_number_of_threads(Sq):
    before = torch.get_num_threads()
    case = draw(Sq, 900, B=2, dtype=BF16, causal=True)
    expected = run(case, kernel="amx")
    for threads in (1, 2, 2, 5):
        torch.set_num_threads(threads)
        try:
            assert_same_bits(run(case, kernel="amx"), expected)
        finally:
            torch.set_num_threads(before)


@by_rows
@pytest.mark.parametrize("Dv", [16, 40])
@pytest.mark.parametrize("value", INFINITE)
def test_values_that_are_not_finite_reach_the_rows_that_see_them(value, Dv, Sq):
    """Key by key, some rows see it and others do not."""
    case = draw(Sq, 300, D=40, Dv=Dv, dtype=BF16, causal=True)
    v = case.tensors["v"].clone()
    v[:, 0, 298, 3], v[:, 0, 299, 5], v[:, 1, 10, 0] = (INFINITE[value],) * 3
    v[:, 0, 7, -1], v[:, 0, 299, -1] = math.inf, -math.inf
    assert_pattern_of_oracle(case.replaced(v=v))


@by_rows
@pytest.mark.parametrize("value", INFINITE)
def test_keys_that_are_not_finite_reach_the_rows_that_see_them(value, Sq):
    case = draw(Sq, 300, D=40, dtype=BF16, causal=True)
    k = case.tensors["k"].clone()
    k[:, 0, 298, 3], k[:, 1, 295, 0] = INFINITE[value], INFINITE[value]
    assert_pattern_of_oracle(case.replaced(k=k))


def assert_pattern_of_oracle(case: Case) -> None:
    double = case.replaced(**{name: x.double() for name, x in case.tensors.items()})
    mine, oracle = run(case, kernel="amx"), run(double, kernel="oracle")
    assert not oracle.out.isfinite().all()
    near = {"atol": 0.03, "rtol": 0.03, "equal_nan": True}
    torch.testing.assert_close(mine.out.double(), oracle.out, **near)
    torch.testing.assert_close(mine.lse.double(), oracle.lse, **near)


@by_rows
@pytest.mark.parametrize("garbage", INFINITE)
@pytest.mark.parametrize("where", ["bias", "kv_lens", "causal"])
def test_garbage_that_no_row_sees_changes_no_bit(where, garbage, Sq):
    case = draw(Sq, 300, D=33, Dv=40, dtype=BF16)
    if where == "bias":
        bias, hidden = torch.randn(Sq, 300), slice(7, 8)
        bias[:, hidden] = -math.inf
        case = case.replaced(bias=bias)
    elif where == "kv_lens":
        hidden, case = slice(270, 300), case.replaced(kv_lens=torch.tensor([270]))
    else:
        hidden, case = slice(298, 300), case.replaced(causal=True)
    dirty = {name: case.tensors[name].clone() for name in ("k", "v")}
    for x in dirty.values():
        x[:, :, hidden] = INFINITE[garbage]
    # Of causal rows, those that see none of these keys.
    some = slice(0, Sq - 2 if where == "causal" else Sq)
    clean, mine = run(case, kernel="amx"), run(case.replaced(**dirty), kernel="amx")
    assert_same_bits(rows(mine, some), rows(clean, some))


@by_rows
@pytest.mark.parametrize("size", [1e-39, 1e-36, 1e-31, 1e-29])
def test_tiny_values(size, Sq):
    """Products of them with weights are subnormal, or nearly."""
    case = draw(Sq, 300, dtype=BF16)
    tiny = (case.tensors["v"].float() * size).to(BF16)
    check(case.replaced(v=tiny))
    some = torch.where(torch.rand(1, 2, 300, 1) < 0.5, tiny, case.tensors["v"])
    check(case.replaced(v=some))


@by_rows
@pytest.mark.parametrize("numbers", ["subnormal", "subnormal values", "zeros", "integers"])
def test_edges_of_the_format(numbers, Sq):
    check(draw(Sq, 300, numbers=numbers, dtype=BF16))


@by_rows
@pytest.mark.parametrize("flushed", [False, True])
def test_flushing_of_the_caller_does_not_matter(flushed, Sq):
    case = draw(Sq, 300, numbers="subnormal values", dtype=BF16)
    expected = run(case, kernel="amx")
    torch.set_flush_denormal(flushed)
    try:
        assert_same_bits(run(case, kernel="amx"), expected)
    finally:
        torch.set_flush_denormal(False)


@by_rows
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "sinks"])
def test_gradients_keep_the_rule(name, Sq):
    check(draw(Sq, 130, Hq=4, Hkv=2, D=40, dtype=BF16, **OPTIONS[name]), gradients=True)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_left": 100, "softcap": 3.0}])
@pytest.mark.parametrize(("S", "Hq", "Hkv"), [(700, 4, 1), (555, 2, 2)])
def test_keys_in_blocks_give_the_bits_of_one_call(S, Hq, Hkv, options):
    q, k, v = (torch.randn(2, H, S, 40).to(BF16) for H in (Hq, Hkv, Hkv))
    sinks, own = torch.randn(Hq), slice(S // 3, S // 3 * 2)
    tensors = Tensors(q, k, v, None, sinks)
    arguments = (*Options(**options), "amx")
    expected = torch.ops.lockstep.attention(*tensors[:6], None, None, *arguments)
    problem = describe(tensors, Options(**options))
    forward = CarriedForward(problem, q[:, :, own], sinks, own.start, tiles=True)
    for first in range(0, S, SPAN):
        forward.fold(k[:, :, first : first + SPAN], v[:, :, first : first + SPAN], first)
    for got, whole in zip(forward.close(), expected, strict=True):
        assert torch.equal(got, whole[:, :, own])


def test_it_is_chosen_for_bfloat16():
    q = torch.randn(1, 2, 3, 8)
    assert lockstep.explain(*3 * [q.to(BF16)], query_invariant=True).kernel == "amx"
    for dtype in (torch.float32, torch.float16):
        assert lockstep.explain(*3 * [q.to(dtype)]).kernel == "cpu"
    constant_time = lockstep.explain(*3 * [q.to(BF16)], constant_time=True)
    assert constant_time.kernel == "cpu"
    assert "constant_time" in constant_time.refusals["amx"]
    assert "takes bfloat16" in lockstep.explain(q, q, q).refusals["amx"]


@pytest.mark.parametrize(("Sq", "Skv"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend(Sq, Skv):
    result = run(draw(Sq, Skv, dtype=BF16), kernel="amx")
    assert result.out.shape == (1, 2, Sq, 64)
    assert result.out.eq(0).all()
    assert result.lse.eq(-math.inf).all()
