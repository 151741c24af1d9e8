"""The loops of the Hopper backward, computed by the kernel's own functions on plain numbers."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import as_plain, make_plain
from problems import unwritten

from lockstep.kernels.hopper.backward import query_loop, shares, sizes, turns
from lockstep.kernels.hopper.backward.call import slots_of
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.backward.narrow.call import BLOCK_KV, BLOCK_Q
from lockstep.kernels.hopper.backward.wide import call as wide
from lockstep.kernels.window import NO_LIMIT, limit_of
from lockstep.problem import Options, Tensors, describe, make_options

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

    def __init__(self, tiles, bounds, heads_per_kv, share, sizes):
        names = ("BLOCK_Q", "BLOCK_KV", "HAS_LEFT", "HAS_RIGHT", "HAS_EDGE")
        super().__init__(**{name: getattr(sizes, name) for name in names})
        self.first_tile, self.n_steps, self.n_tiles = tiles
        self.tiles_per_head, self.heads_per_kv = sizes.q_slots, heads_per_kv
        self.share = share
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

    def is_last(self, t):
        return QueryLoop.is_last.fn(self, t)

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
    make_plain(monkeypatch, (query_loop, sizes, turns), {**plain, "tl": PLAIN})
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
    """A program that waits for its turn waits for programs that were there before: none locks up.
    Nor does the launch behind it, which waits until all parts of a tile have been added."""
    draws = random.Random(0)
    for _ in range(400):
        left, right = (draws.choice([None, 0, draws.randrange(600)]) for _ in range(2))
        sizes = (
            draws.choice(list(BLOCK_Q.values())),
            draws.randrange(1, 900),
            draws.randrange(1, 900),
        )
        Hkv, group = draws.choice([1, 2, 3]), draws.choice([1, 2])
        parts: dict[int, int] = {}
        last: dict[int, int] = {}  # by tile: the part that is said to be its last
        for *_, loop in loops(
            *sizes, left, right, Hkv=Hkv, group=group, at_once=draws.randint(1, Hkv)
        ):
            for tile, t in loop.tiles():
                assert loop.turn(t) == parts.get(tile, 0)
                parts[tile] = parts.get(tile, 0) + 1
                if loop.is_last(t):
                    assert tile not in last
                    last[tile] = parts[tile]
        assert last == parts
        block_q, Sq, Skv = sizes
        q_slots = -(-Sq // block_q)
        reach = limit_of(left), limit_of(right)
        for tile in range(q_slots * Hkv * group):
            n = turns.count_parts(tile % q_slots, Sq, Skv, *reach, block_q, BLOCK_KV)
            assert n == parts.get(tile, 0)
        # A slot that a packed sequence owns beyond its last tile.
        assert turns.count_parts(q_slots, Sq, Skv, *reach, block_q, BLOCK_KV) == 0


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


def test_where_parts_of_dq_are_whole_every_query_tile_has_one(loops):
    draws, found = random.Random(3), set()
    for _ in range(300):
        left, right = (draws.choice([None, 0, draws.randrange(300)]) for _ in range(2))
        Sq, Skv, D = draws.randrange(1, 500), draws.randrange(1, 200), draws.choice([64, 128])
        tensors = unwritten(Sq, Skv, D=D, dtype=torch.bfloat16)
        problem = describe(tensors, make_options(False, (left, right), None, None))
        cut = narrow.cut_of(problem)
        tiles = [tile for *_, loop in loops(cut.block_q, Sq, Skv, left, right)
                 for tile, _ in loop.tiles()]  # fmt: skip
        is_whole = narrow.has_whole_parts(problem, cut)
        found.add(is_whole)
        assert is_whole == (Skv <= BLOCK_KV and sorted(tiles) == list(range(cut.q_slots)))
    assert found == {False, True}


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
    gl = SimpleNamespace(**vars(PLAIN), **vars(at))
    plain = {"gl": gl, "tl": gl, "QueryLoop": PlainLoop}
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
            b, _, _, kv_idx, *_ = place
            assert lengths == (q[b], k[b], q[b + 1] - q[b], k[b + 1] - k[b])
            has_keys = kv_idx < k[b + 1] - k[b]
            seen += [k[b] + kv_idx] if has_keys else []
            tiles = -(-lengths[2] // block_q) if has_keys else 0
            assert (loop.n_tiles, loop.n_steps) == ((tiles, tiles) if good[b] else (-1, 0))
            assert all(0 <= tile < q_slots for tile, _ in loop.tiles())
        starts = [x for a, b in pairwise(k) for x in range(a, b, BLOCK_KV)]
        assert sorted(seen) == starts


# Queries and keys behind the last packed sequence.
UNOWNED = (700, 300)


@pytest.fixture
def plain_shares(monkeypatch):
    """A function that gives the loops of sequences (len_q, len_kv), by ticket, as `loops` does:
    (sequence, head, first key, loop). Queries are shared out if there is a `cut`."""
    load = {"load": lambda place: place[0][place[1]]}
    gl = SimpleNamespace(**vars(PLAIN), **load)
    checked = {"checked_length": lambda lens, b, Skv: (lens[b], True)}
    plain = {"gl": gl, "tl": gl, "QueryLoop": PlainLoop, "WINDOW_BUNCH": 4, **checked}
    make_plain(monkeypatch, (query_loop, sizes), plain)
    monkeypatch.setattr(query_loop, "KeyTile", lambda place, lengths, layout: place)
    Sizes = as_plain(sizes.Sizes)

    def compute(layout, lengths, block_q, window, Hkv, group, at_once, slots, cut, rule):
        B, (left, right) = len(lengths), window
        q, k = ([0, *accumulate(pair[i] for pair in lengths)] for i in (0, 1))
        q, k = [*q, q[-1] + UNOWNED[0]], [*k, k[-1] + UNOWNED[1]]
        plan = None
        if cut is not None:
            plan = plan_of([*lengths, UNOWNED], block_q, Hkv, group, rule)
            slots = cut.slots
        if cut is not None and layout == "varlen":
            assert plan[B + 1] <= slots
            slots = plan[B + 1]
        q_slots = q[-1] // block_q + B + 1 if layout == "varlen" else -(-lengths[0][0] // block_q)
        n_heads = Hkv if layout == "varlen" else B * Hkv
        given = Sizes(
            (q_slots, Hkv, group, B, lengths[0][0], max(k for _, k in lengths), limit_of(left),
             limit_of(right), 0),
            Numbers([*q, *k, *[1] * B, 0, 0]), [k for _, k in lengths], layout, left is not None,
            right is not None, True, block_q, BLOCK_KV, False,
            cut and (None, cut.heads, cut.span_tiles, cut.spans, cut.n_shares), Numbers(plan),
        )  # fmt: skip
        for ticket in range(slots * n_heads):
            place, loop = query_loop.assign_keys(ticket, slots, n_heads, at_once, given)
            yield place[0], place[1], place[3], loop

    return compute


def plan_of(lengths, block_q, Hkv, group, rule) -> list[int]:
    """What `rows.py` stores for sequences whose lengths the host does not know."""
    found = []
    slots, several = 0, 0
    for len_q, len_kv in [*lengths, (0, 0)]:
        tiles = -(-len_q // block_q), -(-len_kv // BLOCK_KV)
        heads, span_tiles, by_heads, spans = shares.divide_queries.fn(*tiles, Hkv, group, rule)
        n = by_heads * spans
        found.append((slots, several, heads, span_tiles, spans, n))
        slots += tiles[1] * n
        several += tiles[1] * n if n > 1 else 0
    return [x for row in zip(*found, strict=True) for x in row]


@pytest.mark.parametrize("layout", ["dense", "kv_lens", "varlen"])
def test_shares_have_the_tiles_of_one_loop_once_and_keep_the_order(plain_shares, layout):
    """The shares of a key tile have the tiles that one loop would have, in which the mask hides the
    same, and each a number of its own, of which there are no more than a launch has room for."""
    draws = random.Random(3)
    n_shared = 0
    for _ in range(150):
        window = draws.choice([(None, None), (None, 0), (draws.randrange(400), 40)])
        block_q = draws.choice(list(BLOCK_Q.values()))
        B, Hkv, group = draws.randint(1, 3), draws.choice([1, 2, 3]), draws.choice([1, 2, 5])
        lengths = [(draws.randrange(1500), draws.randrange(700)) for _ in range(B)]
        if layout != "varlen":
            lengths = [(lengths[0][0] + 1, k + 1) for _, k in lengths]
        if layout == "dense":
            lengths = lengths[:1] * B
        given = tensors_of(layout, lengths, Hkv * group, Hkv)
        left, right = window
        problem = describe(given, Options(window_left=left, window_right=right))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shares, "LEAST_STEPS", draws.choice([1, 5]))
            patch.setattr(shares, "LEAST_STEPS_WITH_MASK", draws.choice([2, 8]))
            # More shares where the last round is uneven, and so small ones that they come up.
            patch.setattr(shares, "FEW_LOOPS", draws.choice([2, 64]))
            patch.setattr(shares, "MORE_STEPS", draws.choice([1, 6]))
            patch.setattr(shares, "MORE_STEPS_WITH_MASK", draws.choice([1, 6]))
            patch.setattr(shares, "ROUND_LOOPS", draws.choice([5, 132]))
            rule = shares.rule_of(problem, block_q, BLOCK_KV)
            slots = slots_of(problem, problem.Skv, BLOCK_KV)
            cut = shares.shares_of(problem, slots, block_q, BLOCK_KV)
        sizes = (layout, lengths, block_q, window, Hkv, group, draws.randint(1, Hkv))
        whole = {
            (b, head, key): {(tile, loop.cuts(t)) for tile, t in loop.tiles()}
            for b, head, key, loop in plain_shares(*sizes, slots, None, rule)
        }
        if cut is None:
            continue
        parts: dict[int, int] = {}
        found: dict[tuple[int, int, int], list[tuple[int, bool]]] = {}
        numbers = []
        for b, head, key, loop in plain_shares(*sizes, slots, cut, rule):
            numbers += [loop.share] if loop.share >= 0 else []
            for tile, t in loop.tiles():
                assert loop.turn(t) == parts.get(tile, 0)
                parts[tile] = parts.get(tile, 0) + 1
                found.setdefault((b, head, key), []).append((tile, loop.cuts(t)))
        n_shared += bool(numbers)
        assert len(set(numbers)) == len(numbers)
        room = cut.capacity * Hkv * (1 if layout == "varlen" else B)
        assert max(numbers, default=0) < room
        for place, tiles in whole.items():
            assert len(found.get(place, [])) == len(tiles)
            assert set(found.get(place, [])) == tiles
    assert n_shared > 20


def tensors_of(layout, lengths, Hq, Hkv) -> Tensors:
    """Those of a call that is not made."""
    if layout == "varlen":
        q, k = (sum(pair[i] for pair in [*lengths, UNOWNED]) for i in (0, 1))
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        packed = (torch.empty(n, H, 64) for n, H in ((q, Hq), (k, Hkv), (k, Hkv)))
        return Tensors(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    more = {"kv_lens": torch.zeros(len(lengths), dtype=torch.int32)} if layout == "kv_lens" else {}
    longest = max(k for _, k in lengths)
    return unwritten(lengths[0][0], longest, B=len(lengths), Hq=Hq, Hkv=Hkv, **more)


def test_what_is_shared_out_depends_on_a_sequence_alone():
    def found(Sq, Skv, Hq, Hkv, D=64, B=1, **options):
        problem = describe(unwritten(Sq, Skv, B=B, Hq=Hq, Hkv=Hkv, D=D), Options(**options))
        return (narrow if D <= 128 else wide).cut_of(problem).shares

    few_keys = found(4096, 77, 10, 10)
    assert few_keys.capacity == 3
    assert few_keys == found(4096, 77, 10, 10, B=16)
    causal = {"window_right": 0}
    assert found(4096, 4096, 8, 1, D=128, **causal).capacity == 8 * 32
    assert found(8192, 8192, 8, 1, D=128, **causal).capacity == 4 * 64
    assert found(4096, 4096, 7, 1, D=128, **causal).capacity == 7 * 32
    assert found(4096, 4096, 8, 1, D=256, **causal).capacity == 4 * 64
    # As many loops as two rounds and a bit, of an H200; two rounds; more heads.
    assert found(3473, 3473, 50, 10, D=128).capacity == 3 * 28
    assert found(4096, 4096, 16, 8, D=128) is None
    assert found(3473, 3473, 10, 10, D=128) is None
    # Many loops, short ones, and no heads to share out under a mask.
    for lengths_and_heads, options in (
        ((4096, 4096, 32, 32), {}),
        ((512, 77, 10, 10), {}),
        ((4096, 77, 10, 10), causal),
        ((0, 77, 10, 10), {}),
        ((4096, 0, 10, 10), {}),
    ):
        assert found(*lengths_and_heads, **options) is None


class Numbers:
    """What a kernel loads from, by the steps from where it begins."""

    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, step: int) -> Numbers:
        return Numbers(self.values, self.at + step)

    def __getitem__(self, i: int) -> object:
        return (self.values, self.at)[i]
