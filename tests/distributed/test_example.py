from __future__ import annotations

import os
import subprocess
import sys

import pytest
from worlds import SOURCE

EXAMPLE = SOURCE.parent / "examples" / "context_parallel.py"


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one():
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE))
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "Every bit is the same." in ended.stdout
    losses = [float(line.split()[3]) for line in ended.stdout.splitlines() if line.endswith("=")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 12
