"""`lockstep bench gpu`: what it says without a GPU, and that one bad contender spoils one cell."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from lockstep import cli
from lockstep.bench import gpu, gpu_calls, gpu_run, peers, results, show
from lockstep.kernels import cpu

runner = CliRunner()
SMALL = gpu.Case("forward", 64, 16, 2, 2, 1, causal=True)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Everything but the timing, with the CPU kernel in place of one for a GPU."""
    monkeypatch.setattr(gpu_calls, "_normal", lambda *sizes: torch.randn(*sizes).bfloat16())
    monkeypatch.setattr(gpu, "kernels", lambda: [cpu.KERNEL])
    monkeypatch.setattr(gpu, "_milliseconds", lambda call, quick: 2.0)
    monkeypatch.setattr(gpu, "CASES", (SMALL, gpu.Case("backward", 64, 16, 2, 2, 1)))


def right(q, k, v, causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def wrong(q, k, v, causal):
    return q + k + v


def broken(q, k, v, causal):
    raise RuntimeError("no such\nthing")


def refusing(q, k, v, causal):
    raise NotImplementedError("no kernel runs this\n  not here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_no_gpu_is_said_plainly():
    result = runner.invoke(cli.app, ["bench", "gpu"])
    assert result.exit_code == 2
    assert "no CUDA device here" in result.stderr
    assert result.stdout == ""


def test_an_unknown_table_is_a_usage_error():
    result = runner.invoke(cli.app, ["bench", "gpu", "--table", "sideways"])
    assert result.exit_code == 2
    assert "got 'sideways'" in result.stderr


def test_every_case_has_a_name_of_its_own_and_a_unit():
    names = [(case.table, case.name) for case in gpu.CASES]
    assert len(set(names)) == len(names)
    assert {case.table for case in gpu.CASES} == set(gpu.UNITS) == set(gpu_calls.TABLES)


def test_the_decode_cases_are_those_of_batch_invariant_serving():
    cells = {(case.B, case.S) for case in gpu.CASES if case.table == "decode"}
    assert cells == {(B, S) for B in (1, 8, 64) for S in (4096, 16384, 65536)}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("table", ["forward", "backward"])
def test_a_contender_that_fails_or_errs_has_its_reason_and_no_figure(table):
    contenders = [
        peers.Peer("right", right, backward=True),
        peers.Peer("wrong", wrong, backward=True),
        peers.Peer("broken", broken, backward=True),
        peers.Peer("refusing", refusing, backward=True),
        peers.Peer("forward only", right),
    ]
    (case,) = (case for case in gpu.CASES if case.table == table)
    row = gpu.run(case, [cpu.KERNEL], contenders)
    forward_only = {"forward only"} if table == "forward" else set()
    assert set(row.rate) == {"cpu", "right"} | forward_only
    assert row.refused == {"refusing": "not here"}
    assert row.failed["broken"] == "RuntimeError: no such"
    assert row.failed["wrong"].startswith("WrongResult: differs by")
    products = 4 * 2 * 64 * 64 * 16 * (0.5 if table == "forward" else 2.5)
    assert row.rate["cpu"] == pytest.approx(products / 1e9 / 2.0)


@pytest.mark.usefixtures("on_the_cpu")
def test_peers_of_a_script_take_part_and_the_run_is_saved(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "find", lambda: [peers.Peer("right", broken)])
    monkeypatch.setattr("lockstep.bench.results.processor", lambda run: "GPU")
    monkeypatch.setattr(
        "lockstep.bench.environment.versions", lambda: {"torch": "2", "python": "3", "triton": "3"}
    )
    added = [peers.Peer("right", right)]
    assert gpu_run.main([], as_json=True, more_peers=added, directory=tmp_path) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["rows"][0]["rate"].keys() == {"cpu", "right"}
    (saved,) = tmp_path.glob("gpu_*.json")
    assert json.loads(saved.read_text()) == run
    assert gpu_run.main(["forward"], more_peers=[peers.Peer("right", broken)]) == 0
    shown = capsys.readouterr().out
    assert "right: RuntimeError: no such" in shown
    assert "backward" not in shown


@pytest.mark.usefixtures("on_the_cpu")
def test_a_wrong_result_of_ours_ends_with_status_1(monkeypatch):
    monkeypatch.setattr("lockstep.attention", lambda q, k, v, **_: torch.zeros_like(q))
    monkeypatch.setattr(peers, "find", list)
    monkeypatch.setattr(results, "where", lambda run: "")
    assert gpu_run.main(["forward"]) == 1


def test_a_cell_without_a_figure_says_failed():
    rows = [
        {"case": "x", "ours": ["a"], "rate": {"a": 10.0}, "failed": {"b": "why"}},
        {"case": "y", "ours": ["a"], "rate": {"a": 11.0, "b": 12.0}, "failed": {}},
    ]
    made = show.gpu_table("t", rows)
    assert [column.header for column in made.columns] == ["t", "a", "b"]
    assert [str(cell) for cell in made.columns[2].cells] == ["failed", "12"]


def test_lengths_have_a_long_tail():
    lens = gpu_calls.long_tailed_lengths(64, 8192)
    assert lens == sorted(lens)
    assert 16 <= lens[0] < 20
    assert 7000 < lens[-1] <= 8192
    assert lens[32] < 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("table", list(gpu.UNITS))
def test_every_table_runs_on_a_gpu(table):
    sizes = {"forward": (256, 64, 4, 4, 2), "backward": (256, 64, 4, 4, 2)}
    sizes |= {"decode": (512, 128, 8, 2, 2), "varlen": (256, 64, 4, 4, 8)}
    case = gpu.Case(table, *sizes[table], causal=True)
    row = gpu.run(case, gpu.kernels(), peers.find()[:2], quick=True)
    assert "triton" in row.rate, row.failed
