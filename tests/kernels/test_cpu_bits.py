"""A row's bits depend on its own sequence alone, and so do those of its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from problems import (
    DTYPES,
    Case,
    Result,
    assert_same_bits,
    draw,
    draw_douts,
    draw_varlen,
    paginate,
    run,
    same_bits,
)

import lockstep

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
OPTIONS = [{}, {"causal": True}, {"window": (70, 3), "softcap": 5.0}]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal", "window"])
PER_SEQUENCE = ("q", "k", "v", "kv_lens")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def rows(case: Case, b: slice) -> Case:
    """Some sequences of a dense batch."""
    return case.replaced(**{n: t[b] for n, t in case.tensors.items() if n in PER_SEQUENCE})


def rows_of(result: Result, b: slice) -> Result:
    grads = {n: g[b] for n, g in result.grads.items() if n in PER_SEQUENCE}
    return Result(result.out[b], result.lse[b], grads)


def joined(parts: list[Result]) -> Result:
    """Chunks of queries put together again."""
    whole = {n: torch.cat([part.items()[n] for part in parts], 2) for n in ("out", "lse")}
    dq = [part.grads["q"] for part in parts if part.grads]
    return Result(**whole, grads={"q": torch.cat(dq, 2)} if dq else {})


def test_the_check_sees_a_single_bit():
    x = torch.rand(1000)
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.nextafter(x, torch.tensor(2.0)))
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


def test_the_check_sees_another_order_of_summation():
    terms = torch.randn(512, 64).unbind()
    forwards, backwards = sum(terms), sum(terms[::-1])
    torch.testing.assert_close(forwards, backwards, rtol=1e-3, atol=1e-3)
    assert not same_bits(forwards, backwards)


def assert_same_bits_on_threads(case, numbers):
    """Results and gradients on so many threads are those on one."""
    douts = draw_douts(case)
    torch.set_num_threads(1)
    expected = run(case, douts=douts)
    for threads in numbers:
        torch.set_num_threads(threads)
        assert_same_bits(run(case, douts=douts), expected)


@by_dtype
@by_options
@pytest.mark.parametrize("Sq", [1, 5, 200])
def test_twice_and_on_any_number_of_threads(Sq, options, dtype):
    case = draw(Sq, 700, B=2, Hq=4, dtype=dtype, sinks=torch.randn(4), **options)
    assert_same_bits_on_threads(case, (1, 2, 2, 4))


@by_options
def test_spans_of_one_head_add_to_dq_in_order_on_any_number_of_threads(options):
    case = draw(900, 1300, B=1, Hq=1, Hkv=1, **options)
    assert_same_bits_on_threads(case, (2, 3, 9, 9))


@by_dtype
@by_options
@pytest.mark.parametrize("Skv", [64, 200, 256])
def test_parts_of_one_span_add_to_dq_in_order_on_any_number_of_threads(Skv, options, dtype):
    case = draw(300, Skv, B=1, Hq=4, Hkv=2, dtype=dtype, **options)
    assert_same_bits_on_threads(case, (2, 3, 5, 16, 16))


def test_calls_of_a_kind_share_a_plan_and_no_results():
    """Other tensors, other threads, and calls of other kinds in between."""
    cases = [draw(130, 600, B=1, Hq=2, Hkv=1), draw(130, 600, B=1, Hq=2, Hkv=1)]
    cases.append(cases[0].replaced(k=cases[1].tensors["k"]))
    inputs = [[case.tensors[name].double() for name in "qkv"] for case in cases]
    expected = [F.scaled_dot_product_attention(*x, enable_gqa=True).float() for x in inputs]
    for threads in (1, 3, 1, 16, 3):
        torch.set_num_threads(threads)
        for case, out in zip(cases, expected, strict=True):
            torch.testing.assert_close(run(case).out, out, atol=1e-5, rtol=1e-5)


@by_dtype
@by_options
@pytest.mark.parametrize("Sq", [1, 3, 40])
def test_neighbours_place_and_size_of_the_batch(Sq, options, dtype):
    kv_lens = torch.tensor([300, 0, 257, 31])
    case = draw(Sq, 300, B=4, Hq=4, dtype=dtype, kv_lens=kv_lens, **options)
    douts = draw_douts(case)
    whole = run(case, douts=douts)
    for b in (slice(0, 1), slice(2, 3), slice(3, 4), slice(1, 4)):
        alone = run(rows(case, b), douts=(douts[0][b], douts[1][b]))
        assert_same_bits(alone, rows_of(whole, b))


@by_dtype
@by_options
@pytest.mark.parametrize("Sq", [2, 40])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, 3e4])
def test_padding(Sq, options, dtype, garbage):
    bare = draw(Sq, 270, D=33, dtype=dtype, **options)
    douts = draw_douts(bare)
    expected = run(bare, douts=douts)
    for extra in (1, 50, 400):
        pad = {n: F.pad(bare.tensors[n], (0, 0, 0, extra), value=garbage) for n in ("k", "v")}
        result = run(bare.replaced(**pad, kv_lens=torch.tensor([270])), douts=douts)
        for name in ("k", "v"):
            beyond = result.grads[name][:, :, 270:]
            assert beyond.eq(0).all(), f"d{name} of padding"
            result.grads[name] = result.grads[name][:, :, :270]
        assert_same_bits(result, expected)


@pytest.mark.slow
@by_dtype
@pytest.mark.parametrize("options", [{}, {"window": (70, 0)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(("Hq", "Hkv"), [(2, 2), (8, 2)])
@pytest.mark.parametrize("size", [1, 8, 9, 33])
def test_chunks_of_queries(size, Hq, Hkv, options, dtype):
    """One row at a time and eight heads in a group lie on either side of narrow and wide."""
    Sq, Skv = 40, 300
    case = draw(Sq, Skv, Hq=Hq, Hkv=Hkv, D=33, dtype=dtype, causal=True, **options)
    douts = draw_douts(case)
    whole = run(case, douts=douts)
    cut, hidden = [], []
    for first in range(0, Sq, size):
        chunk = slice(first, min(first + size, Sq))
        seen = Skv - Sq + chunk.stop
        part = case.replaced(q=case.tensors["q"][:, :, chunk])
        shorter = part.replaced(**{n: case.tensors[n][:, :, :seen] for n in ("k", "v")})
        part_seeds = douts[0][:, :, chunk], douts[1][:, :, chunk]
        cut.append(run(shorter, douts=part_seeds))
        hidden.append(run(part.replaced(kv_lens=torch.tensor([seen])), douts=part_seeds))
    expected = Result(whole.out, whole.lse, {"q": whole.grads["q"]})
    assert_same_bits(joined(cut), expected)
    assert_same_bits(joined(hidden), expected)


@by_dtype
@pytest.mark.parametrize("D", [20, 64, 100, 136])
@pytest.mark.parametrize("group", range(1, 9))
def test_groups_of_heads_are_as_in_prefill(group, D, dtype):
    """A row for each head of a group, alone and among those of 20 queries; keys, of more than one
    span, end anywhere in a vector."""
    Skv = 560 + group
    case = draw(20, Skv, Hq=group, Hkv=1, D=D, Dv=D + 4, dtype=dtype, causal=True)
    whole = run(case)
    alone = run(case.replaced(q=case.tensors["q"][:, :, -1:]))
    assert_same_bits(alone, Result(whole.out[:, :, -1:], whole.lse[:, :, -1:], {}))


@by_dtype
@by_options
def test_varlen_is_dense(options, dtype):
    lens = [1, 63, 5, 300], [300, 63, 40, 270]
    case = draw_varlen(*lens, dtype=dtype, **options)
    douts = draw_douts(case)
    packed = run(case, douts=douts)
    starts = case.tensors["cu_seqlens_q"].tolist(), case.tensors["cu_seqlens_k"].tolist()
    for b in range(4):
        q_tokens, k_tokens = (slice(start[b], start[b + 1]) for start in starts)
        own = {"q": q_tokens, "k": k_tokens, "v": k_tokens}

        def dense(x, tokens):
            return x[tokens].transpose(0, 1)[None]

        tensors = {n: dense(case.tensors[n], tokens) for n, tokens in own.items()}
        result = run(Case(tensors, options), douts=tuple(dense(s, q_tokens) for s in douts))
        grads = {n: dense(packed.grads[n], tokens) for n, tokens in own.items()}
        expected = Result(dense(packed.out, q_tokens), dense(packed.lse, q_tokens), grads)
        assert_same_bits(result, expected)


@by_dtype
@pytest.mark.parametrize("Sq", [1, 40])
@pytest.mark.parametrize("page_size", [1, 3, 16, 256, 500])
def test_paged_is_contiguous(page_size, Sq, dtype):
    kv_lens = torch.tensor([300, 0, 257])
    case = draw(Sq, 300, B=3, Hq=4, dtype=dtype, causal=True, kv_lens=kv_lens)
    paged = paginate(case, page_size, garbage=math.nan)
    assert_same_bits(run(paged), run(case))
    # Entries of the table behind a sequence's last page are never followed.
    table = paged.tensors["page_table"].clone()
    for b, length in enumerate(kv_lens.tolist()):
        table[b, -(-length // page_size) :] = -1
    assert_same_bits(run(paged.replaced(page_table=table)), run(case))


@by_dtype
@pytest.mark.parametrize("Sq", [2, 40])
def test_strides_do_not_matter(Sq, dtype):
    q = torch.randn(2, Sq, 4, 64).to(dtype).transpose(1, 2)
    k = torch.randn(2, 1, 64, 300).to(dtype).mT.expand(2, 2, 300, 64)
    v = torch.randn(2, 2, 600, 96).to(dtype)[:, :, ::2, 5:69]
    case = Case({"q": q, "k": k, "v": v})
    plain = Case({name: tensor.contiguous() for name, tensor in case.tensors.items()})
    douts = draw_douts(case)
    assert_same_bits(run(case, douts=douts), run(plain, douts=douts))


@pytest.mark.parametrize("Sq", [1, 40])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["bare", "sinks"])
def test_merged_parts_are_near_the_whole(Sq, sinks):
    """Bits differ: a part that is finished has been divided by its sum, and rounded."""
    case = draw(Sq, 700)
    parts = [
        run(case.replaced(**{n: case.tensors[n][:, :, i : i + 256] for n in ("k", "v")}))
        for i in range(0, 700, 256)
    ]
    pairs = [(part.out, part.lse) for part in parts]
    if sinks is not None:
        out, lse = pairs[0]
        pairs.append((torch.zeros_like(out), sinks[None, :, None].expand_as(lse)))
        case = case.replaced(sinks=sinks)
    merged, whole = lockstep.merge(pairs), run(case)
    torch.testing.assert_close(merged, (whole.out, whole.lse), rtol=1e-6, atol=1e-6)
    assert_same_bits(Result(*lockstep.merge(pairs)), Result(*merged))


@pytest.mark.parametrize("Sq", [1, 40])
def test_a_part_merged_with_nothing_keeps_its_bits(Sq):
    part = run(draw(Sq, 700))
    nothing = torch.full_like(part.out, math.nan), torch.full_like(part.lse, -math.inf)
    pairs = [nothing, (part.out, part.lse), nothing]
    assert_same_bits(Result(*lockstep.merge(pairs)), part)
