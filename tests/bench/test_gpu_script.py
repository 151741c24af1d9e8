"""benchmarks/gpu_h200.py: who compiles what before the run."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

from lockstep.bench.contender import Contender

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_h200", ROOT / "benchmarks" / "gpu_h200.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nothing(*_):
    raise AssertionError("not to be called")


CONTENDERS = [
    Contender("hopper", nothing, backward=True, decode=nothing, varlen=nothing, kind="ours"),
    Contender("hopper, equal lengths", varlen=nothing, kind="bound"),
    Contender("FA2", nothing, backward=True),
    Contender("flex", nothing),
]


def test_every_build_is_made_once_before_lengths_repeat(script):
    options = argparse.Namespace(table=[], case=[])
    calls = script._calls(options, CONTENDERS, ("hopper", "flex"))
    assert {contender.name for _, contender in calls} == {"hopper", "flex"}
    builds = [(contender.name, case.table, case.D, case.causal) for case, contender in calls]
    n = len(set(builds))
    assert len(set(builds[:n])) == n
    assert len(set(calls)) == len(calls)


def test_no_contender_has_calls_that_it_refuses_or_memory_cannot_hold(script):
    calls = script._calls(argparse.Namespace(table=[], case=[]), CONTENDERS, ("hopper", "flex"))
    assert all(case.tokens <= script.MOST_TOKENS for case, _ in calls)
    assert {case.table for case, e in calls if e.name == "flex"} == {"forward", "small", "host"}
    assert {e.name for case, e in calls if case.table == "varlen"} == {"hopper"}
    assert ("decode", 8) in {(case.table, case.B) for case, e in calls if e.name == "hopper"}


def test_one_process_claims_a_call(script, tmp_path):
    assert script.claim(tmp_path / "others_3")
    assert not script.claim(tmp_path / "others_3")
    assert script.claim(tmp_path / "FA4_3")


def test_flex_is_left_out_where_it_would_only_compile(script):
    def prefill(q, k, v, causal):
        return lambda: q

    for S in script.FLEX_LENGTHS:
        q = torch.empty(1, 1, S, 64)
        assert script._at_some_lengths(prefill, q, q, q, True)() is q
    short = torch.empty(1, 1, 1024, 64)
    with pytest.raises(NotImplementedError, match="left out of this run"):
        script._at_some_lengths(prefill, short, short, short, True)
