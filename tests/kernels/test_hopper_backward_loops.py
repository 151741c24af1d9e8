"""The loops of the Hopper backward, computed by the kernel's own functions on plain numbers."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import as_plain, make_plain

from lockstep.kernels.hopper.backward import query_loop, sizes
from lockstep.kernels.hopper.backward.narrow.call import BLOCK_KV, BLOCK_Q
from lockstep.kernels.window import NO_LIMIT, limit_of

QueryLoop = query_loop.QueryLoop
PLAIN = SimpleNamespace(
    where=lambda condition, a, b: a if condition else b,
    minimum=min,
    maximum=max,
    cdiv=lambda a, b: -(-a // b),
    constexpr=lambda x: x,
)


class PlainLoop(SimpleNamespace):
    """`QueryLoop` with numbers for tensors."""

    def __init__(self, tiles, bounds, sizes):
        names = ("BLOCK_Q", "BLOCK_KV", "HAS_LEFT", "HAS_RIGHT", "HAS_EDGE")
        super().__init__(**{name: getattr(sizes, name) for name in names})
        self.first_tile, self.n_steps, self.n_tiles = tiles
        self.tiles_per_head, self.heads_per_kv = sizes.q_slots, sizes.heads_per_kv
        self.low, self.high, self.room, self.first_key = bounds

    def tiles(self):
        """(tile, number in its head) of each step."""
        tile, t, head = self.first_tile, self.first_number(), 0
        for _ in range(self.n_steps):
            yield tile, t
            tile, t, head = QueryLoop.next_in_group.fn(self, tile, t, head)

    def tiles_by_head(self):
        """The same, in the order in which one head comes after the other."""
        tile, t = self.first_tile, self.first_number()
        for _ in range(self.n_steps):
            yield tile, t
            tile, t = QueryLoop.next.fn(self, tile, t)

    def next_number(self, t):
        return QueryLoop.next_number.fn(self, t)

    def first_number(self):
        return QueryLoop.first_number.fn(self)

    def turn(self, t):
        return QueryLoop.turn.fn(self, t)

    def cuts(self, t):
        return QueryLoop.cuts.fn(self, t)

    def sees(self, r: int, c: int, t: int) -> bool:
        """As `hide` has it, for key r of the program and query c of its t-th tile."""
        query = c + t * self.BLOCK_Q
        is_seen = not self.HAS_EDGE or r < self.room
        if self.HAS_LEFT:
            is_seen = is_seen and r - self.low >= query
        if self.HAS_RIGHT:
            is_seen = is_seen and r - self.high <= query
        return is_seen


@pytest.fixture
def loops(monkeypatch):
    """All loops of a dense call with one sequence, by ticket: (head, first key, loop)."""
    plain = {"gl": PLAIN, "QueryLoop": PlainLoop, "WINDOW_BUNCH": 4}
    make_plain(monkeypatch, (query_loop, sizes), plain)
    monkeypatch.setattr(query_loop, "KeyTile", lambda place, lengths, layout: place)
    Sizes = as_plain(sizes.Sizes)

    def compute(block_q, Sq, Skv, left, right, Hkv=1, group=1, at_once=1):
        kv_slots, q_slots = -(-Skv // BLOCK_KV), -(-Sq // block_q)
        for ticket in range(kv_slots * Hkv):
            reach = limit_of(left), limit_of(right)
            given = Sizes(
                (q_slots, Hkv, group, 1, Sq, Skv, *reach, 0), None, None, "dense",
                left is not None, right is not None, right is None or right > 0, block_q, BLOCK_KV,
            )  # fmt: skip
            place, loop = query_loop.assign_keys(ticket, kv_slots, Hkv, at_once, given)
            yield place[1], place[3], loop

    return compute


def test_turns_count_those_with_earlier_tickets(loops):
    """A program that waits for its turn waits for programs that were there before: none locks
    up."""
    draws = random.Random(0)
    for _ in range(400):
        left, right = (draws.choice([None, 0, draws.randrange(600)]) for _ in range(2))
        sizes = (
            draws.choice(list(BLOCK_Q.values())),
            draws.randrange(1, 900),
            draws.randrange(1, 900),
        )
        Hkv = draws.choice([1, 2, 3])
        parts: dict[int, int] = {}
        for *_, loop in loops(
            *sizes, left, right, Hkv=Hkv, group=draws.choice([1, 2]), at_once=draws.randint(1, Hkv)
        ):
            for tile, t in loop.tiles():
                assert loop.turn(t) == parts.get(tile, 0)
                parts[tile] = parts.get(tile, 0) + 1


def test_loops_visit_every_pair_that_sees_each_other_once_and_know_which_they_cut(loops):
    draws = random.Random(1)
    for _ in range(60):
        left, right = (draws.choice([None, 0, draws.randrange(300)]) for _ in range(2))
        block_q = draws.choice(list(BLOCK_Q.values()))
        Sq, Skv = draws.randrange(1, 500), draws.randrange(1, 500)
        visible = {
            (q, k)
            for q in range(Sq)
            for k in range(Skv)
            if (left is None or k >= q + Skv - Sq - left)
            and (right is None or k <= q + Skv - Sq + right)
        }
        seen: set[tuple[int, int]] = set()
        for _, first_key, loop in loops(block_q, Sq, Skv, left, right):
            tiles = list(loop.tiles())
            assert len({tile for tile, _ in tiles}) == len(tiles)
            for tile, t in tiles:
                pairs = {
                    (q, k)
                    for q in range(tile * block_q, min((tile + 1) * block_q, Sq))
                    for k in range(first_key, min(first_key + BLOCK_KV, Skv))
                }
                if not loop.cuts(t):
                    assert first_key + BLOCK_KV <= Skv
                    assert pairs <= visible
                # Keys beyond the last, too.
                seen |= {
                    (tile * block_q + c, first_key + r)
                    for c in range(min(block_q, Sq - tile * block_q))
                    for r in range(BLOCK_KV)
                    if loop.sees(r, c, t)
                }
        assert visible == seen


def test_longest_loops_of_a_causal_head_come_first(loops):
    steps = [loop.n_steps for *_, loop in loops(64, 2048, 2048, None, 0)]
    assert steps == sorted(steps, reverse=True)


def test_a_shorter_loop_of_a_group_begins_as_the_longer_one_does(loops):
    """So no program waits at a tile for one that has other tiles before it."""
    found = loops(64, 1000, 1000, None, 0, group=3)
    seen = [[tile for tile, _ in loop.tiles()] for *_, loop in found]
    for longer, shorter in pairwise(seen):
        assert longer[: len(shorter)] == shorter
    assert len(seen[-1]) < len(seen[0])


def test_both_orders_of_a_group_have_the_same_tiles(loops):
    for left, right in ((None, None), (None, 0), (300, 40)):
        for *_, loop in loops(64, 700, 900, left, right, Hkv=2, group=3):
            in_turn = list(loop.tiles())
            assert sorted(in_turn) == sorted(loop.tiles_by_head())
            assert len(set(in_turn)) == len(in_turn)


def test_packed_loops_go_over_every_key_tile_once_and_no_bad_sequence(monkeypatch):
    """By the bounds of `rows.py`: the last sequence has the rows that belong to none."""
    at = SimpleNamespace(load=lambda place: place[0][place[1]])
    plain = {"gl": SimpleNamespace(**vars(PLAIN), **vars(at)), "QueryLoop": PlainLoop}
    make_plain(monkeypatch, (query_loop, sizes), plain)
    Sizes = as_plain(sizes.Sizes)
    monkeypatch.setattr(query_loop, "KeyTile", lambda place, lengths, layout: (place, lengths))
    draws, block_q = random.Random(2), 64
    for _ in range(100):
        B, Tq, Tk = draws.randint(1, 6), draws.randrange(1, 900), draws.randrange(1, 900)
        q, k = (sorted(draws.choices(range(T + 1), k=B)) for T in (Tq, Tk))
        q, k = [0, *q, Tq], [0, *k, Tk]
        good = [draws.choice((0, 1)) for _ in range(B)] + [0]
        kv_slots, q_slots = Tk // BLOCK_KV + B + 1, Tq // block_q + B + 1
        given = Sizes(
            (q_slots, 1, 1, B, Tq, Tk, NO_LIMIT, NO_LIMIT, 0), Numbers([*q, *k, *good]), None,
            "varlen",
            False, False, True, block_q, BLOCK_KV,
        )  # fmt: skip
        seen = []
        for ticket in range(kv_slots):
            (place, lengths), loop = query_loop.assign_keys(ticket, kv_slots, 1, 1, given)
            b, _, _, kv_idx, _ = place
            assert lengths == (q[b], k[b], q[b + 1] - q[b], k[b + 1] - k[b])
            has_keys = kv_idx < k[b + 1] - k[b]
            seen += [k[b] + kv_idx] if has_keys else []
            tiles = -(-lengths[2] // block_q) if has_keys else 0
            assert (loop.n_tiles, loop.n_steps) == ((tiles, tiles) if good[b] else (-1, 0))
            assert all(0 <= tile < q_slots for tile, _ in loop.tiles())
        starts = [x for a, b in pairwise(k) for x in range(a, b, BLOCK_KV)]
        assert sorted(seen) == starts


class Numbers:
    """What a kernel loads from, by the steps from where it begins."""

    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, step: int) -> Numbers:
        return Numbers(self.values, self.at + step)

    def __getitem__(self, i: int) -> object:
        return (self.values, self.at)[i]
