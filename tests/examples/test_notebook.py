"""The notebook runs, and what it asserts holds here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "same_bits.ipynb"


@pytest.mark.slow
def test_every_cell_runs(capsys):
    pytest.importorskip("transformers")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {i}", "exec"), names)
    printed = capsys.readouterr().out
    assert "Lockstep: 0 of 512 numbers differ" in printed
    assert "lockstep  0 of" in printed
