"""`lockstep audit distributed`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from worlds import SOURCE

AUDIT = ("-m", "lockstep.cli", "audit", "distributed", "--seq", "70", "--head-dim", "16", "--json")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        (sys.executable, *command), env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_two_ranks_under_torchrun():
    ended = run("-m", "torch.distributed.run", "--nproc-per-node", "2", *AUDIT)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ok"]
    assert found["ranks"] == 2
    # Three methods, two kinds of shards, five masks.
    assert len(found["cases"]) == 30
    assert found["not_audited"] == {}


def test_without_ranks_it_says_how_to_run_it():
    ended = run(*AUDIT)
    assert ended.returncode == 2
    assert "torchrun" in ended.stderr
