"""What the page of the suite says of peers and cases that a run went without."""

from __future__ import annotations

from lockstep.bench.models.summary import absent_peers, latest


def a_run(commit: str, case: str = "", **ms: float) -> dict:
    row = {"kind": "forward", "case": case, "ms": {"lockstep": 1.0, **ms}}
    return {
        "peers": dict.fromkeys(ms, ""),
        "rows": [row],
        "environment": {"commit": {"hash": commit + "0" * 33}},
    }


def test_a_peer_of_an_earlier_run_is_named():
    old, new = a_run("0000001", FA3=2.0, FA4=1.0), a_run("0000002", FA3=2.0)
    (sentence,) = absent_peers("forward", new, [old, new])
    assert "FA4 is not in this run. In that of commit 0000001 it had 2.00 of" in sentence
    assert absent_peers("forward", old, [old, new]) == []
    assert absent_peers("decode", new, [old, new]) == []


def test_a_peer_that_stood_alone_is_not_compared():
    assert absent_peers("forward", a_run("2", FA3=2.0), [a_run("1", FA4=1.0)]) == []


def test_cases_that_a_run_left_out_are_those_of_the_run_before():
    both = a_run("1", "short", FA3=1.0)
    both["rows"] += a_run("1", "long", FA3=1.0)["rows"]
    new = a_run("2", "long", FA3=2.0)
    oldest = a_run("0", "no case any more", FA3=1.0)
    assert latest("forward", [oldest, both, new]) == [(new, new["rows"]), (both, both["rows"][:1])]
    assert latest("decode", [both, new]) == []


def test_cases_of_another_seed_are_not_mixed_in():
    old, new = ({**a_run(n, n, FA3=1.0), "seed": int(n)} for n in ("12", "14"))
    assert latest("forward", [old, new]) == [(new, new["rows"])]
