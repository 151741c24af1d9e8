"""Ranks that do not fit together are told so, every one of them; none is left waiting."""

from __future__ import annotations

import pytest
import torch
from worlds import results_of, run_world

from lockstep.distributed import context_parallel_attention, shard

WRONG = {
    "causal": (
        {"causal": True},
        "causal takes the same on every rank, got ranks 0, 1: False; rank 2: True",
    ),
    "batch": ({"shape": [2, 4, 8, 16]}, "batch of q takes the same on every rank"),
    "heads": ({"shape": [1, 8, 8, 16]}, "heads of q takes the same on every rank"),
    "tokens": ({"shape": [1, 4, 9, 16]}, "q takes contiguous shards of 25 tokens, [9, 9, 7]"),
    "dtype": ({"dtype": "bfloat16"}, "got ranks 0, 1: float32; rank 2: bfloat16"),
    "method": ({"method": "heads"}, "got ranks 0, 1: gather; rank 2: heads"),
    "scale": (
        {"scale": 0.5},
        "scale takes the same on every rank, got ranks 0, 1: None; rank 2: 0.5",
    ),
    "kind": ({"causal": 1}, "causal takes True or False, got int"),
    "window": ({"window": (-1, 0)}, "window takes distances of 0 or more"),
    "name": ({"method": "circle"}, "method takes one of heads, gather, ring"),
    "dims": ({"shape": [4, 8, 16]}, "q takes shape [B, Hq, Sq, D]"),
}


def test_what_differs_is_named_on_every_rank():
    told = results_of(run_world(3, "refuse", [changes for changes, _ in WRONG.values()]))
    for rank, messages in enumerate(told):
        for (name, (_, expected)), message in zip(WRONG.items(), messages, strict=True):
            assert expected in message, f"{name} on rank {rank}: {message!r}"
    kind = list(WRONG).index("kind")
    assert told[0][kind].startswith("Disagreement: rank 2 cannot make this call: causal takes")
    assert told[2][kind].startswith("TypeError: causal takes")


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_ends_is_named_by_the_others(lost):
    ended = run_world(3, "lose_a_rank", lost)
    assert ended[lost].status == 3
    for rank in {0, 1, 2} - {lost}:
        assert ended[rank].status == 0, ended[rank].said
        assert ended[rank].result.startswith("RankLost: all-gather failed: rank")
        assert f"rank {lost} does not answer" in ended[rank].result


def test_a_group_that_is_not_initialised_is_said_so():
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        context_parallel_attention(x, x, x, mesh=None)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        shard(x, None, 2)
