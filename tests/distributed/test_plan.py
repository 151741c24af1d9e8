"""The planner: what it says follows from counted bytes, measured rates and given links."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lockstep import cli
from lockstep.distributed.plan import RING, Kernels, Links, Rates, plan, rates_of
from lockstep.distributed.traffic import Shape, received

KERNELS, LINKS = Kernels(Rates(600e12, 500e12), Rates(300e12, 400e12)), Links(900, 50)


def rows_of(P: int, *, causal: bool = True, balanced: bool = True, S: int = 1 << 20):
    shape = Shape(1, 32, 8, S, 128, 128, 2, P, balanced)
    return shape, {row.method: row for row in plan(shape, causal, KERNELS, LINKS)}


def test_one_gpu_is_as_efficient_as_one_gpu():
    _, rows = rows_of(1)
    assert rows["heads"].efficiency == pytest.approx(1)
    assert all(row.received == row.exposed == 0 for row in rows.values())
    assert rows["heads"].recommended


def test_bytes_are_those_of_the_closed_forms():
    shape, rows = rows_of(8)
    for method, row in rows.items():
        assert row.received == sum(received(method, shape, 0))


def test_compute_of_a_forward_and_a_backward_at_their_rates():
    _, rows = rows_of(8)
    flops = 2 * 32 * (1 << 40) / 2 / 8 * 256
    assert rows["heads"].compute == pytest.approx(flops / 600e12 + 2.5 * flops / 500e12)
    _, full = rows_of(8, causal=False)
    assert full["ring"].compute == pytest.approx(2 * flops / 300e12 + 5 * flops / 400e12)


def test_what_is_on_the_wire_while_a_ring_computes_is_not_exposed():
    _, rows = rows_of(8)
    assert rows["ring"].exposed < rows["gather"].exposed / 5
    _, short = rows_of(8, S=1 << 10)
    assert short["ring"].exposed > rows["ring"].exposed / 1000


def test_balanced_shards_help_under_a_causal_mask_alone():
    _, contiguous = rows_of(8, balanced=False)
    _, balanced = rows_of(8)
    assert contiguous["gather"].compute == pytest.approx(balanced["gather"].compute * 15 / 8)
    _, full = rows_of(8, causal=False)
    _, full_contiguous = rows_of(8, causal=False, balanced=False)
    assert full["gather"].compute == full_contiguous["gather"].compute


def test_more_ranks_than_heads_leave_tokens_to_divide():
    _, rows = rows_of(512)
    assert rows["heads"].refusal is not None
    assert rows["gather"].recommended


def test_the_command_takes_measured_rates_of_an_h200():
    ended = CliRunner().invoke(cli.app, ["plan", "context", "--gpus", "8,64", "--json"])
    assert ended.exit_code == 0
    data = json.loads(ended.stdout)
    assert [row["gpus"] for row in data["rows"]] == [8] * 3 + [64] * 3
    for rates in data["rates"].values():
        assert 3e14 < rates["backward"] < rates["forward"] < 9.9e14


def test_rates_are_those_of_the_newest_run_that_a_kernel_took_part_in():
    def run(rate):
        tables = ("forward", "backward")
        common = {"D": 64, "causal": True, "chosen": "hopper", "rate": rate}
        return {"rows": [common | {"table": table} for table in tables]}

    earlier = run({"hopper": 1.0, **dict.fromkeys(RING.values(), 2.0)})
    kernels = rates_of([earlier, run({"hopper": 3.0})], 64, True)
    assert kernels == Kernels(Rates(3e12, 3e12), Rates(2e12, 2e12))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--heads", "32"], "--heads takes 2 numbers"),
        (["--heads", "32/5"], "--heads takes a multiple of the key heads"),
        (["--seq", "many"], "--seq takes a number of tokens"),
        (["--link", "900,-1"], "--link takes 2 numbers above 0"),
        (["--gpu", "abacus"], "give rates by --tflops"),
    ],
)
def test_options_that_do_not_fit_are_named(options, said):
    ended = CliRunner().invoke(cli.app, ["plan", "context", *options])
    assert ended.exit_code == 2
    assert said in " ".join(ended.stderr.split())
