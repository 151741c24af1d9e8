"""Cases drawn at random: what a seed says, and that each can be made and checked."""

from __future__ import annotations

import pytest
import torch
from scaled_down import scaled_down

from lockstep.bench.models import cases, drawn, inputs, measure
from lockstep.bench.models.contender import NAME, ours

CASES = drawn.draw(1)


def test_a_seed_has_its_cases():
    assert drawn.draw(1) == CASES
    assert drawn.draw(2) != CASES
    assert {kind: sum(c.kind == kind for c in CASES) for kind in cases.KINDS} == drawn.SHARES


@pytest.mark.parametrize("seed", range(5))
def test_names_differ_and_sizes_fit(seed):
    made = drawn.draw(seed)
    assert len({case.name for case in made}) == len(made)
    for case in made:
        tensors = inputs.make(case, "meta").tensors
        assert sum(x.nbytes for x in (tensors.q, tensors.k, tensors.v)) < 8 * 2**30
        assert inputs.amount(case) > 0


@pytest.mark.parametrize("case", CASES[::20], ids=lambda case: case.name)
def test_in_little_it_is_right(case):
    torch.manual_seed(0)
    row, calls = measure.admitted(scaled_down(case), ours(), "cpu")
    assert list(calls) == [NAME], row.failed
