"""Tables and the picture of the audits of constant time."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from lockstep.bench import constant_time_plot, constant_time_tables, tables
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "hardware": {"gpus": ["NVIDIA X1"]},
    "versions": {"torch": "2.13.0"},
    "commit": {"hash": "0123456789abcdef", "dirty": False},
}


def save(directory: Path, suite: str, rows: list[dict]) -> None:
    run = {"suite": suite, "date": "2026-01-02", "environment": ENVIRONMENT, "rows": rows}
    (directory / f"{suite}.json").write_text(json.dumps(run), encoding="utf-8")


def timed(name: str, t: float, **more) -> dict:
    figures = {"t": t, "samples": 2000, "median_ns": {"fixed": 9.0, "random": 1500.0}, **more}
    return {"layer": "time", "name": f"{name} against random", "ok": True, "figures": figures}


def test_times(tmp_path):
    course = [[200, 0.5], [2000, -1.5]]
    rows = [
        timed("f: all classes", -1.5, course=course),
        timed("f: zeros", 2.0),
        timed("f: nan", -3),
    ]
    save(tmp_path, "constant-time-times-kernels", rows)
    block = constant_time_tables.times_block(tmp_path)
    assert "| f | 2000 | 1.5 µs | -1.5 | -3.0 (nan) |" in block
    picture = ElementTree.fromstring(constant_time_plot.picture(tmp_path))
    lines = [x for x in picture.iter() if x.tag.endswith("polyline")]
    assert len(lines) == 1
    assert len(lines[0].attrib["points"].split()) == 2
    assert "| time | GPU kernels and rungs | 1 of 1 | not measured yet |" in (
        constant_time_tables.summary_block(tmp_path)
    )


def test_counters(tmp_path):
    launch = {"executed": {"warps": 1200}, "sectors ld": 5.0, "sectors st": 3.0}
    rows = [
        {"subject": "f", "secrets": name, "launches": [launch, launch], "differs": differs}
        for name, differs in (("random", []), ("zeros", ["f: sectors ld 5 -> 6"]))
    ]
    save(tmp_path, "constant-time-counters-leaks", rows)
    block = constant_time_tables.counters_block(tmp_path)
    assert "| f | 2 | 2 | 2,400 | 16 | in zeros |" in block


def test_a_subject_is_well_if_all_its_classes_are(tmp_path):
    rows = [timed("f: all classes", 1.0, course=[]), timed("f: zeros", 5.0) | {"ok": False}]
    save(tmp_path, "constant-time-times-kernels", rows)
    block = constant_time_tables.summary_block(tmp_path)
    assert "| time | GPU kernels and rungs | 0 of 1 | not measured yet |" in block


def test_a_subject_is_that_of_the_newest_run_that_counted_it(tmp_path):
    def run(date: str, counts: dict[str, int]) -> None:
        rows = [
            {
                "subject": name,
                "secrets": "random",
                "launches": [{"executed": {"warps": n}, "sectors ld": 0.0, "sectors st": 0.0}],
                "differs": [],
            }
            for name, n in counts.items()
        ]
        suite = "constant-time-counters-kernels"
        found = {"suite": suite, "date": date, "environment": ENVIRONMENT, "rows": rows}
        (tmp_path / f"{date}.json").write_text(json.dumps(found), encoding="utf-8")

    run("2026-01-03", {"f": 7})
    run("2026-01-02", {"f": 5, "g": 6})
    block = constant_time_tables.counters_block(tmp_path)
    assert "| f | 1 | 1 | 7 |" in block
    assert "| g | 1 | 1 | 6 |" in block
    assert block.count("| f |") == 1
    assert "class by class | 2 of 2 |" in constant_time_tables.summary_block(tmp_path)


def test_counters_of_cpu_calls(tmp_path):
    count = dict.fromkeys(("loads", "stores", "load misses", "store misses", "branches"), 2)
    figures = {"classes": 3, "counts": {"0 f": {"instructions": 1000, **count}}}
    row = {"layer": "counters", "planted": False, "skipped": False, "ok": True, "detail": ""}
    hardware = {"cpu": "Arm", "simd": "NEON", "gpus": []}
    versions = {"torch": "2.13.0", "python": "3.11"}
    environment = {**ENVIRONMENT, "hardware": hardware, "versions": versions, "threads": 2}
    run = {"suite": "constant-time", "environment": environment, "date": "2026-01-02"}
    run["rows"] = [row | {"name": "f", "figures": figures}]
    with patch.object(results, "latest", lambda *_: [run]):
        block = constant_time_tables.cpu_counters_block(tmp_path)
    assert "| f | 3 | 1 | 1,000 | 4 | 4 | 2 | none |" in block
    # Of several CPUs, rows name theirs.
    other = {**environment, "hardware": {**hardware, "cpu": "Xeon", "gpus": ["NVIDIA X1"]}}
    with patch.object(results, "latest", lambda *_: [run, {**run, "environment": other}]):
        block = constant_time_tables.cpu_counters_block(tmp_path)
    assert "| f (Arm) | 3 |" in block
    assert "| f (Xeon) | 3 |" in block
    assert "threads on Arm" in block
    assert "threads on Xeon" in block


def test_times_of_two_cpus(tmp_path):
    """Each CPU has subjects of its own; one that timed nothing is not named."""
    rows = [
        timed("f: all classes", 1.0, course=[]) | {"planted": False, "skipped": False},
        timed("f: zeros", 2.0) | {"planted": False, "skipped": False},
    ]
    runs = []
    for cpu, found in (("Arm", rows), ("Intel(R) Xeon(R)", rows), ("Z80", [])):
        hardware = {"cpu": cpu, "simd": "any", "gpus": []}
        versions = {"torch": "2.13.0", "python": "3.11"}
        environment = {**ENVIRONMENT, "hardware": hardware, "versions": versions, "threads": 1}
        run = {"suite": "constant-time", "environment": environment, "date": "2026-01-02"}
        runs.append({**run, "rows": found})
    with patch.object(results, "latest", lambda *_: runs):
        block = constant_time_tables.cpu_times_block(tmp_path)
        summary = constant_time_tables.summary_block(tmp_path)
    assert "| f (Arm) | 2000 | 1.5 µs | 1.0 | 2.0 (zeros) |" in block
    assert "| f (Intel Xeon) | 2000 |" in block
    assert "1 thread on Arm" in block
    assert "Z80" not in block
    assert "| time | CPU calls | 2 of 2 | not measured yet |" in summary


def test_cost(tmp_path):
    seconds = {"ordinary": 1e-3, "constant time": 2e-3, "FA3": 1.5e-3}
    shape = {"pass": "forward", "B": 1, "H": 2, "S": 64, "D": 32, "causal": True}
    save(tmp_path, "constant-time-cost", [{**shape, "seconds": seconds}])
    block = constant_time_tables.cost_block(tmp_path)
    assert "| forward | B1 H2 S64 D32, causal | 1 ms | 2 ms | 0.50 | 0.75 |" in block


def test_what_was_not_measured_is_said(tmp_path):
    blocks = dict(constant_time_tables.BLOCKS)
    summary = blocks.pop("constant_time_summary")(tmp_path)
    assert all(block(tmp_path) == results.NOT_MEASURED for block in blocks.values())
    assert summary.count("not measured yet") == 2 * (len(summary.splitlines()) - 2)


@pytest.mark.parametrize("picture", tables.PICTURES)
def test_pictures_show_the_results(picture):
    text = (ROOT / picture).read_text(encoding="utf-8")
    assert text == tables.PICTURES[picture](ROOT / results.RESULTS)
