"""Any number of ranks gives the bits of one process: real gloo processes, no tolerance."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import results_of, run_world

# Lengths that no number of ranks divides, below and across the 256 keys of a span and the 384 rows
# of a block; masks of every kind; as many key heads as query heads, fewer, and one.
SHAPES: list[dict[str, Any]] = [
    {"S": 5, "Hq": 4, "Hkv": 2, "mask": "causal", "sinks": True},
    {"S": 61, "Hq": 4, "Hkv": 4, "mask": "full", "softcap": 2.0},
    {"S": 333, "Hq": 6, "Hkv": 3, "mask": "behind", "sinks": True, "dtype": "float16"},
    {"S": 700, "Hq": 4, "Hkv": 1, "mask": "window", "dtype": "bfloat16"},
    {"S": 700, "Hq": 4, "Hkv": 2, "mask": "both"},
    {"S": 1100, "Hq": 4, "Hkv": 2, "mask": "causal", "sinks": True},
]


METHODS = ("heads", "gather", "ring")


def cases(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"method": method, "balanced": balanced, **shape}
        for shape in shapes
        for method in METHODS
        for balanced in (False, True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shapes"), [(1, SHAPES[1::2]), (2, SHAPES), (3, SHAPES), (4, SHAPES[1::2])]
)
def test_ranks_give_the_bits_of_one_process(ranks, shapes):
    for found in results_of(run_world(ranks, "bits", cases(shapes))):
        assert [text for text in found if text] == []


@pytest.mark.slow
def test_eight_ranks_give_the_bits_of_one_process():
    """Fewer tokens than ranks, and shards shorter and longer than a window."""
    shapes = [{**SHAPES[i], "Hq": 8, "Hkv": 4} for i in (0, 2, 4)]
    for found in results_of(run_world(8, "bits", cases(shapes), timeout=500)):
        assert [text for text in found if text] == []


def test_unshard_undoes_shard():
    assert all(results_of(run_world(3, "round_trips", [1, 5, 64, 333])))


def test_another_order_of_summation_shows():
    """Sums of two halves of the queries, as ranks that reduce dk and dv would make them."""
    said = results_of(run_world(2, "planted"))
    assert said[0] == "None"
    assert said[1].startswith("dk[")
