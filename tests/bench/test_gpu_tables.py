"""Tables of GPU runs, out of their results files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from lockstep.bench import gpu_tables, tables
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "hardware": {"cpu": "Fast(R) CPU(TM) 9 @ 3GHz", "simd": "AVX2", "gpus": ["NVIDIA X1"]},
    "versions": {"torch": "2.13.0", "python": "3.12.1", "triton": "3.6.0"},
    "threads": 2,
    "commit": {"hash": "0123456789abcdef", "dirty": False},
}


def row(table, case, rate, *, D=64, S=4096, B=4, causal=False, chosen="hopper", **more):
    """A row whose times are such that 1 ms makes a rate of 100."""
    ours = [name for name in rate if name.startswith(("hopper", "triton")) and "equal" not in name]
    theirs = [name for name in rate if name.startswith(("FA", "cuDNN", "flex"))]
    unit = {"decode": "GB/s", "small": "µs"}.get(table, "TFLOP/s")
    ms = {name: value / 1e3 if unit == "µs" else 100 / value for name, value in rate.items()}
    best = min(theirs, key=ms.__getitem__, default=None)
    return {
        "table": table,
        "case": case,
        "unit": unit,
        "B": B,
        "S": S,
        "D": D,
        "causal": causal,
        "ours": ours,
        "peers": [*theirs, *more.get("failed", {})],
        "chosen": chosen,
        "best_peer": best,
        "ms": ms,
        "rate": rate,
        "speed": {name: round(ms[best] / ms[name], 3) for name in ours if best},
        "error": dict.fromkeys((*ours, *theirs), 0.25 if table == "decode" else 0.123),
        "failed": more.get("failed", {}),
    }


RUN = {
    "suite": "gpu",
    "date": "2026-01-02",
    "environment": ENVIRONMENT,
    "rounds": 8,
    "peers": {"FA2": "", "FA3": "", "cuDNN": "9.1.0", "flex": ""},
    "missing": ["backward: D 64, S 4k"],
    "rows": [
        row("forward", "D 64, S 4k, causal", {"hopper": 380.0, "cuDNN": 400.0}, causal=True),
        row(
            "forward",
            "D 64, S 4k",
            {"hopper": 500.0, "triton": 350.0, "cuDNN": 400.0, "FA2": 300.0},
            failed={"flex": "WrongResult: out is off"},
        ),
        row("small", "B 4, S 1024", {"hopper": 30.0, "cuDNN": 36.0}, S=1024),
        row(
            "decode",
            "B 8, 4k keys",
            {"triton": 2000.0, "FA3": 2500.0, "FA3 one split": 1000.0},
            chosen="triton",
            B=8,
            D=128,
        ),
        row(
            "decode", "B 1, 4k keys", {"triton": 1234.5, "FA3": 900.0}, chosen="triton", B=1, D=128
        ),
        row("varlen", "packed", {"triton": 300.0, "triton, equal lengths": 400.0}, chosen="triton"),
    ],
}


@pytest.fixture
def directory(tmp_path):
    path = results.save(RUN, tmp_path)
    assert path.name == "gpu_nvidia-x1_2026-01-02_0123456.json"
    return tmp_path


def test_the_readme_shows_what_is_chosen_beside_the_best_peer(directory):
    block = gpu_tables.summary(directory)
    line = "| D 64, S 4k | **500 (1.25× cuDNN)** | 380 (0.95× cuDNN) | – | – |"
    assert line in block.splitlines()
    assert "| batch 1 | **1,234 (1.37× FA3)** |" in block
    assert "| batch 8 | 2,000 (0.80× FA3) |" in block
    assert "| B 4, S 1024 | **30.0 µs (1.20× cuDNN)** |" in block
    assert "| packed | 300 TFLOP/s |" in block


def test_a_caption_says_where_and_what_is_missing(directory):
    last = gpu_tables.summary(directory).splitlines()[-1]
    assert "medians of 8 rounds" in last
    assert "no error is above 25 % of what the error rule allows" in last
    assert "no error is above 13 %" in gpu_tables.BLOCKS["hopper_forward"](directory)
    assert "NVIDIA X1, Triton 3.6.0, torch 2.13.0" in last
    assert "commit 0123456, cuDNN 9.1.0. Not in this run: backward: D 64, S 4k." in last
    assert "Not in this run" not in gpu_tables.BLOCKS["hopper_forward"](directory)
    dirty = copy.deepcopy(RUN)
    dirty["environment"]["commit"]["dirty"] = True
    assert "0123456 with local changes" in gpu_tables.caption(dirty)


def test_a_page_on_a_kernel_shows_every_peer_and_what_went_wrong(directory):
    lines = gpu_tables.BLOCKS["hopper_forward"](directory).splitlines()
    assert lines[0] == "| forward, TFLOP/s | hopper | cuDNN | FA2 | flex | hopper / best peer |"
    assert lines[2] == "| D 64, S 4k | **500** | 400 | 300 | wrong | 1.25 |"
    assert lines[3] == "| D 64, S 4k, causal | 380 | **400** | – | – | 0.95 |"
    assert lines[5] == "| small, µs | hopper | cuDNN | hopper / best peer |"
    assert lines[7] == "| B 4, S 1024 | **30.0** | 36.0 | 1.20 |"


def test_ratios_are_to_the_peers_a_page_names(directory):
    forward = gpu_tables.BLOCKS["triton_forward"](directory).splitlines()
    heads = "| forward, TFLOP/s | triton | FA2 | flex | triton / FA2 | triton / flex |"
    assert forward[0] == heads
    assert forward[2] == "| D 64, S 4k | **350** | 300 | wrong | 1.17 | – |"
    decode = gpu_tables.BLOCKS["triton_decode"](directory).splitlines()
    assert decode[2] == "| B 1, 4k keys | **1,234** | 900 | – | 1.37 | – |"
    assert decode[3] == "| B 8, 4k keys | 2,000 | **2,500** | 1,000 | 0.80 | 2.00 |"
    packed = gpu_tables.BLOCKS["varlen"](directory).splitlines()
    assert packed[2] == "| packed | **300** | 400 | 0.75 |"


def test_a_page_on_a_kernel_shows_the_newest_run_that_it_took_part_in(directory):
    later = copy.deepcopy(RUN)
    later["date"] = "2026-01-03"
    for row in later["rows"]:
        row["ms"].pop("triton", None)
        row["rate"].pop("triton", None)
    results.save(later, directory)
    assert "2026-01-02" in gpu_tables.BLOCKS["triton_forward"](directory)
    assert "| D 64, S 4k | **350** |" in gpu_tables.BLOCKS["triton_forward"](directory)
    assert "2026-01-03" in gpu_tables.BLOCKS["hopper_forward"](directory)


def test_without_results_the_blocks_say_so(tmp_path):
    for block in gpu_tables.BLOCKS.values():
        assert block(tmp_path) == "Not measured yet."


def test_every_page_has_blocks():
    """`test_ladder_tables.py` holds them against the results."""
    for page in tables.PAGES:
        assert tables.MARKED.search((ROOT / page).read_text(encoding="utf-8")), page


def test_each_table_is_of_the_newest_run_that_has_it(tmp_path):
    packed = row("varlen", "D 64, long tail", {"hopper": 321.0, "FA3": 300.0})
    later = {**copy.deepcopy(RUN), "time": "23:59", "missing": [], "rows": [packed]}
    later["environment"]["commit"]["hash"] = "fedcba9876543210"
    results.write({**RUN, "time": "00:01"}, tmp_path / "a.json")
    results.write(later, tmp_path / "b.json")
    (parts,) = gpu_tables.current(tmp_path)
    assert [{r["table"] for r in part["rows"]} & {"varlen", "forward"} for part in parts] == [
        {"forward"},
        {"varlen"},
    ]
    readme = gpu_tables.summary(tmp_path)
    assert "321 TFLOP/s" in readme
    assert "commit 0123456" in readme
    assert "varlen: bf16" in readme
    assert "commit fedcba9" in readme
    assert "fedcba9" not in gpu_tables.BLOCKS["hopper_forward"](tmp_path)
    assert "0123456" not in gpu_tables.BLOCKS["varlen"](tmp_path)
