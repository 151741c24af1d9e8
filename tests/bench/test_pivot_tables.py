"""Tables that results files describe themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.bench import pivot_tables, tables
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[2]
RUN = {
    "suite": "study",
    "date": "2026-01-02",
    "environment": {
        "hardware": {"gpus": ["NVIDIA X1"]},
        "versions": {"torch": "2.13.0"},
        "commit": None,
    },
    "tables": {
        "designs": {
            "where": {"run": 1},
            "columns": {
                "before": {"design": "a"},
                "after": [{"design": "b", "causal": True}, {"design": "c", "causal": False}],
                "cuDNN": {"design": "cuDNN"},
            },
            "bold": "max",
            "bold_among": ["before", "after"],
            "caption": "TFLOP/s, bf16",
        },
        "moves": {
            "of": "profile",
            "by": ["what moves"],
            "columns": {"D 64": {}},
            "value": "bytes",
            "format": "{:,.0f}",
            "caption": "Bytes",
        },
    },
    "rows": [
        {"run": 1, "D": 64, "S": 4096, "causal": True, "design": "a", "tflops": 400.4},
        {"run": 1, "D": 64, "S": 4096, "causal": True, "design": "b", "tflops": 399.6},
        {"run": 1, "D": 64, "S": 4096, "causal": True, "design": "cuDNN", "tflops": 500.0},
        {"run": 1, "D": 64, "S": 4096, "causal": False, "design": "b", "tflops": 1.0},
        {"run": 1, "D": 64, "S": 4096, "causal": False, "design": "c", "tflops": 321.0},
        {"run": 2, "D": 64, "S": 4096, "causal": False, "design": "a", "tflops": 2.0},
        {"run": 1, "S": 4096, "causal": False, "design": "a", "tflops": 3.0},
    ],
    "profile": [{"what moves": "dS", "bytes": 12345}, {"what moves": "dQ", "bytes": 2.4}],
}


def render(directory: Path, name: str) -> str:
    return pivot_tables.render(*pivot_tables.find(directory)[name])


def test_lines_by_problem_and_columns_by_design(tmp_path):
    results.write(RUN, tmp_path / "study.json")
    assert render(tmp_path, "designs").splitlines() == [
        "| D, S | causal | before | after | cuDNN |",
        "|---|---|---:|---:|---:|",
        "| 64, 4k | no | – | **321** | – |",
        "| 64, 4k | yes | **400** | **400** | 500 |",
        "",
        "TFLOP/s, bf16, NVIDIA X1, torch 2.13.0, 2026-01-02.",
    ]


def test_lines_by_name_keep_the_order_of_the_file(tmp_path):
    results.write(RUN, tmp_path / "study.json")
    assert render(tmp_path, "moves").splitlines()[2:4] == [
        "| dS | 12,345 |",
        "| dQ | 2 |",
    ]


def test_the_newest_file_with_a_table_has_it(tmp_path):
    results.write(RUN, tmp_path / "b.json")
    results.write({**RUN, "date": "2026-01-03"}, tmp_path / "a.json")
    assert "2026-01-03" in render(tmp_path, "designs")


def test_a_block_that_no_file_describes_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="nothing"):
        tables.fill("<!-- bench:nothing --><!-- /bench:nothing -->", tmp_path)


def test_every_table_that_is_described_stands_on_a_page():
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in tables.PAGES)
    for name in pivot_tables.find(ROOT / results.RESULTS):
        assert f"<!-- bench:{name} -->" in pages


def test_a_table_that_takes_the_place_of_another_has_its_columns():
    """Two studies that call different tables by one name would show one of them in both places."""
    directory = ROOT / results.RESULTS
    shown = pivot_tables.find(directory)
    for path in directory.glob("*.json"):
        described = json.loads(path.read_text(encoding="utf-8")).get("tables", {})
        for name, description in described.items():
            assert description["columns"].keys() <= shown[name][0]["columns"].keys(), path.name
