"""The audit of constant time on a GPU: its clock and its counters find every planted leak."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
from lockstep.audit.timing import clock, counters, gpu_clock, subjects
from lockstep.audit.timing.gpu_leaks import GPU_LEAKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def times():
    return dict(gpu_clock.compare(subjects.leaks(), 5000))


@pytest.fixture(scope="module")
def differences():
    if not counters.is_available():
        pytest.skip("needs ncu of Nsight Compute on the path")
    return counters.differing(counters.count("leaks"))


@pytest.mark.parametrize("name", GPU_LEAKS)
def test_planted_leaks_show_in_the_time(name, times):
    assert abs(times[name][clock.ALL].t()) > clock.CLEAR


@pytest.mark.parametrize("name", GPU_LEAKS)
def test_planted_leaks_show_in_the_counters(name, differences):
    assert any(line.startswith("fixed: ") for line in differences[name])


def test_a_rung_in_constant_time_is_not_told_apart():
    mma = [subject for subject in subjects.rungs() if "block_tile_mma" in subject.name]
    [(_, times)] = gpu_clock.compare(mma, 5000)
    assert all(abs(each.t()) < clock.LIMIT for each in times.values())
