"""The speed table is the one that was promised, and wrong results are not timed."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from lockstep.bench import cpu, timing
from lockstep.bench.timing import Timings
from lockstep.kernels.cpu import roof
from lockstep.kernels.cpu.compiler.vectors import WIDTH


def test_every_case_has_a_goal_and_a_name_of_its_own():
    assert len({(case.name, case.shape) for case in cpu.CASES}) == len(cpu.CASES)
    for case in cpu.CASES:
        assert 0 < case.at_least < case.aim


def test_16_bit_is_held_against_our_own_fp32_of_the_same_shape():
    shapes = {
        dtype: [(c.Hq, c.Sq, c.D, c.causal) for c in cpu.CASES if c.name.startswith(dtype)][:4]
        for dtype in cpu.DTYPES
    }
    assert shapes["fp32"] == shapes["bf16"] == shapes["fp16"]
    for case in cpu.CASES:
        prefill = case.dtype != "fp32" and case.Sq > 1
        assert (case.against == cpu.LOCKSTEP_FP32) == prefill


def test_what_matrix_units_run_is_held_against_sdpa(monkeypatch):
    case = next(case for case in cpu.CASES if case.name == "bf16 causal")
    case = dataclasses.replace(case, Sq=32, Skv=32)
    for kernel, against in (("amx", cpu.SDPA), ("cpu", cpu.LOCKSTEP_FP32)):
        chosen = SimpleNamespace(kernel=kernel)
        monkeypatch.setattr("lockstep.explain", lambda *_, chosen=chosen, **__: chosen)
        row = cpu.run(case, rounds=1).as_json()
        assert row["against"] == against
        assert row["at_least"] == (1.0 if kernel == "amx" else round(1 / 1.3, 3))
        assert set(row["ms"]) == {cpu.LOCKSTEP, cpu.SDPA, against}


@pytest.mark.parametrize("name", ["fp32 causal", "decode, grouped", "window (256, 0)"])
def test_sdpa_computes_the_same_thing(name):
    case = next(case for case in cpu.CASES if case.name == name)
    case = dataclasses.replace(case, Sq=min(case.Sq, 300), Skv=300)
    row = cpu.run(case, rounds=1)
    assert row.kernel == "cpu"
    assert set(row.timings.seconds) == {cpu.LOCKSTEP, cpu.SDPA}


def test_nan_is_a_wrong_result(monkeypatch):
    case = dataclasses.replace(cpu.CASES[0], Sq=16, Skv=16)
    monkeypatch.setattr("lockstep.attention", lambda q, k, v, **_: torch.full_like(q, float("nan")))
    with pytest.raises(timing.WrongResult, match="fp32 forward, H8 S16 D64: off by"):
        cpu.run(case, rounds=1)


def test_a_row_reports_medians_in_milliseconds():
    timings = Timings({cpu.LOCKSTEP: [0.1, 0.3, 0.2], cpu.SDPA: [0.4, 0.6, 0.4]})
    row = cpu.Row(cpu.CASES[0], "cpu", timings).as_json()
    assert row["ms"] == {"lockstep": 200.0, "SDPA": 400.0}
    assert row["speed"] == 2.0
    assert row["rounds"] == 3


def test_operations_are_those_of_the_pairs_that_a_mask_leaves():
    for case in cpu.CASES:
        small = dataclasses.replace(case, Sq=min(case.Sq, 300), Skv=300)
        seen = torch.ones(small.Sq, small.Skv).bool()
        if small.causal:
            seen = seen.tril()
        if small.window is not None:
            seen = cpu._window_mask(small.Sq, *small.window)
        products = 7 if small.backward else 2
        assert small.operations == 2 * products * small.Hq * small.D * int(seen.sum())


def test_the_roof_counts_two_operations_for_each_multiply_add():
    ticks = itertools.count(0.0, 2.0)
    operations = 2 * torch.get_num_threads() * roof.STEPS * roof.CHAINS * WIDTH
    assert roof.measure(lambda: next(ticks)) == operations / 2.0
