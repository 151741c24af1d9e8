"""Pictures of what a block holds are those of attention."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.ladder import RUNGS, run_on_machine
from lockstep.report.layouts import matrices
from lockstep.report.tile_steps import LAST, NOTHING, drawn, encoded, rung_steps
from lockstep.simt.machine.records.recording import Snapshot


def last_state(rung, problem, tensors):
    """Everything block 0 of the first launch holds before it writes."""
    _, traces = run_on_machine(rung, problem, tensors, record=0)
    recording = traces[0].recording
    held = {}
    for snapshot in recording.snapshots:
        if snapshot.phase not in LAST:
            held |= snapshot.arrays
    return matrices(traces[0].kernel, held, recording.spaces)


LAST_TILE_FIRST = ("block_tile", "block_tile_mma", "persistent_mma")


@pytest.mark.slow
@pytest.mark.parametrize("name", [r.name for r in RUNGS if r.name != "naive"])
def test_m_l_and_acc_are_those_of_the_keys_seen(name):
    rung, problem = drawn(name)
    if name == "large_tile":
        problem = replace(problem, S=118)  # a second tile with fewer keys: it is slow
    tensors = problem.draw()
    held = last_state(rung, problem, tensors)
    count = min(len(held["acc"]), problem.S)
    # a split has four tiles of eight keys
    rows = slice(-count, None) if name in LAST_TILE_FIRST else slice(0, count)
    keys = 32 if name == "split_kv" else problem.S
    q, k, v = (x[0, 0].double() for x in tensors[:3])
    scores = q[rows] @ k[:keys].T * problem.scale
    weights = torch.exp(scores)
    acc, m, l = (held[n].reshape(len(held[n]), -1)[:count] for n in ("acc", "m", "l"))
    acc = acc[:, : problem.D].astype(np.float64)
    total = l[:, 0] * np.exp2(m[:, 0].astype(np.float64))
    np.testing.assert_allclose(total, weights.sum(1).numpy(), rtol=2e-3)
    wanted = (weights @ v[:keys] / weights.sum(1, keepdim=True)).numpy()
    np.testing.assert_allclose(acc / l[:, :1], wanted, atol=4e-3)


def test_steps_follow_the_phases_and_name_the_tile():
    found = rung_steps("small_tile_2d")
    assert [step["phase"] for step in found["steps"]] == [
        "load q",
        *["load kv", "scores", "softmax", "output"] * 2,
        "write",
    ]
    assert [step["tile"] for step in found["steps"]] == [0, *[1] * 4, *[2] * 5]
    roles = [array["role"] for array in found["arrays"]]
    assert roles == ["Q", "K", "V", "S, then P", "m", "l", "acc", "out"]
    sizes = {array["role"]: (array["rows"], array["columns"]) for array in found["arrays"]}
    assert sizes["Q"] == (45, 32)  # without the padding of its rows
    assert sizes["S, then P"] == (45, 90)
    changed = [sorted(step["changed"]) for step in found["steps"]]
    assert changed[1] == ["k_tile", "v_tile"]
    assert changed[4] == ["acc"]


def test_values_become_bytes():
    array = np.array([[0.0, 2.0], [-np.inf, np.nan], [-2.0, 1.0]])
    steps = [("kernel", Snapshot("fill", 1, {}), {"x": array})]
    found = encoded(steps, {"x": "shared"}, {"x": "x"})
    (step,) = found["steps"]
    picture = step["changed"]["x"]
    assert picture["scale"] == 2
    assert list(base64.b64decode(picture["codes"])) == [100, 200, 254, NOTHING, 0, 150]
