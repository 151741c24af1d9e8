"""What a results file says about where it was measured."""

from __future__ import annotations

import json

import pytest

from lockstep.environment import Commit, current_commit
from lockstep.output import results


@pytest.mark.parametrize(
    ("said", "commit"),
    [("0123abc", Commit("0123abc", dirty=False)), ("0123abc-dirty", Commit("0123abc", dirty=True))],
)
def test_a_copy_of_a_checkout_is_what_the_caller_says(monkeypatch, said, commit):
    monkeypatch.setenv("LOCKSTEP_COMMIT", said)
    assert current_commit() == commit


def test_a_run_on_a_gpu_takes_the_place_of_the_one_before(tmp_path):
    run = {"environment": {"hardware": {"gpus": ["NVIDIA X1"]}}, "rows": [1]}
    path = results.save_for_gpu(run, "ladder", tmp_path)
    assert path == results.save_for_gpu({**run, "rows": [2]}, "ladder", tmp_path)
    assert path.name == "ladder-x1.json"
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == [2]
