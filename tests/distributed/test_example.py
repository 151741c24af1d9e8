from __future__ import annotations

import os
import subprocess
import sys

import pytest
from worlds import SOURCE, results_of, run_world

EXAMPLE = SOURCE.parent / "examples" / "context_parallel.py"


def test_a_process_of_no_group_is_told_how_to_start_one():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**environment, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "torchrun --nproc-per-node 2 examples/context_parallel.py" in line


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one():
    """`test_audit.py` has processes that torchrun starts."""
    (status, printed), (other, _) = results_of(run_world(2, "script", str(EXAMPLE)))
    assert status == other == 0, printed
    assert "Every bit is the same." in printed
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.endswith("=")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 12
