"""Loops whose rounds run all at once: the same bits, counts and hazards as one by one."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep import simt
from lockstep.simt import Constant, cuda, float16, float32, int32
from lockstep.simt.machine import gathers
from lockstep.simt.machine.control import Control

THREADS, N = 64, 24


@simt.kernel
def products(
    x: float32[:, :],
    y: float32[:, :],
    out: float32[:, :],
    rounds: int32,
    CASE: Constant,
    DTYPE: Constant,
):
    """out = x @ y in shared memory, and the largest of a row."""
    a = cuda.shared.array((N, N), float32)
    b = cuda.shared.array((N, N + 1), DTYPE)
    t = cuda.threadIdx.x
    for i in range(t, N * N, THREADS):
        if CASE != "unwritten" or i > 0:
            a[i // N, i % N] = x[i // N, i % N]
        b[i // N, i % N] = DTYPE(y[i // N, i % N])
    if CASE != "race":
        cuda.syncthreads()
    for row in range(N):
        for col in range(t, N, THREADS):
            total = 0.5
            for k in range(rounds):
                total += a[row, k] * b[k, col]
            most = -1e30
            for k in range(rounds):
                most = max(most, a[row, k])
            if CASE == "later":
                a[row, col] = total
            out[row, col] = total + most


def trace(monkeypatch, at_once: bool, case: str, dtype, rounds: int):
    used = []
    count = gathers._count
    monkeypatch.setattr(gathers, "_count", lambda *a: (used.append(1), count(*a)))
    monkeypatch.setattr(Control, "gathers", at_once)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    out = np.zeros((N, N), np.float32)
    found = products[1, THREADS](x, y, out, rounds, case, dtype).to_json()
    found.pop("seconds")
    return found, out.tobytes(), len(used)


@pytest.mark.parametrize("dtype", [float32, float16])
@pytest.mark.parametrize("case", ["plain", "race", "later", "unwritten"])
def test_the_same_as_one_by_one(monkeypatch, case, dtype):
    one, bits, none = trace(monkeypatch, False, case, dtype, N)
    all_, same_bits, used = trace(monkeypatch, True, case, dtype, N)
    assert none == 0
    assert (used > 0) == (case != "race")
    assert bits == same_bits
    assert one == all_
    assert bool(all_["hazards"]) == (case != "plain")


def test_rounds_beyond_the_array_run_one_by_one(monkeypatch):
    one, bits, _ = trace(monkeypatch, False, "plain", float32, N + 2)
    all_, same_bits, used = trace(monkeypatch, True, "plain", float32, N + 2)
    assert used == 0
    assert (one, bits) == (all_, same_bits)
    assert {hazard["kind"] for hazard in all_["hazards"]} >= {"out of bounds"}
