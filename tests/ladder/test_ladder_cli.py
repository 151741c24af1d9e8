"""`lockstep ladder`, `plan`, `trace` and `show` with rungs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lockstep import ladder
from lockstep.cli import app
from lockstep.ladder.rungs import r05_small_tile_2d as small_tile_2d
from lockstep.ladder.tables import against_phases
from lockstep.output.formats import number

FEW = ("naive", "small_tile_2d")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def few_rungs(monkeypatch):
    monkeypatch.setattr(ladder, "RUNGS", tuple(r for r in ladder.RUNGS if r.name in FEW))


def test_ladder(few_rungs):
    text = run("ladder", "--seq", "20", "--batch", "1", "--heads", "3")
    assert "B1 H3 S20 D32 float16, planned for H200" in text
    assert "small_tile_2d" in text
    assert "times the number of" in " ".join(text.split())  # what is scaled is said


def test_ladder_for_a_script(few_rungs):
    data = json.loads(run("ladder", "--seq", "20", "--heads", "3", "--json", "--no-bench"))
    assert data["problem"]["H"] == 3
    assert [row["rung"] for row in data["rows"]] == list(FEW)
    for row in data["rows"]:
        seen = row["trace_of_one_head"]
        assert seen["right"]
        assert seen["hazards"] == 0
        assert row["microseconds"] is None
    assert data["rows"][1]["plan"]["launches"][0]["blocks"] == 2 * 3


def test_a_wrong_rung_is_an_error(monkeypatch):
    right = ladder.find("naive")

    def launches(problem, tensors):
        """The output goes elsewhere."""
        return right.launches(problem, tensors._replace(out=tensors.out.clone()))

    broken = ladder.Rung("naive", "", launches, right.plans)
    monkeypatch.setattr(ladder, "RUNGS", (broken,))
    assert "wrong" in run("ladder", "--seq", "8", "--no-bench", code=1)


@pytest.mark.slow
def test_plan_of_all_rungs():
    text = run("plan", "--gpu", "a100", "--batch", "2", "--heads", "16", "--seq", "1024")
    assert "B2 H16 S1024 D32 float16 on A100" in text
    for name in ("large_tile", "small_tile (tree)", "9×32", "23×16×2", "150.9", "37.5"):
        assert name in text


def test_plan_of_one_rung():
    text = run("plan", "small_tile", "--softmax", "sequential", "--gpu", "A100")
    for phase in ("load q", "load kv", "scores", "softmax", "output", "write"):
        assert phase in text
    data = json.loads(run("plan", "small_tile", "--softmax", "sequential", "--json"))
    (row,) = data["rows"]
    assert row["options"] == {"softmax": "sequential"}
    assert row["plan"]["launches"][0]["waves"] == pytest.approx(736 / (4 * 132))


def test_a_rung_that_no_gpu_can_run_is_an_error():
    arguments = ["plan", "large_tile", "--head-dim", "64", "--gpu", "a100,t4"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    on_a100, on_t4 = result.stderr.splitlines()
    assert on_a100.startswith("error: large_tile on A100: a block takes 192,960 bytes")
    assert on_t4.startswith("large_tile on T4: a block takes")
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert (result.exit_code, result.stderr) == (2, "")
    assert [row["plan"] for row in json.loads(result.stdout)["rows"]] == [None, None]


@pytest.mark.slow
def test_plan_with_grouped_heads():
    rows = [
        json.loads(run("plan", "split_kv", "--heads", "8", *more, "--json"))["rows"][0]["plan"]
        for more in ((), ("--kv-heads", "2"))
    ]
    assert rows[0]["traffic_bytes"] == rows[1]["traffic_bytes"]  # every head asks for its keys
    assert rows[1]["amplification"] > rows[0]["amplification"]  # of fewer keys
    refused = run("plan", "small_tile", "--kv-heads", "4", code=2)
    assert refused.strip() == "error: small_tile takes as many heads of keys as of queries"


@pytest.mark.slow
def test_plan_on_several_gpus():
    text = run("plan", "small_tile", "--gpu", "a100,h200")
    fits, work, *_ = (x.split() for x in text.splitlines() if x.startswith("small_tile "))
    assert fits[2:] == ["37.5s", "2.27", "50s", "1.39"]  # one line for both
    assert len(work) == 1 + 6 + 2  # a roof for each
    assert "occ%: warps that a multiprocessor holds" in " ".join(text.split())
    data = json.loads(run("plan", "small_tile", "--gpu", "a100,h200", "--json"))
    assert [row["plan"]["gpu"] for row in data["rows"]] == ["A100", "H200"]


@pytest.mark.slow
def test_two_rungs_side_by_side():
    arguments = ("trace", "small_tile:softmax=sequential", "--against", "small_tile", "--seq", "20")
    text = run(*arguments)
    assert "barriers of a block" in text
    assert "softmax" in text
    one, other = json.loads(run(*arguments, "--json"))["rungs"]
    assert one["title"] == "small_tile (sequential)"
    assert one["depth"] > other["depth"]
    assert one["barriers_per_block"] < other["barriers_per_block"]


def test_phases_of_all_launches_are_added_up():
    """The two launches of a split have instructions outside of phases each."""
    rung = ladder.find("split_kv")
    _, traces = ladder.run_on_machine(rung, ladder.Problem(B=1, H=1, S=20, D=32))
    outside = sum(p.depth for trace in traces for p in trace.phases if not p.name)
    made = against_phases(("one", "other"), (traces, traces))
    rows = dict(zip(*(list(made.columns[i].cells) for i in (0, 1)), strict=True))
    assert len([p for trace in traces for p in trace.phases if not p.name]) == 2
    assert rows["(outside)"] == number(outside)
    assert set(made.columns[3].cells) == {"="}


@pytest.mark.slow
def test_sweep():
    arguments = ("sweep", "split_kv", "--tile", "8x8", "--kv-tiles", "1,2", "--seq", "32,40")
    rows = json.loads(run(*arguments, "--json", "--no-bench"))
    assert [(r["problem"].split()[2], r["options"]["kv_tiles"]) for r in rows] == [
        *(("S32", 1), ("S32", 2), ("S40", 1), ("S40", 2))
    ]
    assert [r["plan"]["launches"][0]["grid"][1] for r in rows] == [4, 2, 5, 3]
    assert all(r["trace_of_one_head"]["right"] for r in rows)
    text = run(*arguments, "--no-trace", "--no-bench")
    assert "B1 H1 D32 float16, planned for H200" in text  # what all have in common
    assert "split_kv (8x8, kv_tiles 2), S40 " in text


def test_screens_fit_80_columns(few_rungs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (
        ("ladder", "--seq", "20", "--no-bench"),
        ("plan",),
        ("trace", "small_tile_2d", "--seq", "20"),
    ):
        text = run(*arguments)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
    assert "inlined: stage_rows (rows.py)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--gpu", "h300"), "--gpu is 'h300', takes one of"),
        (("plan", "tiny_tile"), "there is no rung 'tiny_tile'"),
        (("plan", "--head-dim", "48"), "--head-dim is 48, takes one of 32, 64, 128"),
        (("plan", "--dtype", "int3"), "--dtype is 'int3', takes float16 or bfloat16"),
        (("plan", "--seq", "99999999999"), "--batch · --heads · --seq · --head-dim is"),
        (("plan", "--batch", "99999999999"), "takes up to 2147483647: an index is an int32"),
        (("trace", "naive", "--seq", "99999999999"), "takes up to 2147483647"),
        (("ladder", "--heads", "99999999999"), "takes up to 2147483647"),
        (("trace", "naive", "--length", "-1"), "--length is -1, takes 0 to --seq = 256"),
        (("plan", "naive", "--softmax", "tree"), "naive has no option 'softmax'"),
        (("plan", "warp_mma", "--tile", "7x7"), "tile is '7x7', warp_mma takes"),
        (("trace", "naive", "--length", "3"), "naive is not constant-time"),
        (
            ("trace", "no such thing"),
            "is neither a rung nor FILE.py:KERNEL nor a sample rungs: naive;",
        ),
        (("trace", "small_tile:softmax=fast"), "softmax is 'fast', small_tile takes"),
        (("trace", "naive", "--against", "nosuch"), "there is no rung 'nosuch'; there are naive"),
        (("sweep", "split_kv", "--kv-tiles", "3"), "kv_tiles is '3', split_kv takes"),
        (("sweep", "naive", "--seq", "a,b"), "--seq takes numbers separated by commas, got 'a,b'"),
    ],
)
def test_usage_errors(arguments, message):
    assert message in " ".join(run(*arguments, code=2).split())


def test_trace_of_a_rung():
    text = run("trace", "small_tile_2d", "--seq", "50", "--head-dim", "32", "--causal")
    assert "no hazards" in text
    assert "small_tile_2d, B1 H1 S50 D32 float16 causal: right" in " ".join(text.split())


def test_trace_of_a_rung_for_a_script():
    arguments = ("--softmax", "sequential", "--seq", "20", "--head-dim", "32", "--json")
    data = json.loads(run("trace", "small_tile", *arguments))
    assert data["options"] == {"softmax": "sequential"}
    assert data["largest_error"]["ok"]
    (trace,) = data["traces"]
    busy = {phase["name"]: phase["thread_utilisation"] for phase in trace["phases"]}
    assert busy["softmax"] < 1 / 200 < 1 / 10 < busy["output"] < 1 / 5


def test_options_of_other_rungs():
    arguments = ("split_kv", "--tile", "8x8", "--kv-tiles", "4", "--seq", "40", "--json")
    data = json.loads(run("trace", *arguments))
    chosen = {"tile": "8x8", "kv_tiles": 4, "join": "kernel", "products": "fma"}
    assert data["options"] == chosen
    assert len(data["traces"]) == 2


def test_trace_of_a_constant_time_rung_with_a_length():
    data = json.loads(run("trace", "row_per_thread", "--seq", "40", "--length", "7", "--json"))
    assert data["problem"]["length"] == 7
    assert data["largest_error"]["ok"]


def test_samples_and_files_still_trace():
    assert "no hazards" in run("trace", "shuffles")


def test_show_a_rung():
    text = run("show", "small_tile_2d", "--head-dim", "64")
    assert "constexpr int D = 64;" in text
    assert "// phase: softmax" in text
    assert small_tile_2d.small_tile_2d.__name__ in text


PRINTING = [
    ["plan", "--gpu", "a100"],
    ["plan", "naive"],
    ["plan", "--gpu", "a100", "--json"],
    ["plan", "--seq", "99999999999"],
    ["ladder", "--seq", "20", "--no-bench"],
    ["trace", "small_tile", "--seq", "20"],
    ["claims"],
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_terminal_without_unicode_gets_other_characters(arguments, monkeypatch):
    if "ladder" in arguments:  # all rungs take seconds; the plan has their names
        few = tuple(map(ladder.find, ("naive", "block_tile_mma")))
        monkeypatch.setattr(ladder, "RUNGS", few)
    result = CliRunner(charset="ascii").invoke(app, arguments)
    assert result.exit_code == (2 if "99999999999" in arguments else 0), result.output
    assert result.stdout_bytes.isascii()
    assert (result.stdout_bytes + result.stderr_bytes).strip()
    if "--json" in arguments:
        json.loads(result.stdout)


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_a_plan():
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "plan", "naive"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.isascii()
    assert b"naive" in done.stdout
    assert b"?" not in done.stdout
