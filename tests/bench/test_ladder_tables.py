"""Tables of the ladder in the README and in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.bench import ladder_tables, tables
from lockstep.ladder import RUNGS
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "hardware": {"gpus": ["NVIDIA X1"]},
    "versions": {"torch": "2.13.0"},
    "commit": {"hash": "0123456789abcdef", "dirty": False},
}
RUN = {
    "suite": "ladder",
    "date": "2026-01-02",
    "environment": ENVIRONMENT,
    "rows": [
        {"kernel": "naive", "shape": "B1 H1 S8 D32 float16", "microseconds": 12.345},
        {"kernel": "naive", "shape": "B1 H1 S9 D32 float16", "microseconds": None},
        {
            "kernel": "row_per_thread",
            "shape": "B1 H1 S8 D32 float16",
            "microseconds": 1500.0,
            "constant_time": True,
        },
    ],
}


# `make lint` asks the same.
@pytest.mark.slow
@pytest.mark.parametrize("page", tables.PAGES)
def test_the_pages_say_what_the_results_say(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    filled = tables.fill(text, ROOT / results.RESULTS)
    assert filled == text, "run: python -m lockstep.bench.tables"


def test_the_page_has_a_section_with_numbers_for_every_rung():
    text = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- bench:rung_(\w+) -->", text) == [rung.name for rung in RUNGS]
    for rung in RUNGS:
        assert f"\n## {rung.name}\n" in text


def test_times_by_problem(tmp_path):
    (tmp_path / "ladder-x1.json").write_text(json.dumps(RUN))
    lines = ladder_tables.gpu_block(tmp_path).splitlines()
    assert lines[0] == "| | B1 H1 S8 D32 | B1 H1 S9 D32 |"
    assert lines[2] == "| naive | 12.3 µs | – |"
    assert lines[3] == "| row_per_thread, constant-time | 1.5 ms | – |"
    assert lines[-1] == "fp16, NVIDIA X1, torch 2.13.0, 2026-01-02, commit 0123456."


def test_without_results_the_tables_say_so(tmp_path):
    assert ladder_tables.BLOCKS["ladder"](tmp_path) == "Not measured yet."
    assert ladder_tables.BLOCKS["ladder_counters"](tmp_path) == "Not measured yet."
    assert ladder_tables.BLOCKS["rung_naive"](tmp_path) == "Not counted yet."
