"""How a forward is cut into units on the CPU: all rows, whole tiles, enough for all threads."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from lockstep import forks
from lockstep.kernels.cpu import units
from lockstep.kernels.cpu.arithmetic.block import ROWS
from lockstep.kernels.cpu.arithmetic.narrow import NARROW
from lockstep.kernels.cpu.compiler.vectors import LANES


@pytest.fixture(autouse=True)
def sixteen_threads(monkeypatch):
    monkeypatch.setattr(forks, "threads", lambda: 16)


@pytest.mark.parametrize("rows", [1, 47, 48, 49, 197, 384, 385, 1024, 5000])
@pytest.mark.parametrize("step", [48, 144, 384])
def test_units_of_a_head_are_whole_tiles_of_about_the_same_number(rows, step):
    n_units = -(-rows // step)
    firsts = [units._first_row.py_func(rows, i, step) for i in range(n_units)]
    ends = [*firsts[1:], -(-rows // LANES) * LANES]
    tiles = [(end - first) / LANES for first, end in zip(firsts, ends, strict=True)]
    assert firsts[0] == 0
    assert all(n == int(n) for n in tiles)
    assert min(tiles) >= 1
    assert max(tiles) - min(tiles) <= 1
    assert max(tiles) * LANES <= step
    assert units.has_narrow(rows, step) == (rows - firsts[-1] <= NARROW)


@pytest.mark.parametrize(("rows", "heads"), [(1024, 8), (2048, 8), (512, 8), (256, 8), (512, 12)])
def test_threads_wait_little_for_the_last_units(rows, heads):
    cut = units.choose_cut([rows], [rows], heads, 64)
    assert not cut.split
    rounds = -(-cut.n_units // 16)
    assert cut.n_units >= 0.75 * 16 * rounds


def test_many_units_are_large():
    assert units.choose_cut([2048] * 4, [2048] * 4, 32, 64) == (ROWS, 4 * 32 * 6, False)


def test_spans_are_shared_out_where_rows_are_few():
    assert units.choose_cut([64], [16384], 1, 64).split
    assert not units.choose_cut([64], [200], 1, 64).split


def test_spans_are_not_shared_out_where_their_parts_would_be_large(monkeypatch):
    monkeypatch.setattr(units, "WORKSPACE_LIMIT", 1000)
    assert not units.choose_cut([64], [16384], 1, 64).split


def test_nothing_is_cut_into_nothing():
    assert units.choose_cut([], [], 4, 64).n_units == 0
    assert units.choose_cut([0, 0], [5, 7], 4, 64).n_units == 0
