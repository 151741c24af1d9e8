"""The keys of a tile in several parts on Hopper, on a GPU: few tiles and many keys in pages."""

from __future__ import annotations

import pytest
import torch
from problems import Case, Result, assert_allowed, assert_same_bits
from test_hopper_decode_gpu import F16, INF, NAN, attend
from test_hopper_decode_gpu import pytestmark as needs_hopper
from test_hopper_ragged_gpu import serve, some

from lockstep.kernels.hopper.forward import groups
from lockstep.kernels.hopper.forward.page_rule import least_queries_in_pages
from lockstep.kernels.hopper.forward.scheduling.part_rule import LEAST_KEYS, MOST, WANTED, parts_of
from lockstep.problem import Options, Tensors, describe

pytestmark = needs_hopper

# Of 32/8 heads: four parts, two, eight, one for as many tiles, one for lack of keys, and two
# sequences of decode.
Q_LENS = [128, 200, 40, 520, 100, 3, 1]
KV_LENS = [8500, 4500, 16500, 3000, 2500, 4500, 17]
KINDS = {
    "D 64": {"D": 64},
    "fp16": {"dtype": F16},
    "D 80, pages of 48": {"D": 80, "page": 48},
    "D 192 and 128": {"D": 192, "Dv": 128},
    "D 256": {"D": 256},
    "softcap, sinks": {"options": {"softcap": 20.0, "sinks": torch.randn(32)}},
    "no heads in groups": {"Hkv": 32},
}


def serve_chunks(q_lens=Q_LENS, kv_lens=KV_LENS, **sizes):
    return serve(q_lens, kv_lens, Skv=max(kv_lens), **sizes)


def alone(case, b: int, kernel: str = "hopper_decode") -> Result:
    """The results of sequence b by itself, as it is in the batch or as queries of one length."""
    start, end = case.tensors["cu_seqlens_q"][b : b + 2].tolist()
    own = {name: case.tensors[name][b : b + 1] for name in ("kv_lens", "page_table")}
    q, offsets = case.tensors["q"][start:end], torch.tensor([0, end - start])
    if kernel == "hopper_decode":
        return attend(case.replaced(q=q, cu_seqlens_q=offsets, **own))
    found = attend(case.replaced(q=q.transpose(0, 1)[None], cu_seqlens_q=None, **own), kernel)
    return Result(found.out[0].transpose(0, 1), found.lse[0].T)


def assert_allowed_on_gpu(case, result: Result) -> None:
    """The error rule, by an oracle that a CPU would take half a minute for."""
    there = Case({name: x.cuda() for name, x in case.tensors.items()}, case.options)
    found = {name: x.cuda() for name, x in result.items().items()}
    assert_allowed(there, found, kernel="hopper_decode")


def rows_of(case, b: int) -> slice:
    return slice(*case.tensors["cu_seqlens_q"][b : b + 2].tolist())


def test_the_sequences_here_have_as_many_parts_as_is_said():
    tiles = [groups.n_tiles(n, 4, 128) * 8 for n in Q_LENS[:5]]
    parts = [
        parts_of.fn(n, keys - q, WANTED, MOST, LEAST_KEYS)
        for n, keys, q in zip(tiles, KV_LENS, Q_LENS, strict=False)
    ]
    assert parts == [4, 2, 8, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_has_the_bits_it_has_alone(kind):
    case = serve_chunks(**KINDS[kind])
    together = attend(case)
    assert_allowed_on_gpu(case, together)
    assert_same_bits(together, attend(case))
    tensors = Tensors(**{name: x.to("meta") for name, x in case.tensors.items()})
    least = least_queries_in_pages(describe(tensors, Options(causal=True)))
    for b, n in enumerate(Q_LENS):
        mine = some(together, rows_of(case, b))
        assert_same_bits(alone(case, b), mine)
        if n >= least:
            assert_same_bits(alone(case, b, "hopper"), mine)


def test_a_program_that_has_all_parts_of_its_tiles_gives_the_same_bits():
    q_lens = [128] * 6 + [130] * 6
    case = serve_chunks(q_lens, [4500 - 31 * b for b in range(12)])
    together = attend(case)
    for b in (0, 3, 5, 11):
        assert_same_bits(alone(case, b), some(together, rows_of(case, b)))
    equal = [128] * 10
    case = serve_chunks(equal, [4500] * 10)
    q = case.tensors["q"].unflatten(0, (10, 128)).transpose(1, 2)
    found = attend(case.replaced(q=q, cu_seqlens_q=None), "hopper")
    for b in range(0, 10, 3):
        mine = Result(found.out[b].transpose(0, 1), found.lse[b].T)
        assert_same_bits(alone(case, b), mine)


def test_all_keys_are_seen_without_a_mask():
    case = serve_chunks([128, 140], [4500, 2100])
    case = Case(case.tensors, case.options | {"causal": False})
    together = attend(case)
    assert_allowed_on_gpu(case, together)
    assert_same_bits(alone(case, 0, "hopper"), some(together, rows_of(case, 0)))


@pytest.mark.parametrize("sigma", [3.0, 30.0])
def test_peaked_scores_and_a_row_that_overflows_in_one_part(sigma):
    case = serve_chunks(Hkv=8)
    q, k, table = case.tensors["q"], case.tensors["k"], case.tensors["page_table"]
    q *= sigma
    # One key in the second part of sequence 0 has it all for some heads.
    k[table[0, 3000 // 16].long(), 3000 % 16, :2] *= 60
    together = attend(case)
    assert_allowed_on_gpu(case, together)
    for b in (0, 1, 2):
        assert_same_bits(alone(case, b), some(together, rows_of(case, b)))
        assert_same_bits(alone(case, b, "hopper"), some(together, rows_of(case, b)))


def test_values_that_are_not_finite_stay_with_the_rows_that_see_them():
    case = serve_chunks()
    v, table = case.tensors["v"], case.tensors["page_table"]
    for b, key, d, value in (
        (0, 8498, 3, NAN),
        (0, 8400, 5, INF),
        (1, 3, 9, INF),
        (2, 2000, 7, -INF),
    ):
        v[table[b, key // 16].long(), key % 16, :, d] = value
    together = attend(case)
    expected = attend(case, "triton").out
    assert expected.isnan().any()
    for is_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_kind(together.out), is_kind(expected))
    for b in (0, 1, 2):
        assert_same_bits(alone(case, b), some(together, rows_of(case, b)))


def test_a_wrong_length_harms_its_own_sequence_alone():
    case = serve_chunks()
    right, lens = attend(case), case.tensors["kv_lens"].clone()
    lens[1] = 1 << 20
    wrong = attend(case.replaced(kv_lens=lens))
    for b in (0, 2, 3, 4, 5, 6):
        assert_same_bits(some(wrong, rows_of(case, b)), some(right, rows_of(case, b)))
    assert wrong.out[rows_of(case, 1)].isnan().all()
