"""The audit of constant time: it finds planted leaks, and none in the constant-time builds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep.audit.timing import clock, code
from lockstep.audit.timing.leaks import LEAKS
from lockstep.audit.timing.secrets import CASES, CLASSES, fixed
from lockstep.cli import app
from lockstep.kernels.cpu import extras, forward

BY_STEPS = [name for name, leak in LEAKS.items() if leak.steps_differ]
reads_code = pytest.mark.skipif(not code.is_supported(), reason="the audit reads aarch64 only")


@reads_code
@pytest.mark.parametrize("name", BY_STEPS)
def test_planted_leaks_show_in_the_machine_code(name):
    found = code.audit(LEAKS[name].kernel)
    assert found
    assert "secret" in str(found[0])


@reads_code
@pytest.mark.parametrize("pair", [forward.RUNNERS[False, True], extras.KERNELS[1]])
def test_constant_time_kernels_have_no_finding(pair):
    assert code.audit(pair[1]) == []


@reads_code
def test_the_ordinary_kernel_branches_on_values():
    assert code.audit(forward.RUNNERS[False, True][0])


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["fcmp s0, s1", "b.eq .LBB0_1"], "branch"),
        (["ldr w8, [x0]", "cbz w8, .LBB0_1"], "branch"),
        (["fcvtzs x8, s0", "ldr s1, [x1, x8]"], "address"),
        (["ldrh w8, [x0]", "str x8, [sp, #8]", "ldr x9, [sp, #8]", "cbnz x9, .LBB0_1"], "branch"),
        (["fmov w8, s0", "add x9, x8, #1", "cmp x9, x2", "b.lt .LBB0_1"], "branch"),
        # A secret from the end of a loop, at its beginning.
        ([".LBB0_2:", "cbz x8, .LBB0_1", "fcvtzs x8, s0", "b .LBB0_2"], "branch"),
        (["ldr x8, [x0]", "cbz x8, .LBB0_1"], None),
        (["fcmp s0, s1", "cmp x0, x1", "b.eq .LBB0_1"], None),
        (["fcmp s0, s1", "fcsel s2, s0, s1, eq", "str s2, [x0]"], None),
    ],
)
def test_instructions(lines, why):
    text = "\n".join(
        ["f:", *("\t" + x.replace(" ", "\t", 1) if ":" not in x else x for x in lines)]
    )
    found = code.findings("f", text + "\n.LBB0_1:\n\tret\n")
    assert [why in x.why for x in found] == ([] if why is None else [True])


@pytest.mark.parametrize("name", LEAKS)
def test_planted_leaks_show_in_the_time(name):
    leak = LEAKS[name]
    # Other processes may disturb a run, so it gets more chances.
    found = (abs(clock.compare(leak.run, leak.draw, leak.fix, 3000).t()) for _ in range(3))
    assert any(t > clock.CLEAR for t in found)


def test_equal_classes_are_not_told_apart():
    rng = np.random.default_rng(0)
    times = clock.Times(rng.normal(100, 5, 20_000), rng.random(20_000) < 0.5)
    assert abs(times.t()) < clock.LIMIT
    slower = clock.Times(times.ns + 2 * times.is_fixed, times.is_fixed)
    assert slower.t() > clock.CLEAR
    course = slower.course()
    assert course[-1] == (20_000, slower.t())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_class_runs_in_every_case(case):
    import torch

    drawn = case.draw(torch.Generator().manual_seed(0))
    for name in CLASSES:
        assert case.run(fixed(name, drawn)).shape == (1, 2, case.Sq, case.D)


def run(*arguments: str):
    return CliRunner().invoke(app, ["audit", "timing", *arguments])


def test_the_command_takes_what_it_says():
    for arguments in (("--layer", "none"), ("--samples", "10"), ("--device", "tpu")):
        assert run(*arguments).exit_code == 2


def test_the_command_fails_where_a_secret_shows(monkeypatch):
    # Real times of planted leaks, held to the limit of kernels without one.
    monkeypatch.setattr(clock, "CLEAR", float("inf"))
    done = run("--layer", "time", "--planted", "--samples", "1000", "--json")
    assert done.exit_code == 1
    outcomes = json.loads(done.stdout)["outcomes"]
    assert {x["name"] for x in outcomes} == set(LEAKS)
    assert not any(x["ok"] for x in outcomes)
