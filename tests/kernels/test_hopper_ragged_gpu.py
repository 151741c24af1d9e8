"""Ragged queries in pages on Hopper, on a GPU: long sequences are the forward's, all others the
decode kernel's, in one call."""

from __future__ import annotations

import pytest
import torch
from problems import Result, assert_allowed, assert_same_bits, ragged
from test_hopper_decode_gpu import BF16, F16, INF, NAN, attend, paged
from test_hopper_decode_gpu import pytestmark as needs_hopper

from lockstep.kernels.hopper.forward.page_rule import least_queries_in_pages
from lockstep.problem import Options, Tensors, describe

pytestmark = needs_hopper

Q_LENS = [300, 1, 128, 0, 32, 5, 129, 33]
KV_LENS = [1000, 900, 128, 70, 700, 0, 300, 800]
KINDS = {
    "D 64": {"D": 64},
    "fp16": {"dtype": F16},
    "pages of 64": {"page": 64},
    "D 80": {"D": 80, "page": 48},
    "D 192 and 128": {"D": 192, "Dv": 128},
    "D 256": {"D": 256},
    "window": {"options": {"window": (100, 0)}},
    "narrow window, sinks": {
        "D": 64,
        "Hq": 64,
        "options": {"window": (127, 0), "sinks": torch.randn(64)},
    },
    "groups of 5": {"Hq": 40},
    "groups of 16": {"Hkv": 2, "D": 64},
    "wide window": {"options": {"window": (500, 0)}},
    "softcap, sinks": {"options": {"softcap": 20.0, "sinks": torch.randn(32)}},
    "no heads in groups": {"Hkv": 32},
}


def serve(q_lens=Q_LENS, kv_lens=KV_LENS, **sizes):
    """A case whose sequences have these queries and keys."""
    sizes = {"Hq": 32, "Hkv": 8, "Skv": 1000} | sizes
    alike = paged(Sq=max(q_lens), B=len(q_lens), kv_lens=kv_lens, **sizes)
    return ragged(alike, q_lens)


def some(result: Result, rows: slice) -> Result:
    return Result(result.out[rows], result.lse[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_has_the_bits_it_has_alone(kind):
    case = serve(**KINDS[kind])
    together = attend(case)
    assert_allowed(case, together.items(), kernel="hopper_decode")
    starts = case.tensors["cu_seqlens_q"].tolist()
    for b, n in enumerate(Q_LENS):
        if n == 0:
            continue
        rows = slice(starts[b], starts[b] + n)
        own = {name: case.tensors[name][b : b + 1] for name in ("kv_lens", "page_table")}
        offsets = torch.tensor([0, n])
        alone = attend(case.replaced(q=case.tensors["q"][rows], cu_seqlens_q=offsets, **own))
        assert_same_bits(alone, some(together, rows))


@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith(("narrow", "window"))])
def test_behind_a_narrow_window_a_row_has_the_bits_of_equally_many_queries(kind):
    for n in (1, 3):
        case = serve([n] * 6, [1000, 17, 500, 1, 130, 129], **KINDS[kind])
        together = attend(case)
        assert_allowed(case, together.items(), kernel="hopper_decode")
        q = case.tensors["q"].unflatten(0, (6, n)).transpose(1, 2)
        alike = attend(case.replaced(q=q, cu_seqlens_q=None), "hopper")
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (alike.out, alike.lse))
        assert_same_bits(Result(*packed), together)


# Queries of each sequence, and a bound of them.
FEW_QUERIES = {
    "one": ([1] * 5, 1),
    "one of many": ([1] * 70, 1),
    "two": ([2] * 5, 2),
    "five": ([5] * 5, 5),
    "mixed": ([1, 5, 0, 3, 2, 1, 4], 5),
    "one, of 64": ([1] * 5, 64),
    "mixed, of 64": ([33, 1, 0, 64, 5], 64),
}
FEW_OF_KIND = [
    *((kind, queries) for kind in KINDS for queries in ("one", "mixed")),
    *(("fp16", queries) for queries in FEW_QUERIES if queries not in ("one", "mixed")),
]


