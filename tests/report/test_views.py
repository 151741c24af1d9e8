"""One launch as data, and what results files say."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest
from transposed import traced, transposed

from lockstep.ladder import RUNGS, plans_of
from lockstep.ladder.plan import PEAKS
from lockstep.report import measured
from lockstep.report.kernel_view import BINS, RESOLUTION, kernel_view
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
    for warp in range(4):
        mine = [s for s in zip(*[iter(strip["spans"])] * 4, strict=True) if s[0] == warp]
        assert mine[0][1] == 0
        assert mine[-1][2] == strip["length"]
        assert all(a[2] == b[1] for a, b in pairwise(mine))


def test_spans_too_short_to_be_seen_are_left_out(data):
    strip = data["rungs"][0]["launches"][0]["strip"]
    spans = list(zip(*[iter(strip["spans"])] * 4, strict=True))
    first = {span[0]: span for span in reversed(spans)}
    assert all(
        end - start >= strip["length"] / RESOLUTION
        for warp, start, end, phase in spans
        if (warp, start, end, phase) != first[warp]
    )


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
    assert measured.roofline(None)["points"] == []
    assert measured.audits(None, []) == {"machine": [], "files": []}


def test_a_file_that_is_no_audit(tmp_path):
    path = tmp_path / "bits.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"bits\.json', takes what `lockstep audit bits --json`"):
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
