"""Packed sequences that begin and end on any rank have the bits of one process."""

from __future__ import annotations

import pytest
from worlds import results_of, run_world

# Sequences of one token, of none, within a shard, across two, and across all of them.
CASES = [
    {"offsets": [0, 7, 7, 8, 120, 400], "Hq": 4, "Hkv": 4, "options": {"causal": True}},
    {"offsets": [0, 333], "Hq": 6, "Hkv": 3, "options": {"window": [40, 10]}},
    {"offsets": [0, 60, 61, 190], "Hq": 4, "Hkv": 4, "options": {"window": [20, None]}},
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_packed_sequences_have_the_bits_of_one_process(ranks):
    cases = [{**case, "methods": ("heads", "gather")} for case in CASES]
    cases.append({**CASES[0], "Hkv": 1, "methods": ("gather",)})
    for rank, said in enumerate(results_of(run_world(ranks, "packed", cases))):
        assert said == [], f"rank {rank}"
