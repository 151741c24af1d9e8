from __future__ import annotations

import importlib.util
import sys

import hypothesis.strategies as st
import repeatable_draws  # noqa: F401
from hypothesis import given, settings


def draws() -> list[int]:
    found = []

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**16))
    def draw(n):
        found.append(n)

    draw()
    return found


def test_draws_do_not_depend_on_the_modules_imported_before(tmp_path, monkeypatch):
    before = draws()
    path = tmp_path / "full_of_constants.py"
    path.write_text(f"CONSTANTS = {[7 * n + 1001 for n in range(500)]}\n")
    spec = importlib.util.spec_from_file_location("full_of_constants", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "full_of_constants", module)
    assert draws() == before
