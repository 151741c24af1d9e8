"""A cache whose tokens are on several ranks, dense and in pages."""

from __future__ import annotations

from worlds import results_of, run_world

# 64 tokens per rank: lengths that end on the first, on a boundary, on the last; a mask that reaches
# from one shard into another.
CASES = [
    {"Sq": 1, "lens": [0, 1, 64, 65, 190]},
    {"Sq": 1, "lens": [5, 130, 192], "causal": True, "softcap": 3.0, "sinks": True},
    {"Sq": 1, "lens": [3, 70, 150], "causal": True, "window": [20, 0]},
    {"Sq": 9, "lens": [9, 64, 68, 140], "causal": True, "sinks": True},
    {"Sq": 40, "lens": [40, 70, 192], "causal": True, "window": [30, 0], "sinks": True},
    {"Sq": 7, "lens": [60, 130], "window": [4, 2]},
]


def test_a_sharded_cache_gives_what_a_whole_one_does():
    for rank, said in enumerate(results_of(run_world(3, "decode", CASES))):
        assert said == [], f"rank {rank}"
