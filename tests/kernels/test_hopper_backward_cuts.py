"""Loops of the Hopper backward that are cut into spans: their tickets, on plain numbers.
Their bits on a GPU are in `test_hopper_backward.py`."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import make_plain
from problems import unwritten

from lockstep.kernels.hopper.backward import cuts
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.problem import Options, describe


@pytest.fixture
def tickets(monkeypatch):
    """By ticket: the ticket of its loop if none were cut, and the span, -1 for whole loops."""
    plain = SimpleNamespace(where=lambda condition, a, b: a if condition else b, maximum=max)
    make_plain(monkeypatch, (cuts,), {"gl": plain})

    def compute(planned, n_loops, programs):
        plain.num_programs = lambda _: programs
        for ticket in range(n_loops + planned.n_cut * (planned.spans - 1)):
            yield cuts.find_cut(ticket, planned)[:2]

    return compute


def test_spans_have_later_tickets_than_what_they_wait_for(tickets):
    draws = random.Random(0)
    n_plans = 0
    for _ in range(500):
        n_heads, kv_tiles, q_tiles = (draws.randint(2, n) for n in (40, 40, 40))
        programs, group = draws.choice([7, 13, 132]), draws.choice([1, 4])
        at_once = -(-n_heads // draws.randint(1, 4))
        planned = cuts.plan_cuts(n_heads, kv_tiles, q_tiles, group, programs, at_once)
        n_plans += planned.n_cut > 0
        spans: dict[int, list[int]] = {}  # by ticket
        added: dict[tuple[int, int], int] = {}  # key tiles, by head and query tile
        for ticket, span in tickets(planned, n_heads * kv_tiles, programs):
            spans.setdefault(ticket, []).append(span)
            round_, at = divmod(ticket, kv_tiles * planned.heads_at_once)
            heads = min(planned.heads_at_once, n_heads - round_ * planned.heads_at_once)
            head, kv_tile = round_ * planned.heads_at_once + at % heads, at // heads
            end = q_tiles - max(span, 0) * planned.span_tiles
            begin = 0 if span < 0 else max(end - planned.span_tiles, 0)
            assert begin < end
            for tile in range(begin, end):
                assert added.get((head, tile), 0) == kv_tile
                added[head, tile] = kv_tile + 1
        assert sorted(spans) == list(range(n_heads * kv_tiles))
        assert sum(found != [-1] for found in spans.values()) == planned.n_cut
        assert all(found in ([-1], list(range(planned.spans))) for found in spans.values())
        assert set(added.values()) == {kv_tiles}
    assert n_plans > 100


def test_no_more_loops_are_cut_than_whole_rounds_leave():
    planned = cuts.plan_cuts(24, 36, 72, 1, 132, 8)
    assert planned.n_cut == 24 * 36 - 6 * 132
    assert planned.spans > 1
    # Nothing to win: the last round is full, or there is no other round.
    assert cuts.plan_cuts(22, 36, 72, 1, 132, 8).n_cut == 0
    assert cuts.plan_cuts(4, 36, 72, 1, 132, 4).n_cut == 0


def cuts_of(options=None, **sizes):
    problem = describe(unwritten(**sizes), Options(**(options or {})))
    return narrow.cuts_of(problem, narrow.cut_of(problem), 132, False)


def test_loops_are_cut_where_all_take_as_long():
    sizes = {"Sq": 4000, "Skv": 4000, "Hq": 17, "Hkv": 17, "D": 128}
    assert cuts_of(**sizes).n_cut == 16
    for options in ({"causal": True}, {"softcap": 5.0}, {"constant_time": True}):
        assert cuts_of(options, **sizes).n_cut == 0
