"""Tickets of packed sequences in the Hopper forward: every tile has one, and tiles that failed are
computed again."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from schedule_in_python import PROGRAM, InPython, Keys, Pointer, as_python

from lockstep.kernels.hopper.forward import groups
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import (
    BAD,
    ORDER_HEAD,
    ORDER_NUMBERS,
)
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import first_slot as _first_slot
from lockstep.kernels.hopper.forward.scheduling.part_rule import LEAST_KEYS, MOST, WANTED, parts_of
from lockstep.kernels.hopper.forward.scheduling.schedule import LONGEST_FIRST, UNSORTED
from lockstep.kernels.hopper.forward.scheduling.scheduler import schedule_by_ticket

first_slot = as_python(_first_slot)


def unsorted_sequence(
    slot: int, schedule: InPython, starts: list[int], lens: list[int]
) -> tuple[int, ...]:
    """`packed_sequences.unsorted_sequence`, which counts across the lanes of a warp."""
    firsts = [first_slot(schedule, start, b) for b, start in enumerate(starts[:-1])]
    b = sum(first <= slot for first in firsts) - 1
    return firsts[b], starts[b], lens[b], starts[b], lens[b] if b < len(lens) - 1 else BAD.value


@pytest.mark.parametrize(
    ("order", "shares"),
    list(product((LONGEST_FIRST, UNSORTED), (False, True))),
    ids=["longest first", "groups, longest first", "as is", "groups, as is"],
)
def test_every_tile_has_one_ticket(order, shares):
    draws = random.Random(0)
    for _ in range(100):
        lens = [draws.choice((0, 1, 100, 128, 300, 1000)) for _ in range(draws.randint(1, 9))]
        B = len(lens)
        # The last ones are rows of no sequence.
        lens.append(draws.choice((0, 0, 1, 200)))
        starts = [sum(lens[:b]) for b in range(B + 2)]
        block_q, Hq = draws.choice((128, 192)), draws.choice((1, 3, 8))
        group = draws.choice((2, 5, 8)) if shares else 1
        tiles = [groups.n_tiles(n, group, block_q) for n in lens]
        sequences = [*sorted(range(B), key=lambda b: -lens[b]), B]
        before = [sum(tiles[b] for b in sequences[:place]) for place in range(B + 1)]
        bounds = [
            n for b in sequences for n in (starts[b], lens[b], starts[b], lens[b] if b < B else -1)
        ]
        schedule = InPython(
            order=order.value,
            n_q_tiles=groups.most_tiles(starts[-1], B, group, block_q),
            Hq=Hq,
            HEADS=int(shares),
            heads_per_kv=group,
            B=B,
            l2_keys=draws.choice((0, 700, 2000, 1 << 30)),
            sequence_order_ptr=Pointer([0] * ORDER_HEAD.value + [*before, *bounds]),
            BLOCK_Q=block_q,
        )
        schedule.unsorted = partial(unsorted_sequence, schedule=schedule, starts=starts, lens=lens)
        found = Counter()
        for ticket in range(schedule.n_q_tiles * Hq):
            exists, *tile, q_start = schedule.packed_tile(ticket)
            found[(q_start, *tile)] += bool(exists)
            if order is LONGEST_FIRST and not exists:
                break
        expected = [
            (starts[b], head * group, q_tile * block_q)
            for b in range(B + 1)
            for head in range(Hq)
            for q_tile in range(tiles[b])
        ]
        assert +found == Counter(expected)


@pytest.mark.parametrize("has_slot_each", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_every_part_of_a_tile_has_one_ticket_or_a_program_has_all(group, has_slot_each):
    draws = random.Random(0)
    block_q, Hq = 128, 8
    for _ in range(100):
        # In the order of their keys; the last place has rows of no sequence.
        sizes = [
            (draws.choice((100, 400, 512, 1024)), draws.randint(6000, 40000)) for _ in range(3)
        ]
        sizes = [*sorted(sizes, key=lambda size: -size[1]), (0, -1)]
        tiles = [groups.n_tiles(n, group, block_q) for n, _ in sizes]
        n_parts = [
            parts_of.fn(n * Hq, keys - q, WANTED, MOST, LEAST_KEYS)
            for n, (q, keys) in zip(tiles, sizes, strict=True)
        ]
        each = [n * (m if has_slot_each else 1) for n, m in zip(tiles, n_parts, strict=True)]
        starts = [sum(n for n, _ in sizes[:b]) for b in range(4)]
        before = [sum(each[:b]) for b in range(4)]
        bounds = [n for b, (q, keys) in enumerate(sizes) for n in (starts[b], q, b, keys)]
        schedule = InPython(
            order=LONGEST_FIRST.value,
            Hq=Hq,
            B=3,
            BLOCK_Q=block_q,
            PARTS=True,
            l2_keys=draws.choice((0, 700, 1 << 30)),
            LAYOUT="varlen",
            HAS_RIGHT=True,
            sequence_order_ptr=Pointer([0, int(has_slot_each), *before, *bounds]),
            heads_per_kv=group,
            HEADS=int(group > 1),
        )
        found, slots = Counter(), Counter()
        for ticket in range(sum(each) * Hq + 9):
            exists, head, q_idx, q_start, keys = schedule.packed_tile(ticket)
            if exists:
                found[(q_start, head, q_idx, keys.part, keys.n_parts)] += 1
                slots[keys.slot + keys.part] += 1
        expected = [
            (starts[b], head * group, q_tile * block_q, part, n_parts[b])
            for b in range(3)
            for head in range(Hq)
            for q_tile in range(tiles[b])
            for part in range(n_parts[b] if has_slot_each else 1)
        ]
        assert found == Counter(expected)
        if has_slot_each:
            assert slots == Counter(range(len(expected)))
        else:
            assert set(slots) == {-1 - PROGRAM * MOST}


@pytest.mark.parametrize("parts", ["one", "each by itself", "all together"])
@pytest.mark.parametrize("order", [LONGEST_FIRST, UNSORTED], ids=["longest first", "as is"])
def test_a_second_pass_has_the_tiles_with_marks(order, parts):
    """A program draws tickets between those of others, more of them than a mark has bits. Of parts
    that it has all of, the last has the mark."""
    draws = random.Random(0)
    programs, B, n_tickets = 7, 3, 500
    n_parts = 1 if parts == "one" else 3
    n_posts = 3 if parts == "all together" else 1

    def new_tile(ticket: int, keys: Keys) -> SimpleNamespace:
        return SimpleNamespace(
            exists=ticket < (programs if order is UNSORTED else n_tickets), ticket=ticket,
            keys=keys, q_idx=0, with_keys=lambda keys: new_tile(ticket, keys),
        )  # fmt: skip

    for _ in range(50):
        drawn, posted, wanted = 0, [], []

        def draw_ticket(*_: Any, **__: Any) -> int:
            nonlocal drawn
            drawn += draws.randint(1, programs)
            return drawn - 1

        wrong = draws.choice((0, 1, draws.getrandbits(32) - (1 << 31)))
        schedule = SimpleNamespace(
            order=order.value,
            B=B,
            LAYOUT="varlen",
            PARTS=parts != "one",
            BLOCK_Q=128,
            blocks=lambda *_: (2, 14),
            sequence_order_ptr=Pointer(
                [0, int(parts == "each by itself")]
                + [0] * (ORDER_NUMBERS.value * (B + 1) + n_tickets)
            ),
            packed_tile=lambda ticket: new_tile(ticket, Keys(n_parts=n_parts)),
        )
        program = SimpleNamespace(
            schedule=schedule,
            build=SimpleNamespace(SECOND_PASS=True),
            tile_queue=SimpleNamespace(
                post=lambda n, tile, to=posted: to.append((n, tile)), await_wish=wanted.append
            ),
            failed=SimpleNamespace(collect=lambda wrong=wrong: wrong),
        )
        as_python(
            schedule_by_ticket,
            num_programs=lambda _: programs,
            atomic_add=draw_ticket,
        )(program)
        assert [n for n, _ in posted] == list(range(len(posted)))
        end = next(n for n, tile in posted if not tile.exists)
        first = [tile.ticket for _, tile in posted[:end]]
        again = [tile.ticket for _, tile in posted[end + 1 : -1]]
        assert not posted[-1][1].exists
        assert first[0] == PROGRAM
        assert len(first) == n_posts or order is LONGEST_FIRST
        # It drew, and posted, none that was not wanted.
        assert wanted == list(range(1, end if order is UNSORTED else end + 1))
        if n_posts > 1:
            blocks = [(tile.keys.first_block, tile.keys.end_block) for _, tile in posted[:3]]
            assert blocks == [(2, 6), (6, 10), (10, 14)]
        lasts = [i for i in range(end) if i % n_posts == n_posts - 1]
        marked = [first[i] for i in lasts if (wrong >> (i % 32)) & 1]
        assert sorted(again) == marked
