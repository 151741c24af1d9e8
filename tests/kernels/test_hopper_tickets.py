"""Tickets of packed sequences in the Hopper forward: every tile has one, and tiles that failed are
computed again."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from schedule_in_python import Pointer, as_python, in_python

from lockstep.kernels.hopper.forward.scheduling.schedule import (
    BAD,
    LONGEST_FIRST,
    ORDER_HEAD,
    ORDER_NUMBERS,
    UNSORTED,
)
from lockstep.kernels.hopper.forward.scheduling.scheduler import schedule_by_ticket


def unsorted_sequence(
    slot: int, starts: list[int], lens: list[int], block_q: int
) -> tuple[int, ...]:
    """`Schedule._unsorted_sequence`, which counts across the lanes of a warp."""
    firsts = [start // block_q + b for b, start in enumerate(starts[:-1])]
    b = sum(first <= slot for first in firsts) - 1
    return firsts[b], starts[b], lens[b], starts[b], lens[b] if b < len(lens) - 1 else BAD.value


@pytest.mark.parametrize("order", [LONGEST_FIRST, UNSORTED], ids=["longest first", "as is"])
def test_every_tile_has_one_ticket(order):
    draws = random.Random(0)
    for _ in range(100):
        lens = [draws.choice((0, 1, 100, 128, 300, 1000)) for _ in range(draws.randint(1, 9))]
        B = len(lens)
        # The last ones are rows of no sequence.
        lens.append(draws.choice((0, 0, 1, 200)))
        starts = [sum(lens[:b]) for b in range(B + 2)]
        block_q, Hq = draws.choice((128, 192)), draws.choice((1, 3, 8))
        tiles = [-(-n // block_q) for n in lens]
        sequences = [*sorted(range(B), key=lambda b: -lens[b]), B]
        before = [sum(tiles[b] for b in sequences[:place]) for place in range(B + 1)]
        bounds = [
            n for b in sequences for n in (starts[b], lens[b], starts[b], lens[b] if b < B else -1)
        ]
        schedule = SimpleNamespace(
            order=order.value,
            n_q_tiles=starts[-1] // block_q + B + 1,
            Hq=Hq,
            heads_per_kv=1,
            B=B,
            l2_keys=draws.choice((0, 700, 2000, 1 << 30)),
            sequence_order_ptr=Pointer([0, *before, *bounds]),
            BLOCK_Q=block_q,
        )
        schedule._sorted_sequence = lambda slot, at=schedule: in_python("_sorted_sequence")(
            at, slot
        )
        schedule._unsorted_sequence = lambda slot, x=(starts, lens, block_q): unsorted_sequence(
            slot, *x
        )
        found = Counter()
        for ticket in range(schedule.n_q_tiles * Hq):
            exists, *tile, q_start = in_python("packed_tile")(schedule, ticket)
            found[(q_start, *tile)] += bool(exists)
            if order is LONGEST_FIRST and not exists:
                break
        expected = [
            (starts[b], head, q_tile * block_q)
            for b in range(B + 1)
            for head in range(Hq)
            for q_tile in range(tiles[b])
        ]
        assert +found == Counter(expected)


@pytest.mark.parametrize("order", [LONGEST_FIRST, UNSORTED], ids=["longest first", "as is"])
def test_a_second_pass_has_the_tiles_with_marks(order):
    """A program draws tickets between those of others, more of them than a mark has bits."""
    draws = random.Random(0)
    programs, B, n_tickets = 7, 3, 500
    for _ in range(50):
        drawn, posted = 0, []

        def draw_ticket(*_: Any, **__: Any) -> int:
            nonlocal drawn
            drawn += draws.randint(1, programs)
            return drawn - 1

        wrong = draws.choice((0, 1, draws.getrandbits(32) - (1 << 31)))
        schedule = SimpleNamespace(
            order=order.value,
            B=B,
            sequence_order_ptr=Pointer(
                [0] * (ORDER_HEAD.value + ORDER_NUMBERS.value * (B + 1) + n_tickets)
            ),
            packed_tile=lambda ticket: SimpleNamespace(
                exists=ticket < (programs if order is UNSORTED else n_tickets), ticket=ticket
            ),
        )
        program = SimpleNamespace(
            schedule=schedule,
            build=SimpleNamespace(SECOND_PASS=True),
            tile_queue=SimpleNamespace(post=lambda n, tile, to=posted: to.append((n, tile))),
            failed=SimpleNamespace(collect=lambda wrong=wrong: wrong),
        )
        as_python(
            schedule_by_ticket,
            program_id=lambda _: 4,
            num_programs=lambda _: programs,
            atomic_add=draw_ticket,
        )(program)
        assert [n for n, _ in posted] == list(range(len(posted)))
        end = next(n for n, tile in posted if not tile.exists)
        first = [tile.ticket for _, tile in posted[:end]]
        again = [tile.ticket for _, tile in posted[end + 1 : -1]]
        assert not posted[-1][1].exists
        assert first[0] == 4
        assert len(first) == 1 or order is LONGEST_FIRST
        marked = [ticket for i, ticket in enumerate(first) if (wrong >> (i % 32)) & 1]
        assert sorted(again) == marked
