"""One launch as data, and what results files say."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from transposed import traced, transposed

from lockstep.ladder import RUNGS, plans_of
from lockstep.ladder.plan import PEAKS
from lockstep.report import measured
from lockstep.report.kernel_view import BINS, LEVELS, WARP_BINS, kernel_view
from lockstep.report.rung_views import PROBLEM


def test_a_view_has_the_counts_of_the_trace():
    trace = traced()
    sources = {}
    view = kernel_view(trace, sources)
    assert view["conflicts"] == trace.totals.bank_conflicts == 31 * 32
    shared = [a for a in view["arrays"] if a["space"] == "shared"]
    assert sum(a["extra"] for a in shared) == view["conflicts"]
    assert sum(a["needed"] + a["extra"] for a in shared) == trace.totals.shared_wavefronts
    sectors = [a["needed"] + a["extra"] for a in view["arrays"] if a["space"] == "global"]
    assert sum(sectors) == trace.totals.global_sectors
    worst = max(view["banks"], key=lambda pattern: pattern["cost"])
    assert (worst["cost"], worst["ideal"]) == (32, 1)
    assert {address // 4 % 32 for address in worst["addresses"]} == {0}
    json.dumps(view)


def test_the_listing_is_the_source_with_its_counts():
    trace = traced()
    sources = {}
    (function,) = kernel_view(trace, sources)["listing"]
    source = sources[function["source"]]
    assert source["name"] == "transposed"
    assert source["lines"][0] == "@simt.kernel"
    at = {source["lines"][n - source["first"]].strip(): c for n, c in function["lines"].items()}
    assert at["y[r, col] = tile[col, r]"]["conflicts"] == 31 * 32
    assert "cuda.syncthreads()" in at


def test_the_strip_has_a_row_per_thread():
    strip = kernel_view(traced(), {})["strip"]
    assert len(strip["threads"]) == 128
    assert all(len(row) == BINS for row in strip["rows"])
    assert strip["busy"] == pytest.approx(1)
    assert strip["barriers"] == 1
    runs = list(zip(*[iter(strip["warps"])] * 5, strict=True))
    assert {level for *_, level in runs} == {LEVELS}  # no warp ever waits
    assert [(start, end) for warp, start, end, *_ in runs if warp == 3] == [(0, WARP_BINS)]


def test_warps_that_wait_are_paler_or_left_out(data):
    """Whatever waits within a bin: what the strip shows adds up to what warps issued."""
    strip = data["rungs"][0]["launches"][0]["strip"]
    runs = list(zip(*[iter(strip["warps"])] * 5, strict=True))
    by_warp = [sum((e - s) * v for w, s, e, _, v in runs if w == warp) for warp in range(8)]
    shown = sum(by_warp) / (8 * WARP_BINS * LEVELS)
    assert strip["busy"] <= shown <= strip["busy"] + 0.1  # levels are rounded up
    phases = {strip["phases"][phase] for *_, phase, _ in runs}
    assert {"scores", "softmax", "output"} <= phases


def test_a_trace_without_a_record_is_refused():
    import numpy as np

    x = np.zeros((32, 32), np.float32)
    with pytest.raises(ValueError, match="record"):
        kernel_view(transposed[1, 128].trace(x, x.copy()), {})


def test_rung_views(data):
    rung = data["rungs"][0]
    assert rung["title"] == "small_tile_2d"
    assert rung["counted"]["right"]
    (launch,) = rung["launches"]
    assert launch["occupancy"]["blocks"] == min(launch["occupancy"]["limits"].values())
    assert launch["strip"]["length"] <= launch["depth"]
    assert [len(r["launches"]) for r in data["rungs"]] == [1, 3]


def test_points_lie_under_the_roof(data):
    roof = data["roofline"]
    assert roof["tensor"] == PEAKS["H200"].tensor
    groups = {point["group"] for point in roof["points"]}
    assert groups == {"rung", "Lockstep", "others"}
    assert all(0 < point["tflops"] < roof["tensor"] for point in roof["points"])
    assert all(point["intensity"] > 0 for point in roof["points"])


def test_without_results_there_is_nothing_to_show():
    assert measured.rung_times(None) == measured.peers(None) == []
    assert measured.rung_counts(None) is None
    assert measured.roofline(None)["points"] == []
    assert measured.audits(None, []) == {"machine": [], "files": []}


def test_a_file_that_is_no_audit(tmp_path):
    path = tmp_path / "bits.json"
    path.write_text("[]")
    takes = r"--audit takes what `lockstep audit bits --json` prints, got '.*bits\.json'"
    with pytest.raises(ValueError, match=takes):
        measured.audits(None, [path])
    with pytest.raises(ValueError, match="takes a JSON file"):
        measured.audits(None, [tmp_path / "none.json"])


def test_no_two_rows_of_the_page_are_the_same_launches():
    steps = [step for rung in RUNGS for step in rung.steps()]
    launches = [plans_of(step, PROBLEM) for step in steps]
    alike = [
        (a.title, b.title)
        for (a, first), (b, second) in combinations(zip(steps, launches, strict=True), 2)
        if a.name == b.name and first == second
    ]
    assert alike == []