@pytest.mark.parametrize(("kind", "queries"), FEW_OF_KIND)
def test_a_bound_of_queries_changes_no_bit(kind, queries):
    q_lens, bound = FEW_QUERIES[queries]
    kv_lens = [max(q_lens[b], 1000 - 137 * b % 900) for b in range(len(q_lens))]
    case = serve(q_lens, kv_lens, **KINDS[kind])
    expected = attend(case)
    case = case.replaced(max_seqlen_q=bound)
    assert_same_bits(attend(case), expected)
    # More queries of others are there, and belong to no sequence.
    rows = slice(0, sum(q_lens))
    q = torch.cat([case.tensors["q"], case.tensors["q"][:3]])
    found = attend(case.replaced(q=q))
    assert_same_bits(some(found, rows), expected)
    assert found.out[rows.stop :].isnan().all()
    assert found.lse[rows.stop :].isnan().all()


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (8, 8)])
def test_sequences_with_more_queries_than_any_may_have_harm_none_but_themselves(heads, bound):
    q_lens = [1, 200, 1, 9, 1, bound, 5, 1]
    kv_lens = [1000, 900, 800, 700, 16, 500, 0, 3]
    case = serve(q_lens, kv_lens, Hq=heads[0], Hkv=heads[1])
    right, found = attend(case), attend(case.replaced(max_seqlen_q=bound))
    starts = case.tensors["cu_seqlens_q"].tolist()
    for b, n in enumerate(q_lens):
        rows = slice(starts[b], starts[b] + n)
        if n > bound:
            assert found.out[rows].isnan().all()
            assert found.lse[rows].isnan().all()
        else:
            assert_same_bits(some(found, rows), some(right, rows))


@pytest.mark.parametrize(("Hq", "least"), [(8, 97), (16, 33), (32, 33), (40, 33)])
def test_heads_decide_how_many_queries_are_long(Hq, least):
    """Both kernels' results of about as many queries are within the rule, and each is one's."""
    q_lens = [least, least - 1, 3]
    case = serve(q_lens, [1000, 1000, 17], Hq=Hq, Hkv=Hq // 4)
    tensors = Tensors(**{name: x.to("meta") for name, x in case.tensors.items()})
    assert least_queries_in_pages(describe(tensors, Options(causal=True))) == least
    together = attend(case)
    assert_allowed(case, together.items(), kernel="hopper_decode")
    q = case.tensors["q"][:least].transpose(0, 1)[None]
    own = {name: case.tensors[name][:1] for name in ("kv_lens", "page_table")}
    alone = attend(case.replaced(q=q, cu_seqlens_q=None, **own), "hopper")
    packed = Result(together.out[:least].transpose(0, 1)[None], together.lse[:least].T[None])
    assert_same_bits(alone, packed)


@pytest.mark.parametrize("spoiled", ["offsets", "length", "page", "behind"])
def test_what_is_wrong_harms_its_own_sequence_alone(spoiled):
    q_lens, kv_lens = [200, 2, 150, 3], [900, 800, 700, 600]
    case = serve(q_lens, kv_lens)
    right = attend(case)
    offsets, lens = case.tensors["cu_seqlens_q"].clone(), case.tensors["kv_lens"].clone()
    table = case.tensors["page_table"].clone()
    harmed = slice(202, 352)
    if spoiled == "offsets":
        offsets[3] = -7  # sequence 2 ends where it begins, and its rows are the next one's
        harmed = slice(202, 355)
    elif spoiled == "length":
        lens[2] = 5000
    elif spoiled == "page":
        table[2, 3] = 1 << 20
    else:
        offsets[3:] = 202  # so many rows belong to no sequence
        harmed = slice(202, 355)
    wrong = attend(case.replaced(cu_seqlens_q=offsets, kv_lens=lens, page_table=table))
    before, behind = slice(0, harmed.start), slice(harmed.stop, None)
    for rows in (before, behind):
        assert_same_bits(some(wrong, rows), some(right, rows))
    assert wrong.out[harmed].isnan().all()


def test_values_that_are_not_finite_stay_with_the_rows_that_see_them():
    case = serve([300, 4], [1000, 999])
    v, table = case.tensors["v"], case.tensors["page_table"]
    for key, d, value in ((998, 3, NAN), (990, 5, INF), (900, 7, -INF), (3, 9, INF)):
        v[table[:, key // 16].long(), key % 16, :, d] = value
    out, expected = attend(case).out, attend(case, "triton").out
    assert expected.isnan().any()
    for is_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_kind(out), is_kind(expected))


def test_there_may_be_many_sequences_and_none_or_all_of_them_long():
    for q_lens in ([1] * 300, [128] * 40, [1] * 150 + [400] + [2] * 149):
        kv_lens = [200 + 7 * b % 700 for b in range(len(q_lens))]
        kv_lens = [max(n, q) for n, q in zip(kv_lens, q_lens, strict=True)]
        case = serve(q_lens, kv_lens, D=64, dtype=BF16)
        assert_allowed(case, attend(case).items(), kernel="hopper_decode")
