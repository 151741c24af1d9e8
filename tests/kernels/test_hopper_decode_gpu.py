"""Decode on Hopper, on a GPU: the error rule, bits, garbage, wrong pages and lengths."""

from __future__ import annotations

import pytest
import torch
from problems import (
    Case,
    Result,
    assert_allowed,
    assert_same_bits,
    draw,
    paginate,
    ragged,
    run,
)

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

BF16, F16 = torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")
# Heads and tokens of q, k and v of one query.
SIZES = ((8, 1), (2, 4200), (2, 4200))


def attend(case: Case, kernel: str = "hopper_decode") -> Result:
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    result = run(Case(tensors, case.options), kernel=kernel)
    return Result(result.out.cpu(), result.lse.cpu())


def paged(Sq=1, Skv=1000, page=16, kv_lens=None, garbage=NAN, options=(), **sizes) -> Case:
    sizes = {"B": 3, "Hq": 8, "Hkv": 2, "D": 128, "dtype": BF16} | sizes
    if kv_lens is not None:
        sizes["kv_lens"] = torch.tensor(kv_lens)
    case = draw(Sq, Skv, causal=True, **sizes, **dict(options))
    return paginate(case, page, garbage=garbage)


CASES = {
    "several spans": {"Skv": 5000, "kv_lens": [5000, 1, 3001]},
    "pages of 256": {"D": 256, "Skv": 2000, "page": 256, "kv_lens": [2000, 17, 1023]},
    "pages of 64": {"Skv": 2000, "page": 64, "kv_lens": [2000, 17, 1023]},
    "pages of 48": {"Skv": 600, "page": 48, "kv_lens": [600, 0, 111]},
    "D 64": {"D": 64, "Skv": 3000, "kv_lens": [3000, 2, 63], "dtype": F16},
    "D 256": {"D": 256, "Skv": 1500, "kv_lens": [1500, 900, 1]},
    "D 96": {"D": 96, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 80, 20 rows": {"D": 80, "Sq": 5, "Skv": 3000, "kv_lens": [3000, 2, 63], "dtype": F16},
    "D 112, two tiles": {"D": 112, "Sq": 20, "Skv": 1200, "page": 48, "kv_lens": [1200, 3, 777]},
    "D 40": {"D": 40, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 40, 48 rows": {"D": 40, "Sq": 12, "Skv": 1200, "kv_lens": [1200, 3, 777]},
    "D 8, D 24 of values": {"D": 8, "Dv": 24, "Skv": 700, "kv_lens": [700, 2, 63]},
    "D 72": {"D": 72, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 72, 20 rows": {"D": 72, "Sq": 5, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 160": {"D": 160, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 160, 20 rows": {"D": 160, "Sq": 5, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 168, two tiles": {"D": 168, "Sq": 20, "Skv": 1200, "page": 48, "kv_lens": [1200, 3, 777]},
    "D 192 and 128": {"D": 192, "Dv": 128, "Skv": 3000, "page": 256, "kv_lens": [3000, 2, 63]},
    "D 192 and 128, 20 rows": {"D": 192, "Dv": 128, "Sq": 5, "Skv": 1200, "kv_lens": [1200, 3, 7]},
    "D 224": {"D": 224, "Skv": 3000, "kv_lens": [3000, 2, 63]},
    "D 224, 20 rows": {"D": 224, "Sq": 5, "Skv": 1200, "kv_lens": [1200, 3, 777]},
    "D 64 and 200": {"D": 64, "Dv": 200, "Sq": 5, "Skv": 1200, "kv_lens": [1200, 3, 777]},
    "several queries": {"Sq": 5, "Skv": 1200, "kv_lens": [1200, 3, 777]},
    "16 rows": {"Sq": 4, "Skv": 1200, "kv_lens": [1200, 3, 777], "D": 64},
    "16 rows, D 256": {"Sq": 4, "Skv": 1200, "kv_lens": [1200, 3, 777], "D": 256, "dtype": F16},
    "32 rows": {"Sq": 8, "Skv": 1200, "kv_lens": [1200, 3, 777], "dtype": F16},
    "40 rows": {"Sq": 10, "Skv": 1200, "kv_lens": [1200, 3, 777]},
    "40 rows, D 256": {"Sq": 10, "Skv": 1200, "kv_lens": [1200, 3, 777], "D": 256},
    "two tiles of rows": {"Sq": 20, "Skv": 1200, "kv_lens": [1200, 3, 777]},
    "window": {"Sq": 3, "Skv": 2500, "kv_lens": [2500, 3, 777], "options": {"window": (600, 0)}},
    "softcap": {"Skv": 700, "kv_lens": [700, 3, 77], "options": {"softcap": 20.0}},
    "a negative scale": {"Skv": 700, "kv_lens": [700, 3, 77], "options": {"scale": -0.1}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_rule(name):
    case = paged(**CASES[name])
    assert_allowed(case, attend(case).items(), kernel="hopper_decode")


@pytest.mark.parametrize(
    ("D", "Sq"),
    [
        (64, 1),
        (128, 1),
        (128, 5),
        (128, 9),
        (256, 1),
        (256, 5),
        (96, 1),
        (72, 5),
        (160, 1),
        (160, 5),
    ],
)
def test_a_sequence_has_its_bits_alone_and_among_others(D, Sq):
    """Folded by one program in a large batch, and by the second kernel alone."""
    lens = [3000, 1, 40, 700, 16, 2048, 511, 513, 90] * 16
    assert_same_bits_alone(paged(Sq=Sq, B=len(lens), Skv=3000, kv_lens=lens, D=D), (0, 3, 5, 7, -1))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_sequence_has_its_bits_alone_and_among_others_as_long(D):
    """Heads that are alike are not cut, unless some program would have much more than others."""
    assert_same_bits_alone(paged(B=64, Skv=3000, kv_lens=[3000] * 64, D=D), (0, 40))


def assert_same_bits_alone(case, sequences):
    together = attend(case)
    for b in (x % len(together.out) for x in sequences):
        one = {name: case.tensors[name][b : b + 1] for name in ("q", "kv_lens", "page_table")}
        alone = attend(Case({**case.tensors, **one}, case.options))
        assert_same_bits(alone, Result(together.out[b : b + 1], together.lse[b : b + 1]))


@pytest.mark.parametrize(
    ("D", "dtype", "options"), [(128, BF16, {}), (96, BF16, {}), (64, F16, {"softcap": 20.0})]
)
def test_keys_in_one_tensor(D, dtype, options):
    case = draw(1, 4200, B=3, Hq=8, Hkv=2, D=D, dtype=dtype, causal=True, **options)
    found = attend(case)
    assert_allowed(case, found.items(), kernel="hopper_decode")
    one = {name: tensor[1:2] for name, tensor in case.tensors.items()}
    alone = attend(Case(one, case.options))
    assert_same_bits(alone, Result(found.out[1:2], found.lse[1:2]))


def test_gradients_of_one_query():
    """Triton's backward computes them, from the statistics that this kernel stores."""
    q, k, v = (torch.randn(2, h, n, 128, device="cuda", dtype=BF16) for h, n in SIZES)
    found = []
    assert lockstep.explain(q, k, v).kernel == "hopper_decode"
    for kernel in (None, "triton"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = lockstep.attention(*leaves, kernel=kernel)
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("Sq", [1, 5])
def test_results_lie_in_memory_as_the_queries_do(Sq):
    torch.manual_seed(0)
    q = torch.randn(2, 8, Sq, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 256, 16, 2, 64, device="cuda", dtype=torch.bfloat16)  # pages
    table = torch.arange(256, device="cuda", dtype=torch.int32).view(2, 128)
    lens = torch.tensor([2048, 77], device="cuda", dtype=torch.int32)
    tokens_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    (out, lse), expected = (
        lockstep.attention_paged(x, k, v, table, lens, causal=True, return_lse=True)
        for x in (tokens_first, q)
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("window", [None, (300, 0)])
@pytest.mark.parametrize(
    ("D", "Hq"),
    [(64, 8), (96, 4), (96, 8), (128, 4), (128, 8), (160, 2), (160, 8), (256, 4), (256, 8)],
)
def test_values_that_are_not_finite_stay_with_the_rows_that_see_them(D, Hq, window):
    """A KV head has 10 query rows, for which there may be a narrow consumer, or 20."""
    case = paged(Sq=5, Skv=700, page=32, D=D, Hq=Hq, options={"window": window})
    v, table = case.tensors["v"], case.tensors["page_table"]
    for key, d, value in ((698, 3, NAN), (697, 5, INF), (697, 7, -INF), (548, 7, INF), (3, 9, INF)):
        v[table[:, key // 32].long(), key % 32, :, d] = value
    out, expected = attend(case).out, attend(case, "triton").out
    assert expected.isnan().any()
    for is_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_kind(out), is_kind(expected))


@pytest.mark.parametrize(
    ("D", "Sq"), [(128, 1), (96, 1), (96, 5), (40, 1), (72, 5), (160, 1), (160, 5)]
)
def test_wrong_pages_and_lengths_are_nan_and_touch_no_other_sequence(D, Sq):
    case = paged(B=4, Sq=Sq, Skv=700, kv_lens=[700, 700, 700, 300], D=D)
    right = attend(case)
    table, lens = case.tensors["page_table"].clone(), case.tensors["kv_lens"].clone()
    table[0, 11], table[1, 3], lens[2] = -5, case.tensors["k"].shape[0], 1 << 20
    wrong = attend(Case({**case.tensors, "page_table": table, "kv_lens": lens}, case.options))
    assert wrong.out[:3].isnan().all()
    assert wrong.lse[:3].isnan().all()
    assert_same_bits(Result(wrong.out[3:], wrong.lse[3:]), Result(right.out[3:], right.lse[3:]))


def test_what_lies_behind_a_sequence_changes_no_bit():
    """NaN is removed, and other numbers stay and weigh nothing."""
    found = []
    for garbage in (NAN, 9.0):
        torch.manual_seed(0)
        found.append(attend(paged(Sq=2, Skv=700, kv_lens=[700, 3, 77], garbage=garbage)))
    assert_same_bits(*found)


Q_LENS, KV_LENS = [1, 5, 0, 30, 17, 1], [3000, 1700, 70, 90, 0, 64]


@pytest.mark.parametrize(
    ("D", "options"), [(128, {}), (64, {"window": (300, 0)}), (256, {}), (160, {}), (72, {})]
)
def test_packed_queries_have_the_bits_that_each_sequence_has_alone(D, options):
    alike = paged(Sq=max(Q_LENS), Skv=3000, B=6, kv_lens=KV_LENS, D=D, options=options)
    case = ragged(alike, Q_LENS)
    assert_same_bits_unpacked(case, (0, 1, 3, 4, 5))


def test_packed_queries_of_several_tiles_have_as_many_spans_as_alone():
    """Of 160 rows of a KV head: spans are shorter than those of one query, and more."""
    alike = paged(Sq=20, Skv=16384, B=3, Hq=64, Hkv=8, D=64, kv_lens=[16384, 9000, 16000])
    assert_same_bits_unpacked(ragged(alike, [20, 1, 9]), range(3))


def assert_same_bits_unpacked(case, sequences):
    together = attend(case)
    assert_allowed(case, together.items(), kernel="hopper_decode")
    starts = case.tensors["cu_seqlens_q"].tolist()
    for b in sequences:
        rows = slice(starts[b], starts[b + 1])
        q = case.tensors["q"][rows].transpose(0, 1)[None]
        own = {name: case.tensors[name][b : b + 1] for name in ("kv_lens", "page_table")}
        alone = attend(case.replaced(q=q, cu_seqlens_q=None, **own))
        packed = Result(
            together.out[rows].transpose(0, 1)[None], together.lse[rows].transpose(0, 1)[None]
        )
        assert_same_bits(alone, packed)


def test_wrong_offsets_are_nan():
    case = ragged(paged(Sq=8, Skv=300, kv_lens=[300, 20, 100]), [3, 5, 8])
    right = attend(case)
    wrong = attend(case.replaced(cu_seqlens_q=torch.tensor([0, 3, 1, 14])))
    assert_same_bits(Result(wrong.out[:3], wrong.lse[:3]), Result(right.out[:3], right.lse[:3]))
    assert wrong.out[3:].isnan().all()
