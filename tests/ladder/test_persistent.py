"""persistent_mma: few blocks take the tiles of all heads, round after round."""

from __future__ import annotations

import pytest
import torch

from lockstep.ladder import Problem, find, plans_of, run_on_machine
from lockstep.ladder.check import errors
from lockstep.ladder.survey import count

RUNG = find("persistent_mma").choose(programs=4)


@pytest.mark.parametrize("causal", [False, True])
def test_rounds_of_tiles(causal):
    """Nine tiles for four blocks: two full rounds, and one of a single tile."""
    problem = Problem(B=1, H=3, S=150, D=32, causal=causal, length=140)
    tensors = problem.draw()
    out, (trace,) = run_on_machine(RUNG, problem, tensors)
    trace.check()
    assert errors(problem, tensors).ok
    (planned,) = plans_of(RUNG, problem)
    assert trace.grid == (4, 1, 1)
    assert planned.barriers * planned.warps == trace.totals.barriers
    assert planned.warp_barriers == trace.totals.warp_barriers
    assert planned.load_sectors == trace.totals.global_load_sectors
    assert planned.store_sectors == trace.totals.global_store_sectors
    assert planned.mma == trace.totals.by_kind["mma"]
    # a tile has the bits it has where every tile has a block of its own
    assert torch.equal(out, run_on_machine(find("block_tile_mma"), problem, problem.draw())[0])


def test_backward_rounds_even_out_causal_tiles():
    problem = Problem(B=1, H=2, S=64 * 8, D=32, causal=True)
    (planned,) = plans_of(RUNG, problem)
    assert planned.iterations == 2 * (8 * 9 // 2) // 4  # no block has more than its share
    assert planned.barriers == 2 * (8 * 9 // 2)


def test_counts_of_a_head_are_means_over_all():
    problem = Problem(B=1, H=3, S=70, D=32)
    counted = count(RUNG, problem)
    alone = count(find("block_tile_mma"), problem)
    assert counted.global_bytes == alone.global_bytes
    assert counted.mma == alone.mma
    assert counted.right
    assert not counted.hazards
    assert counted.depth > alone.depth  # two tiles of one block
