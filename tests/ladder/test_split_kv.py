"""split_kv: parts that do not depend on how many there are of anything else."""

from __future__ import annotations

import pytest
import torch

from lockstep.ladder import Problem, Tensors, find, launches_of, plans_of, run_on_machine
from lockstep.ladder.check import errors
from lockstep.ladder.rungs.r07_split_kv import splits_of

RUNG = find("split_kv")


@pytest.mark.parametrize("kv_tiles", [1, 2, 4, "all"])
def test_every_split_gives_the_same_attention(kv_tiles):
    problem = Problem(B=1, H=1, S=70, D=32, causal=kv_tiles == 2)
    tensors = problem.draw()
    rung = RUNG.choose(tile="8x8", kv_tiles=kv_tiles)
    for trace in run_on_machine(rung, problem, tensors)[1]:
        trace.check()
    assert errors(problem, tensors).ok


@pytest.mark.parametrize("causal", [False, True])
def test_what_no_block_wrote_is_not_read(causal, monkeypatch):
    """Behind a causal diagonal the workspace stays as it was."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    problem = Problem(B=1, H=2, S=45, D=32, causal=causal)
    tensors = problem.draw()
    run_on_machine(RUNG.choose(tile="8x8", kv_tiles=1), problem, tensors)
    assert errors(problem, tensors).ok


def test_a_row_has_the_same_bits_alone_and_in_company():
    many = Problem(B=2, H=2, S=50, D=32)
    rung = RUNG.choose(tile="8x8", kv_tiles=2)
    tensors = many.draw()
    together = run_on_machine(rung, many, tensors)[0][1, 1]
    alone = Problem(B=1, H=1, S=50, D=32)
    one = alone.draw()
    for mine, theirs in zip(one[:3], tensors[:3], strict=True):
        mine.copy_(theirs[1:, 1:])
    assert torch.equal(run_on_machine(rung, alone, one)[0][0, 0], together)


def test_the_split_is_fixed_in_size_not_in_number():
    for S, splits in ((256, 8), (512, 16), (8192, 256)):
        assert splits_of(Problem(B=1, H=1, S=S, D=64), "8x8", 4) == splits
        assert splits_of(Problem(B=1, H=1, S=S, D=64), "8x8", "all") == 1


def test_a_workspace_beyond_the_indices_is_refused():
    long = Problem(B=1, H=32, S=8192, D=64)
    with pytest.raises(ValueError, match="workspace of 4,294,967,296 elements"):
        plans_of(RUNG.choose(tile="8x8", kv_tiles=4), long)
    assert plans_of(RUNG.choose(tile="64x64", kv_tiles=4), long)


def test_the_workspace_of_the_documents():
    partial, join = plans_of(RUNG.choose(tile="8x8", kv_tiles=4), Problem(B=1, H=1, S=256, D=128))
    assert partial.grid == (32, 8, 1)
    assert join.grid == (32, 1)
    assert partial.workspace == 266_240
    assert join.workspace == 0


@pytest.mark.parametrize("causal", [False, True])
def test_one_launch_gives_the_bits_of_two(causal):
    problem = Problem(B=1, H=2, S=150, D=32, causal=causal)
    found = {}
    for join in ("kernel", "last_block"):
        rung = RUNG.choose(tile="32x32", kv_tiles=2, join=join)
        found[join], traces = run_on_machine(rung, problem)
        for trace in traces:
            trace.check()
    assert len(traces) == 1
    assert torch.equal(found["kernel"], found["last_block"])


def test_the_count_of_finished_blocks_is_set_back():
    problem = Problem(B=1, H=1, S=70, D=32)
    rung = RUNG.choose(tile="8x8", kv_tiles=2, join="last_block")
    (launch,) = launches_of(rung, problem, problem.draw())
    for _ in range(2):
        launch.kernel[launch.grid, launch.block].trace(**launch.arguments).check()
        assert not launch.arguments["finished"].any()


@pytest.mark.parametrize("join", ["kernel", "last_block"])
def test_heads_of_queries_may_share_heads_of_keys(join):
    problem = Problem(B=2, H=4, S=50, D=32, causal=True, kv_heads=2)
    tensors = problem.draw()
    assert tensors.k.shape == (2, 2, 50, 32)
    rung = RUNG.choose(tile="8x8", kv_tiles=2, join=join)
    out, traces = run_on_machine(rung, problem, tensors)
    for trace, planned in zip(traces, plans_of(rung, problem), strict=True):
        trace.check()
        assert planned.load_bytes + planned.store_bytes == trace.totals.bytes["global"]
    assert errors(problem, tensors).ok
    # the bits of heads that have keys of their own
    repeated = Tensors(
        tensors.q,
        *(x.repeat_interleave(2, dim=1) for x in tensors[1:3]),
        torch.full_like(tensors.out, float("nan")),
    )
    alone, _ = run_on_machine(rung, Problem(B=2, H=4, S=50, D=32, causal=True), repeated)
    assert torch.equal(out, alone)


def test_other_rungs_refuse_grouped_heads():
    with pytest.raises(ValueError, match="naive takes as many heads of keys as of queries"):
        run_on_machine(find("naive"), Problem(B=1, H=4, S=8, D=32, kv_heads=2))
    with pytest.raises(ValueError, match="kv_heads is 3, takes a divisor of H = 4"):
        Problem(B=1, H=4, S=8, D=32, kv_heads=3)


@pytest.mark.parametrize("causal", [False, True])
def test_splits_on_tensor_cores(causal):
    """Grouped heads, several tiles in a split, a tile that is not full."""
    problem = Problem(B=1, H=2, S=150, D=32, causal=causal, kv_heads=1)
    tensors = problem.draw()
    rung = RUNG.choose(products="mma", kv_tiles=2)
    _, traces = run_on_machine(rung, problem, tensors)
    for trace, planned in zip(traces, plans_of(rung, problem), strict=True):
        trace.check()
        assert planned.load_bytes + planned.store_bytes == trace.totals.bytes["global"]
        assert planned.mma == trace.totals.by_kind["mma"]
    assert errors(problem, tensors).ok
    refused = RUNG.choose(products="mma", join="last_block")
    with pytest.raises(ValueError, match="by mma takes tile 64x64 and join kernel"):
        plans_of(refused, problem)
