from __future__ import annotations

import pytest
from worlds import SOURCE, results_of, run_world

EXAMPLE = SOURCE.parent / "examples" / "context_parallel.py"


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one():
    """`test_audit.py` has processes that torchrun starts."""
    (status, printed), (other, _) = results_of(run_world(2, "script", str(EXAMPLE)))
    assert status == other == 0, printed
    assert "Every bit is the same." in printed
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.endswith("=")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 12
