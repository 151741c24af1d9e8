"""Memory of the tensors of a rank, as PyTorch allocates it."""

from __future__ import annotations

import pytest
from worlds import results_of, run_world

METHODS = ("heads", "gather", "ring")
S = 3072


@pytest.mark.slow
def test_ring_and_heads_hold_a_share_of_the_sequence():
    """A ring holds three blocks at a time; on 2 ranks there are two, of twice the size."""
    of_two, of_four = (
        dict(zip(METHODS, results_of(run_world(P, "peaks", METHODS, S))[0], strict=True))
        for P in (2, 4)
    )
    assert of_four["heads"] < 0.7 * of_two["heads"]
    assert of_four["ring"] < 0.8 * of_two["ring"]
    assert of_four["gather"] > 1.5 * max(of_four["heads"], of_four["ring"])
