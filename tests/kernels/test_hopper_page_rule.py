"""Which sequences in pages are the forward's on Hopper, by their queries and heads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.common.gluon_shim import VIEWS_GROW
from lockstep.kernels.hopper.forward.page_rule import least_queries_in_pages
from lockstep.problem import AttentionProblem, Options, Tensors, describe


def problem_of(
    Hq: int,
    Hkv: int,
    D: int = 128,
    left: int | None = None,
    B: int = 1,
    keys: int = 64,
) -> AttentionProblem:
    q = torch.empty(B, Hq, 5, D, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(9, 16, Hkv, D, dtype=torch.bfloat16, device="meta")
    table = torch.empty(B, keys // 16, dtype=torch.int32, device="meta")
    lens = torch.empty(B, dtype=torch.int32, device="meta")
    tensors = Tensors(q, pages, pages, page_table=table, kv_lens=lens)
    return describe(tensors, Options(causal=True, window_left=left))


@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "least"),
    [
        (32, 8, 128, 33),  # more rows of a group than a tile has
        (40, 8, 256, 26),
        (64, 4, 128, 9),  # 144 rows are two tiles, and four heads have eight
        (64, 8, 64, 33),  # narrow heads: more than two tiles
        (32, 32, 128, 65),
        (8, 1, 128, 113),  # eight tiles
        (15, 3, 80, 49),  # three tiles of each
        (1, 1, 64, 897),
        (32, 8, 72, 128),  # no tiles of pages
    ],
)
def test_rows_of_a_group_and_tiles_of_all_heads_decide(Hq, Hkv, D, least):
    for sizes in ({}, {"B": 7}, {"keys": 65536}):
        assert least_queries_in_pages(problem_of(Hq, Hkv, D, **sizes)) == least


@pytest.mark.skipif(not VIEWS_GROW, reason="this Triton has no views that grow")
@pytest.mark.parametrize(
    ("Hq", "D", "left", "least"),
    [(64, 64, 127, 1), (64, 64, 500, 33), (32, 128, 127, 1), (8, 64, 127, 65)],
)
def test_narrow_windows_of_groups_are_the_forward_s_from_one_query_on(Hq, D, left, least):
    assert least_queries_in_pages(problem_of(Hq, 8, D, left)) == least
