"""Results files, and the README tables made from them."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest

from lockstep.bench import tables
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[2]

RUN = {
    "suite": "cpu",
    "date": "2026-01-02",
    "environment": {
        "hardware": {"cpu": "Fast(R) CPU(TM) 9 @ 3GHz", "simd": "AVX2"},
        "versions": {"torch": "2.13.0", "python": "3.12.1"},
        "threads": 2,
        "commit": {"hash": "0123456789abcdef", "dirty": False},
    },
    "rows": [
        {
            "case": "fp32 forward",
            "shape": "H8 S2048 D64",
            "ms": {"lockstep": 123.4, "SDPA": 246.8},
            "speed": 2.0,
            "against": "SDPA",
            "gflops": 69.6,
        }
    ],
    "roof_gflops": 80.0,
}


def run_with(**changes):
    run = copy.deepcopy(RUN)
    run.update(changes)
    return run


def test_the_readme_has_the_table():
    """`test_ladder_tables.py` holds all of README against the results."""
    assert "<!-- bench:cpu -->" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_commits_outside_the_history_are_marked():
    """The line below a table says so: what it shows cannot be built again."""
    command = ("git", "-C", str(ROOT), "rev-list", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or (ROOT / ".git" / "shallow").exists():
        pytest.skip("the history is not here")
    history = done.stdout.split()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        commit = json.loads(path.read_text(encoding="utf-8"))["environment"]["commit"]
        is_known = any(known.startswith(commit["hash"]) for known in history)
        assert commit.get("in_history", True) == is_known, path.name


def test_a_file_is_named_after_what_was_measured(tmp_path):
    path = results.save(RUN, tmp_path / "results")
    assert path.name == "cpu_fast-cpu-9-3ghz_2026-01-02_0123456.json"
    assert results.latest("cpu", path.parent) == [RUN]


def test_the_newest_run_of_each_processor_counts(tmp_path):
    old, new = run_with(date="2025-12-31"), run_with(date="2026-01-03")
    other = run_with(environment=copy.deepcopy(RUN["environment"]))
    other["environment"]["hardware"]["cpu"] = "Another"
    for run in (new, old, other, run_with(suite="other", date="2027-01-01")):
        results.save(run, tmp_path)
    assert results.latest("cpu", tmp_path) == [other, new]


def test_filling_touches_marked_blocks_alone(tmp_path):
    results.save(RUN, tmp_path)
    text = "before <!-- bench:cpu -->\nstale\n<!-- /bench:cpu --> after <!-- bench:none -->"
    filled = tables.fill(text, tmp_path)
    assert filled.startswith("before <!-- bench:cpu -->\n| case |")
    assert filled.endswith("<!-- /bench:cpu --> after <!-- bench:none -->")
    assert "stale" not in filled
    assert "| fp32 forward | H8 S2048 D64 | 123 ms | 247 ms | 2.00× | SDPA |" in filled
    assert "commit 0123456." in filled
    assert tables.fill(filled, tmp_path) == filled


def test_rows_of_matrix_units_have_no_share_of_the_roof():
    run = copy.deepcopy(RUN)
    assert tables.cpu_table(run).endswith("| 2.00× | SDPA | 87% |")
    run["rows"][0]["kernel"] = "amx"
    assert tables.cpu_table(run).endswith("| 2.00× | SDPA | – |")
    run["rows"][0]["kernel"] = "cpu"
    assert tables.cpu_table(run).endswith("| 87% |")


def test_an_unknown_block_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="tpu"):
        tables.fill("<!-- bench:tpu --><!-- /bench:tpu -->", tmp_path)


def test_local_changes_are_confessed():
    run = copy.deepcopy(RUN)
    run["environment"]["commit"]["dirty"] = True
    assert results.where(run).endswith("commit 0123456 with local changes")
    run["environment"]["commit"] = {"hash": "0123456789abcdef", "in_history": False}
    assert results.where(run).endswith("commit 0123456 outside this history")


@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_the_script_writes_or_checks(tmp_path, monkeypatch, arguments):
    results.save(RUN, tmp_path / results.RESULTS)
    readme = tmp_path / "README.md"
    stale = "<!-- bench:cpu --><!-- /bench:cpu -->"
    readme.write_text(stale)
    monkeypatch.setattr(results, "checkout", lambda: tmp_path)
    assert tables.main(arguments) == len(arguments)
    assert (readme.read_text() == stale) == bool(arguments)
