"""`lockstep bench gpu --suite models`: what is chosen, summarised, printed and saved."""

from __future__ import annotations

import json

import pytest
import torch
from scaled_down import scaled_down
from typer.testing import CliRunner

from lockstep import cli
from lockstep.bench import gpu, timing
from lockstep.bench.models import cases, measure, run, summary, sustained
from lockstep.bench.models.contender import NAME, Contender, ours
from lockstep.output import results

runner = CliRunner()


def row(kind, case, speed, best="FA3"):
    figures = {NAME: 10 * speed, best: 10.0}
    return {
        "kind": kind,
        "case": case,
        "unit": "TFLOP/s",
        "ours": [NAME],
        "peers": [best],
        "chosen": "hopper",
        "best_peer": best,
        "ms": figures,
        "rate": figures,
        "speed": {NAME: speed},
        "error": {},
        "failed": {},
        "refused": {},
    }


def test_the_summary_has_means_by_kind_and_the_worst():
    rows = [row("forward", f"f{i}", speed) for i, speed in enumerate((0.5, 2.0, 0.8, 1.25))]
    rows += [row("decode", f"d{i}", 0.9 + i / 10) for i in range(3)]
    alone = row("backward", "nobody else", 1.0) | {"speed": {}}
    found = summary.summarize([*rows, alone])
    assert set(found["kinds"]) == {"forward", "decode"}
    assert found["kinds"]["forward"] == {"cases": 4, "mean": 1.0, "least": 0.5, "below": 2}
    assert [w["case"] for w in found["worst"]] == ["f0", "f2", "d0", "d1", "d2"]


def test_cases_are_chosen_by_pattern_and_kind():
    assert cases.choose() == list(cases.CASES)
    assert {case.kind for case in cases.choose("llama", ["decode"])} == {"decode"}
    assert {case.model for case in cases.choose("gpt-oss|phi-2")} == {"gpt-oss", "Phi-2"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "banana"], "--suite takes tables or models, got 'banana'"),
        (["--only", "Llama"], "go with --suite models"),
        (["--suite", "models", "--table", "forward"], "--table goes with --suite tables"),
        (["--suite", "models", "--kinds", "sideways"], "--kinds takes forward, backward, decode"),
        (["--suite", "models", "--only", "("], "--only takes a regular expression, got '('"),
        (["--suite", "models", "--only", "nothing"], "no case has it"),
        (["--suite", "models", "--sustained", "0"], "--sustained takes a number of seconds above"),
    ],
)
def test_bad_options_are_usage_errors(options, said):
    result = runner.invoke(cli.app, ["bench", "gpu", *options])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_no_gpu_is_said_plainly():
    result = runner.invoke(cli.app, ["bench", "gpu", "--suite", "models"])
    assert result.exit_code == 2
    assert "no CUDA device here" in result.stderr


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Two cases in little, on the CPU; Lockstep takes 2 ms, a peer 3, and one peer fails."""
    little = [scaled_down(case) for case in cases.choose("gpt-oss local, (prefill|training)")]
    monkeypatch.setattr(cases, "CASES", tuple(little))
    monkeypatch.setattr(gpu, "kernels", list)
    monkeypatch.setattr(results, "processor", lambda run: "GPU")
    monkeypatch.setattr(
        "lockstep.environment.versions", lambda: {"torch": "2", "python": "3", "triton": "3"}
    )
    real = measure.admitted
    monkeypatch.setattr(measure, "admitted", lambda case, all_, _: real(case, all_, "cpu"))

    def broken(made):
        raise RuntimeError("no such\nthing")

    same = Contender("same", ours()[0].prepare)
    monkeypatch.setattr(run.torch_peers, "find", lambda: [same, Contender("broken", broken)])
    monkeypatch.setattr(run.flash_peers, "find", list)

    def take_turns(calls, rounds):
        return timing.Timings({n: [2e-3 if n == NAME else 3e-3] * rounds for n in calls})

    monkeypatch.setattr(measure, "take_turns", take_turns)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_run_is_printed_and_saved(tmp_path, capsys):
    assert run.main(directory=tmp_path) == 0
    shown = capsys.readouterr().out
    assert "forward: 1.500× the best peer (geometric mean of 1 cases), 0 below 1" in shown
    assert "broken: RuntimeError: no such" in shown
    (saved,) = tmp_path.glob("models_gpu_*.json")
    kept = json.loads(saved.read_text())
    assert kept["summary"]["kinds"]["backward"]["mean"] == 1.5
    assert kept["missing"] == []
    page = summary.block(tmp_path)
    assert "| backward | 1 | 1.50 | 1.50 | 0 |" in page
    assert "| failed |" in page


@pytest.mark.usefixtures("on_the_cpu")
def test_json_is_for_a_script():
    result = runner.invoke(cli.app, ["bench", "gpu", "--suite", "models", "--json", "--quick"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["rounds"] == 3
    assert [r["kind"] for r in found["rows"]] == ["forward", "backward"]


def test_clocks_are_averaged_once_they_are_steady():
    lines = ["1980, 100.0, 30", "1980, 300.0, 40", "1500, 690.0, 60", "1600, 710.0, 62"]
    found = sustained.averages(lines)
    assert found == {"clock_mhz": 1550.0, "power_w": 700.0, "temperature_c": 61.0}
    assert sustained.averages([]) == {}
