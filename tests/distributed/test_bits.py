"""Any number of ranks gives the bits of one process: real gloo processes, no tolerance."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import results_of, run_world

# Lengths that no number of ranks divides, below and across the 256 keys of a span and the 384 rows
# of a block; masks of every kind; as many key heads as query heads, fewer, and one.
SHAPES: list[dict[str, Any]] = [
    {"S": 5, "heads": (4, 2), "causal": True, "sinks": True},
    {"S": 61, "heads": (4, 4), "softcap": 2.0},
    {"S": 333, "heads": (6, 3), "window": (90, None), "sinks": True, "dtype": "float16"},
    {"S": 700, "heads": (4, 1), "causal": True, "window": (100, 0), "dtype": "bfloat16"},
    {"S": 700, "heads": (4, 2), "window": (50, 30)},
    {"S": 1100, "heads": (4, 2), "causal": True, "sinks": True},
]


def cases(methods: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"method": method, "balanced": balanced, **shape}
        for method in methods
        for balanced in (False, True)
        for shape in SHAPES
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_give_the_bits_of_one_process(ranks):
    for found in results_of(run_world(ranks, "bits", cases(("heads", "gather", "ring")))):
        assert [text for text in found if text] == []


@pytest.mark.slow
def test_eight_ranks_give_the_bits_of_one_process():
    shapes = [{**case, "heads": (8, 4)} for case in cases(("heads", "gather", "ring"))]
    for found in results_of(run_world(8, "bits", shapes, timeout=500)):
        assert [text for text in found if text] == []


def test_unshard_undoes_shard():
    assert all(results_of(run_world(3, "round_trips", [1, 5, 64, 333])))
