"""The file: complete, escaped, and its commands."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.report import cli
from lockstep.report.page import LIBRARIES, SCRIPTS, page

ASSETS = resources.files("lockstep.report") / "assets"


def embedded(text: str):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_nothing_comes_from_elsewhere(report):
    text = report.read_text(encoding="utf-8")
    assert re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?!data:)', text) == []
    assert re.findall(r"@import|url\((?!data:)", text.split("</style>")[0]) == []
    assert "<!-- scripts -->" not in text


def test_data_stand_inside_as_json(report, data):
    found = embedded(report.read_text(encoding="utf-8"))
    assert found["rungs"][0]["title"] == data["rungs"][0]["title"]
    assert found["claims"] == data["claims"]


def test_strings_cannot_end_the_script_and_infinities_become_null():
    text = page({"kind": "kernel", "text": "</script><b>&\u2028", "x": float("inf")}, "<T>")
    assert "<title>&lt;T&gt;</title>" in text
    found = embedded(text)
    assert found == {"kind": "kernel", "text": "</script><b>&\u2028", "x": None}


def test_every_asset_is_used_and_licences_lie_beside_the_libraries():
    here = {f.name for f in ASSETS.iterdir() if f.is_file()}
    assert here == {"page.html", "style.css", *SCRIPTS}
    vendor = {f.name for f in (ASSETS / "vendor").iterdir()}
    assert vendor == {*LIBRARIES, "d3.LICENSE", "plot.LICENSE"}


def test_report_from_saved_data(data, tmp_path):
    saved, out = tmp_path / "data.json", tmp_path / "page.html"
    saved.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["report", "--from", str(saved), "--out", str(out)])
    assert result.exit_code == 0
    assert embedded(out.read_text(encoding="utf-8"))["kind"] == "ladder"


def test_files_that_cannot_be_used(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    missing = str(tmp_path / "none")
    for options in (
        *(["--from", str(bad)], ["--from", missing], ["--results", missing]),
        *(["--audit", str(bad)], ["--audit", missing]),
    ):
        result = CliRunner().invoke(app, ["report", *options, "-o", str(tmp_path / "x.html")])
        assert result.exit_code == 2
        assert f"{options[0]} takes" in result.stderr


@pytest.mark.parametrize("option", ["--out", "--data"])
def test_where_nothing_can_be_written_is_said_before_anything_is_traced(
    option, tmp_path, monkeypatch
):
    monkeypatch.setattr(cli, "_fresh", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "none" / "x", tmp_path / "file" / "x"):
        result = CliRunner().invoke(app, ["report", option, str(place)])
        assert result.exit_code == 2
        assert f"{option} takes a file that can be written" in result.stderr


def test_trace_writes_a_page(tmp_path):
    out = tmp_path / "copy.html"
    result = CliRunner().invoke(app, ["trace", "copy, stride 2", "--html", str(out)])
    assert result.exit_code == 0
    found = embedded(out.read_text(encoding="utf-8"))
    assert found["rungs"][0]["launches"][0]["kernel"] == "strided_copy"
    rung = ["trace", "warp_mma", "--tile", "64x64", "--seq", "64", "--html", str(out)]
    assert CliRunner().invoke(app, rung).exit_code == 0
    assert "warp_mma" in embedded(out.read_text(encoding="utf-8"))["rungs"][0]["title"]


@pytest.mark.parametrize("kernel", ["copy, stride 2", "naive"])
def test_trace_says_before_it_runs_that_its_page_cannot_be_written(kernel, tmp_path, monkeypatch):
    for run in ("lockstep.simt.cli.find", "lockstep.ladder.cli.traced"):
        monkeypatch.setattr(run, None)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "none" / "x.html", tmp_path / "file" / "x.html"):
        result = CliRunner().invoke(app, ["trace", kernel, "--html", str(place)])
        assert result.exit_code == 2
        assert result.stderr == f"error: --html takes a file that can be written, got '{place}'\n"
