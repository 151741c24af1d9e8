"""The plan: what the trace counts, in closed form, and what follows from it on a GPU."""

from __future__ import annotations

import pytest

from lockstep.ladder import PhasePlan, Problem, find, plans_of
from lockstep.ladder.plan import PEAKS, gpu_named, plan
from lockstep.ladder.survey import count
from lockstep.simt.occupancy import GPUS

SEEDS = Problem(B=2, H=16, S=1024, D=32)
TWO_HEADS = Problem(B=2, H=1, S=64, D=32, causal=True)
ONE_TILE = Problem(B=1, H=1, S=79, D=32, dtype="bfloat16")


@pytest.mark.slow
def test_plan_and_trace_agree(traced, step, problem):
    _, traces = traced(step, problem)
    plans = plans_of(step, problem)
    assert len(plans) == len(traces)
    for planned, trace in zip(plans, traces, strict=True):
        totals = trace.totals
        assert planned.kernel == trace.kernel
        assert (*planned.grid, 1, 1)[:3] == trace.grid
        assert (planned.block, 1, 1) == trace.block
        assert planned.shared_bytes == trace.static_shared_bytes + trace.dynamic_shared_bytes
        assert planned.barriers * planned.warps == totals.barriers
        assert planned.warp_barriers == totals.warp_barriers
        assert planned.load_bytes + planned.store_bytes == totals.bytes["global"]
        assert planned.load_sectors in (None, totals.global_load_sectors)
        assert planned.store_sectors in (None, totals.global_store_sectors)
        assert planned.mma == totals.by_kind["mma"]
        assert {phase.name for phase in planned.phases} <= {phase.name for phase in trace.phases}


def test_sectors_are_planned_where_rows_are_aligned(step):
    for planned in plans_of(step, SEEDS):
        assert planned.load_sectors is not None
        assert planned.store_sectors is not None
        assert planned.store_sectors * 32 >= planned.store_bytes


@pytest.mark.parametrize(
    ("rung", "phase", "busy"),
    [
        ("large_tile", "softmax", 1 / 64),
        ("large_tile", "output", 32 / 64),
        ("small_tile", "output", 32 / 256),
        ("small_tile_2d", "scores", 45 / 48),
        ("small_tile_2d", "output", 45 / 48),
    ],
)
def test_the_machine_sees_the_idle_threads_that_are_planned(traced, rung, phase, busy):
    step = find(rung).steps()[-1]
    (planned,) = plans_of(step, ONE_TILE)
    _, (trace,) = traced(step, ONE_TILE)
    (at,) = [p for p in planned.phases if p.name == phase]
    assert at.utilisation(planned.block) == pytest.approx(busy)
    # in the machine, all threads execute loop counters and barriers
    assert trace.phase(phase).thread_utilisation == pytest.approx(busy, abs=0.01)


def test_no_bank_conflicts_in_the_products_of_small_tile_2d(traced, problem):
    _, (padded,) = traced(find("small_tile_2d"), problem)
    for phase in ("scores", "softmax", "output", "write"):
        assert padded.phase(phase).counts.bank_conflicts == 0
    _, (unpadded,) = traced(find("small_tile").choose(softmax="tree"), problem)
    assert unpadded.phase("scores").counts.bank_conflicts > 0


def test_the_machine_sees_the_tree_shorten_the_softmax(traced):
    depth = {}
    for softmax in ("sequential", "tree"):
        step = find("small_tile").choose(softmax=softmax)
        _, (trace,) = traced(step, ONE_TILE)
        depth[softmax] = trace.phase("softmax").depth
    assert depth["sequential"] > 5 * depth["tree"]


@pytest.mark.slow
def test_every_head_counts_the_same(traced, last_step):
    """What `lockstep ladder` relies on when it traces one head."""
    one = count(last_step, TWO_HEADS)
    _, traces = traced(last_step, TWO_HEADS)
    assert sum(t.totals.instructions for t in traces) == 2 * one.instructions
    assert sum(t.totals.sector_bytes for t in traces) == 2 * one.global_bytes
    assert sum(t.totals.bank_conflicts for t in traces) == 2 * one.bank_conflicts
    assert sum(int(t.depth.max()) for t in traces) == one.depth


def test_the_geometry_of_the_tiles_on_an_a100():
    small, large = (plan(find(n), SEEDS, "a100") for n in ("small_tile", "large_tile"))
    assert (small.blocks, large.blocks) == (736, 288)
    assert small.steps[0].launch.iterations == 12
    assert large.steps[0].launch.iterations == 9
    assert round(large.steps[0].launch.shared_bytes / 1024, 1) == 150.9
    assert small.steps[0].occupancy.share == 0.375
    assert large.steps[0].occupancy.share == pytest.approx(2 / 64)
    assert "shared" in large.steps[0].occupancy.limited_by
    # 736 blocks, three on each of 108 multiprocessors at a time
    assert small.steps[0].waves == pytest.approx(736 / 324)
    assert small.steps[0].tail == pytest.approx(736 / 324 - 2)


def test_work_traffic_and_roofline():
    whole = plan(find("small_tile_2d"), SEEDS, "H200")
    half = plan(find("small_tile_2d"), Problem(2, 16, 1024, 32, causal=True), "H200")
    assert whole.work == 32 * 1024 * 1024 * (4 * 32 + 1)
    assert half.pairs == 32 * 1024 * 1025 // 2
    assert whole.parallelism == whole.work / whole.depth
    assert whole.least_traffic == 4 * 32 * 1024 * 32 * 2
    # every query tile reads all of K and V
    assert whole.amplification == pytest.approx((2 + 2 * 23) / 4)
    assert half.amplification < whole.amplification
    seconds, bound = whole.roofline
    assert bound == "arithmetic"
    assert seconds == pytest.approx(32 * 1024 * 1024 * 128 / PEAKS["H200"].fp32 / 1e12)
    assert whole.workspace == 0
    assert plan(find("naive"), SEEDS, "H200").workspace == 32 * (1024 * 1024 + 1024)


def test_json_of_a_plan():
    data = plan(find("small_tile").choose(softmax="sequential"), SEEDS, "A100").as_json()
    (launch,) = data["launches"]
    assert data["options"] == {"softmax": "sequential"}
    assert launch["grid"] == [23, 16, 2]
    busy = {phase["name"]: phase["utilisation"] for phase in launch["phases"]}
    assert busy["softmax"] == 1 / 256
    assert busy["output"] == 32 / 256


def test_phases():
    phase = PhasePlan("output", items=720, threads=256, steps=180, visits=12)
    assert phase.rounds == 3
    assert phase.depth == 3 * 180 * 12
    assert phase.utilisation(256) == 720 / 768


def test_a_block_that_a_gpu_cannot_run():
    with pytest.raises(ValueError, match="large_tile on A100: a block takes 192,960 bytes"):
        plan(find("large_tile"), Problem(1, 1, 64, 64), "A100")
    assert plan(find("large_tile"), Problem(1, 1, 64, 128), "H200").steps[0].occupancy.blocks == 1


def test_gpus():
    assert gpu_named("rtx4090") == "RTX 4090"
    assert set(PEAKS) == set(GPUS)
    with pytest.raises(ValueError, match="gpu is 'h300', takes one of T4, A100"):
        gpu_named("h300")
