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

from schedule_in_python import InPython, Pointer, as_python

from lockstep.kernels.hopper.forward import groups
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import (
    BAD,
    ORDER_HEAD,
    ORDER_NUMBERS,
)
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import first_slot as _first_slot
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
            sequence_order_ptr=Pointer([0, *before, *bounds]),
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


@pytest.mark.parametrize("order", [LONGEST_FIRST, UNSORTED], ids=["longest first", "as is"])
def test_a_second_pass_has_the_tiles_with_marks(order):
    """A program draws tickets between those of others, more of them than a mark has bits."""
    draws = random.Random(0)
    programs, B, n_tickets = 7, 3, 500
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
            tile_queue=SimpleNamespace(
                post=lambda n, tile, to=posted: to.append((n, tile)), await_wish=wanted.append
            ),
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
        # It drew none that was not wanted.
        assert wanted == ([] if order is UNSORTED else list(range(1, end + 1)))
        marked = [ticket for i, ticket in enumerate(first) if (wrong >> (i % 32)) & 1]
        assert sorted(again) == marked
