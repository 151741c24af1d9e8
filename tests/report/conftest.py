"""A page of two rungs, made once; a browser, started once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, missing

from lockstep.ladder.claims import CLAIMS
from lockstep.ladder.claims.page import findings
from lockstep.report import measured
from lockstep.report.collect import assemble
from lockstep.report.page import page
from lockstep.report.rung_views import rung_view
from lockstep.report.tile_steps import rung_steps

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
AUDIT = {
    "shape": {"device": "cpu", "S": 333},
    "ok": False,
    "checks": [
        {"kernel": "cpu", "claim": "deterministic", "check": "the same call again",
         "comparisons": 57, "skipped": None, "ok": False},
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Two rungs, the first and last claims of the ledger, everything that results say."""
    audit = tmp_path_factory.mktemp("audit") / "bits.json"
    audit.write_text(json.dumps(AUDIT))
    made = {
        "claims": [finding.as_json() for finding in findings([*CLAIMS[:8], *CLAIMS[-4:]])],
        "trace small_tile_2d": rung_view("small_tile_2d", {}),
        "trace naive": rung_view("naive", {}),
        "tiles small_tile_2d": rung_steps("small_tile_2d"),
        "tiles naive": rung_steps("naive"),
    }
    return assemble(made, RESULTS, measured.audits(RESULTS, [audit]))


@pytest.fixture(scope="session")
def report(data, tmp_path_factory):
    """The page, on disk."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(data, "A report"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser():
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    started = Browser()
    yield started
    started.quit()
