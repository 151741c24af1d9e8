"""The ledger of claims: verdicts follow from numbers, and the page shows them as they are."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ladder.claims import CLAIMS, DEPENDS, DIFFERS, HOLDS, UNMEASURED, Claim, evidence
from lockstep.ladder.claims.claim import LENSES, about, at_least, at_most, between, exactly, number
from lockstep.ladder.claims.page import PAGE, findings, ledger, page, summary
from lockstep.output import results


@pytest.fixture(scope="module")
def found():
    return findings()


def claim(figure, ours, **more) -> Claim:
    return Claim("document", "part", "says so", figure, "×", "plan", ours, why="because", **more)


@pytest.mark.parametrize(
    ("figure", "ours", "verdict"),
    [
        (exactly(736), 736, HOLDS),
        (exactly(736), 735, DIFFERS),
        (about(12.8, 0.1), 13.9, HOLDS),
        (about(12.8, 0.1), 14.2, DIFFERS),
        (between(15, 20), 20, HOLDS),
        (between(15, 20), 20.1, DIFFERS),
        (at_most(8), 0.1, HOLDS),
        (at_least(500), 499, DIFFERS),
        (at_most(8), {"causal": 8, "not causal": 16}, DEPENDS),
        (at_most(8), {"causal": 9, "not causal": 16}, DIFFERS),
        (exactly(1), None, UNMEASURED),
    ],
)
def test_a_verdict_follows_from_the_numbers(figure, ours, verdict):
    assert claim(figure, lambda: ours).test().verdict == verdict


def test_a_difference_comes_with_its_size_and_reason():
    assert claim(about(12.8), lambda: 6.4).test().explanation == "0.5×: because"
    assert claim(between(10, 20), lambda: 200).test().explanation == "10×: because"
    assert claim(exactly(0), lambda: 3).test().explanation == "not zero: because"
    assert claim(exactly(3), lambda: 3).test().explanation == ""


def test_numbers_are_written_with_four_digits():
    given = (736, 12.8, 150.9, 0.0040123, 1.0486e9, 4352.5)
    written = ["736", "12.8", "150.9", "0.004012", "1,048,600,000", "4,352"]
    assert [number(x) for x in given] == written


def test_there_are_many_and_each_says_where_it_stands():
    assert len(CLAIMS) >= 100
    assert len({c.document for c in CLAIMS}) == 5
    for c in CLAIMS:
        assert c.lens in LENSES
        assert c.part
        assert c.says
        assert c.unit
    assert len({(c.document, c.part, c.says, c.figure) for c in CLAIMS}) == len(CLAIMS)


@pytest.mark.slow
def test_whatever_does_not_hold_says_why(found):
    silent = [f.claim.says for f in found if f.verdict in (DIFFERS, DEPENDS) and not f.claim.why]
    assert silent == []


@pytest.mark.slow
def test_only_measurements_can_be_missing(found):
    assert all(f.claim.lens == "bench" for f in found if f.verdict == UNMEASURED)


@pytest.mark.slow
def test_some_of_the_figures_by_hand(found):
    ours = {f.claim.says: f for f in found}
    assert ours["which makes 736 blocks"].readings == {"": 736}
    assert ours["266,240 elements in all"].readings == {"": 8 * 32 * (8 * 128 + 2 * 8)}
    # six of eight warps idle, less the loop overhead that all of them have
    idle = ours["62.5 % of the warps are idle"]
    assert idle.verdict == DIFFERS
    assert 70 < idle.readings[""] <= 75
    assert ours["large tiles occupy 3.1 %"].readings == {"": pytest.approx(100 * 2 / 64)}


@pytest.mark.slow
def test_the_ledger_changes_with_what_we_get(found):
    """A rung that got worse would show: the verdict is not stored anywhere."""
    worse = replace(CLAIMS[0], ours=lambda: 10).test()
    assert worse.verdict == DIFFERS
    assert worse.as_json()["ours"] == {"": 10.0}
    assert summary([*found[:1], worse]) == "1 hold, 1 differ"


def without_roundings(text: str) -> str:
    """The text of a page without figures that differ from CPU to CPU, as NumPy's exponentials do;
    their verdicts stay."""
    return re.sub(r"[-+.e\d]+ (?=largest (?:error|difference)|% of elements differ)", "", text)


@pytest.mark.slow
def test_the_page_in_the_docs_is_current(found):
    root = results.checkout()
    assert root is not None
    in_docs = (root / PAGE).read_text(encoding="utf-8")
    assert without_roundings(in_docs) == without_roundings(page(found)), (
        "run python -m lockstep.ladder.claims.page"
    )


@pytest.mark.slow
def test_the_table_has_a_row_per_claim_and_document(found):
    assert ledger(found).row_count == len(found) + 5


def test_command_line():
    run = CliRunner().invoke(app, ["claims", "--document", "block", "--json"])
    assert run.exit_code == 0
    rows = json.loads(run.stdout)
    assert {row["document"] for row in rows} == {"block-parallel design"}
    assert {row["verdict"] for row in rows} <= {HOLDS, DIFFERS, DEPENDS, UNMEASURED}
    run = CliRunner().invoke(app, ["claims", "--document", "Block", "--verdict", "differs"])
    assert "differs" in run.stdout
    assert "holds" not in run.stdout


def test_command_line_mistakes():
    run = CliRunner().invoke(app, ["claims", "--document", "nowhere"])
    assert run.exit_code == 2
    run = CliRunner().invoke(app, ["claims", "--verdict", "perhaps"])
    assert run.exit_code == 2


@pytest.mark.slow
def test_what_is_judged_is_what_the_document_describes(found):
    ours = {f.claim.says: f for f in found}
    # a multiply-add is two operations
    assert ours["a tile takes 530 thousand operations"].readings[""] == pytest.approx(
        (2 * 2 * 64**3 + 64**2) / 1e3
    )
    assert ours["three barriers per key tile: 49 for 16 tiles"].readings == {"": 49}
    assert ours["two per key tile: 33"].readings == {"": 33}
    assert ours["a reduction over 256 threads is 10 operations deep"].readings == {"": 14}
    assert set(ours["the softmax becomes 12.8 times shallower"].readings) == {"row_tree", "tree"}
    assert ours["the final result is identical"].readings[""] > 0
    assert min(ours["splitting makes the kernel faster"].readings.values()) < 1


@pytest.mark.slow
def test_times_per_head_say_what_they_were_divided_by(found):
    (per_head,) = (f for f in found if f.claim.says.endswith("15 to 20 µs per head"))
    over = {label.split(", ")[1]: value for label, value in per_head.readings.items()}
    assert over["over H = 16"] == pytest.approx(4 * over["over B·H = 64"])
    assert per_head.verdict == DEPENDS


PHASES = {
    "rows": [
        {
            "kernel": "small_tile (sequential)",
            "shape": str(evidence.LONG),
            "phases": {"scores": 0.2, "softmax": 0.5, "output": 0.25},
            "microseconds": 80.0,
        }
    ],
    "utilisation": [{"kernel": "row_per_thread", "shape": "", "utilisation": 30.0}],
}


def test_shares_of_time_come_from_measured_phases(monkeypatch):
    monkeypatch.setattr(evidence, "measured", lambda suite: None)
    assert evidence.time_shares(("small_tile (sequential)",), evidence.LONG, "softmax") is None
    assert evidence.utilisation("row_per_thread") is None
    monkeypatch.setattr(evidence, "measured", {"ladder-phases": PHASES}.get)
    assert evidence.time_shares(
        ("small_tile (sequential)", "small_tile (tree)"), evidence.LONG, "softmax", "output"
    ) == {"small_tile (sequential)": 75.0}
    assert evidence.phase_time("small_tile (sequential)", evidence.LONG, "softmax") == 40.0
    assert evidence.utilisation("row_per_thread") == 30.0
    shares = [c for c in CLAIMS if "99.7 %" in c.says]
    assert [c.test().verdict for c in shares] == [DIFFERS]


def test_no_claim_about_a_share_of_time_is_judged_by_depth():
    for c in CLAIMS:
        if c.unit == "%" and "of the time" in c.says:
            assert c.lens == "bench", c.says
