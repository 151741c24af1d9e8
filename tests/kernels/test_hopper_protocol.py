"""Which warp waits for which in the Hopper forward: a model in which none may wait forever.

The model has the waits and releases of `scheduler.schedule_tiles`, `kernel.produce` and
`consumer.consume`, in their order, in constant time those of `cleaning.py`, too, and takes the
blocks of a tile from `schedule.py` itself. Warps run in random order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from schedule_in_python import InPython

from lockstep.kernels.hopper.common.mailbox import SLOTS
from lockstep.kernels.hopper.forward.cleaning import KEPT_TILES
from lockstep.kernels.hopper.forward.kernel import BLOCKS_LEFT
from lockstep.kernels.hopper.forward.plan import (
    BITS_STAGES,
    NARROW_PLANS,
    PLANS,
    ROWS,
    SHORT_PLANS,
    WIDE_KEYS,
    Plan,
)
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import BAD

# A warp says what it waits for, and goes on once that holds.
Warp = Iterator[Callable[[], bool]]


class Ring:
    """A ring: which tiles are there, and which slots are free."""

    def __init__(self, stages: int, consumers: int) -> None:
        self.stages, self.consumers = stages, consumers
        self.sent, self.released = 0, Counter()

    def there(self, i: int) -> Callable[[], bool]:
        return lambda: i < self.sent

    def free(self, i: int) -> Callable[[], bool]:
        return lambda: i < self.stages or self.released[i - self.stages] == self.consumers

    def release(self, i: int) -> None:
        # At a named barrier, no warp may arrive for an item before the producer has awaited the one
        # that was in its slot.
        assert i < self.sent
        self.released[i] += 1


class Barrier:
    """An mbarrier, of which only the parity of its phase is seen."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived = count, 0

    def arrive(self) -> None:
        self.arrived += 1

    def completed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.arrived // self.count & 1 != parity


class Rows(NamedTuple):
    """The blocks that a consumer sees of a tile, those that any does, and those that all see
    whole."""

    begin: int
    end: int
    tile_begin: int
    tile_end: int
    whole_begin: int
    whole_end: int

    def is_cut(self, block: int) -> bool:
        return not self.whole_begin <= block < self.whole_end


class Program:
    """One program with its rings, turns and tiles; in constant time, blocks that a mask cuts are
    cleaned."""

    def __init__(
        self,
        plan: Plan,
        left: int | None,
        right: int | None,
        tiles: list,
        producers: int = 1,
        constant_time: bool = False,
        splits: bool = False,
        draws_tiles: bool = False,
    ) -> None:
        self.plan, self.tiles, self.producers = plan, tiles, producers
        self.constant_time = constant_time
        self.cleans = constant_time and (left is not None or right is not None)
        self.clean = [Barrier(1) for _ in range(plan.stages)]
        self.k = Ring(plan.stages, plan.consumers)
        self.v = Ring(plan.stages, plan.consumers)
        self.q = [Ring(plan.q_stages, 1) for _ in range(plan.consumers)]
        self.tile_queue = Ring(SLOTS.value, plan.consumers + producers + self.cleans)
        # Its tiles are drawn, each when it is wanted.
        self.draws_tiles, self.wish, self.to_send = draws_tiles, Barrier(1), 0
        self.turns = Counter({0: 1})
        self.schedule = InPython(
            left=left or 0,
            right=right or 0,
            HAS_LEFT=left is not None,
            HAS_RIGHT=right is not None,
            BLOCK_KV=plan.block_kv,
            SPLIT=splits,
            n_queries=lambda tile: tile.len_q,
        )
        self.seen: dict[str, int] = {}
        self.cleaned, self.multiplied = Counter(), Counter()
        self.read_keys = Counter()  # tiles of which a consumer has the first bad key

    def blocks(self, tile, q_idx: int, rows: int) -> tuple[int, int]:
        return self.schedule.blocks(tile, q_idx, rows)

    def rows(self, c: int, tile) -> Rows:
        q_idx, block_q = tile.q_idx, self.plan.block_q
        return Rows(
            *self.blocks(tile, q_idx + c * ROWS, ROWS),
            *self.blocks(tile, q_idx, block_q),
            *self.schedule.inner_blocks(tile, q_idx, block_q),
        )

    def clean_blocks(self) -> Warp:
        seen = 0
        yield from self.read_queue(0)
        for n, tile in enumerate(self.tiles, 1):
            rows = self.rows(0, tile)
            for block in range(rows.tile_begin, rows.tile_end):
                # Only the parity of a phase is seen: it must not be two rounds behind.
                assert self.v.sent - seen <= self.plan.stages
                yield self.v.there(seen)
                if rows.is_cut(block):
                    # No consumer has multiplied, or released, what is not clean.
                    assert not self.multiplied[seen]
                if block + 1 == rows.tile_end:
                    # No consumer has yet to read what was in this place.
                    every = [self.read_keys[c] for c in range(self.plan.consumers)]
                    assert n - min(every) <= KEPT_TILES.value
                self.clean[seen % self.plan.stages].arrive()
                self.cleaned[seen] = True
                seen += 1
            yield from self.read_queue(n)
        self.seen["cleaner"] = seen

    def await_clean(self, i: int) -> Warp:
        """The i-th block is clean."""
        yield self.clean[i % self.plan.stages].completed(i // self.plan.stages & 1)
        assert self.cleaned[i]

    def schedule_tiles(self) -> Warp:
        # After the last tile comes one that does not exist.
        for n in range(len(self.tiles) + 1):
            if self.draws_tiles and n > 0:
                yield self.wish.completed((n - 1) & 1)
                assert self.to_send <= BLOCKS_LEFT.value
            yield self.tile_queue.free(n)
            self.tile_queue.sent += 1

    def read_queue(self, n: int) -> Warp:
        yield self.tile_queue.there(n)
        self.tile_queue.release(n)

    def produce(self, name: str, *rings: Ring, queries: bool) -> Warp:
        sent = 0
        yield from self.read_queue(0)
        for n, tile in enumerate(self.tiles):
            for q in self.q if queries else ():
                yield q.free(n)
                q.sent += 1
            begin, end = self.blocks(tile, tile.q_idx, self.plan.block_q)
            for block in range(begin, end):
                if queries:
                    self.to_send = end - block
                    if block == max(end - BLOCKS_LEFT.value, begin):
                        self.wish.arrive()
                for ring in rings:
                    yield ring.free(sent)
                    ring.sent += 1
                sent += 1
            yield from self.read_queue(n + 1)
        self.seen[name] = sent

    def producing(self) -> list[Warp]:
        """One warp, or with pages two, the second for values."""
        if self.producers == 1:
            return [self.produce("producer", self.k, self.v, queries=True)]
        return [
            self.produce("keys", self.k, queries=True),
            self.produce("values", self.v, queries=False),
        ]

    def issue(self, c: int, *values: int) -> Warp:
        """Products in turn; the second waits for `values`, which are clean."""
        if self.plan.pingpong:
            yield lambda: self.turns[c] > 0
            self.turns[c] -= 1
        if values:
            yield from self.await_values(*values)
        if self.plan.pingpong:
            self.turns[(c + 1) % self.plan.consumers] += 1

    def await_values(self, i: int) -> Warp:
        yield from self.await_clean(i) if self.cleans else iter([self.v.there(i)])
        self.multiplied[i] = True

    def mark_weights(self, rows: Rows, block: int, i: int) -> Warp:
        if self.cleans and self.schedule.HAS_LEFT and rows.is_cut(block):
            yield from self.await_clean(i)

    def skip(self, c: int, i: int, held: int) -> Warp:
        yield self.k.there(i)
        yield from self.issue(c)
        self.k.release(i)
        yield from self.await_values(held)
        self.v.release(held)

    def skip_behind(self, c: int, tile, rows: Rows, last: int, seen: int) -> Warp:
        """Returns the block whose values are yet to be released, and how many were seen."""
        for _ in range(rows.end, rows.tile_end):
            is_idle = self.schedule.SPLIT and tile.q_idx + c * ROWS >= tile.len_q
            yield from self.skip(c, seen, last if is_idle else seen)
            last = seen if is_idle else last
            seen += 1
        return last, seen

    def begin_tile(self, c: int, rows: Rows, n: int, i: int) -> Warp:
        yield self.q[c].there(n)
        yield self.k.there(i)
        yield from self.issue(c)
        self.k.release(i)
        if rows.begin + 1 < rows.end:
            yield self.k.there(i + 1)
        yield from self.mark_weights(rows, rows.begin, i)

    def change_tile(self, c: int, rows: Rows, n: int, last: int, i: int) -> Warp:
        yield self.q[c].there(n)
        yield self.k.there(i)
        yield from self.issue(c, last)
        self.read_keys[c] = n
        # In one loop, as in other steps.
        is_late = self.constant_time and self.plan.one_loop
        if not is_late:
            self.k.release(i)
        has_more = rows.begin + 1 < rows.end
        if has_more and i - last < self.plan.stages:
            yield self.k.there(i + 1)
        if is_late:
            self.k.release(i)
        self.v.release(last)
        if has_more:
            yield self.k.there(i + 1)
        yield from self.mark_weights(rows, rows.begin, i)

    def step(self, c: int, rows: Rows, block: int, seen: int) -> Warp:
        yield from self.issue(c, seen)
        if not self.constant_time:
            self.k.release(seen + 1)
        if block + 1 < rows.end:
            yield self.k.there(seen + 2)
        if self.constant_time:
            self.k.release(seen + 1)
        self.v.release(seen)
        yield from self.mark_weights(rows, block, seen + 1)

    def consume(self, c: int) -> Warp:
        seen = 0
        first, *later = self.tiles
        yield from self.read_queue(0)
        rows = self.rows(c, first)
        for _ in range(rows.tile_begin, rows.begin):
            yield from self.skip(c, seen, seen)
            seen += 1
        yield from self.begin_tile(c, rows, 0, seen)
        tile = first
        for n, next_tile in enumerate([*later, None], 1):
            for block in range(rows.begin + 1, rows.end):
                yield from self.step(c, rows, block, seen)
                seen += 1
            last, seen = yield from self.skip_behind(c, tile, rows, seen, seen + 1)
            yield from self.read_queue(n)
            self.q[c].release(n - 1)
            tile = next_tile
            if tile is not None:
                rows = self.rows(c, tile)
                for _ in range(rows.tile_begin, rows.begin):
                    yield from self.skip(c, seen, seen)
                    seen += 1
            if tile is not None and self.plan.q_stages == 2:
                yield from self.change_tile(c, rows, n, last, seen)
            else:
                yield from self.await_values(last)
                self.read_keys[c] = n
                self.v.release(last)
                if tile is not None:
                    yield from self.begin_tile(c, rows, n, seen)
        self.seen[f"consumer {c}"] = seen

    def run(self, draws: random.Random) -> None:
        warps = [
            self.schedule_tiles(),
            *self.producing(),
            *([self.clean_blocks()] if self.cleans else ()),
            *(self.consume(c) for c in range(self.plan.consumers)),
        ]
        waits = [(warp, lambda: True) for warp in warps]
        while waits:
            ready = [i for i, (_, holds) in enumerate(waits) if holds()]
            assert ready, f"all warps wait: {vars(self)}"
            i = draws.choice(ready)
            warp = waits[i][0]
            try:
                waits[i] = warp, next(warp)
            except StopIteration:
                del waits[i]


def draw_tile(draws: random.Random, plan: Plan) -> SimpleNamespace:
    len_q = draws.choice((1, 16, 63, 64, 100, 300, 500))
    len_kv = draws.choice((BAD.value, 0, 1, 63, 64, 100, 128, 256, 300, 700))
    return SimpleNamespace(
        len_q=len_q, len_kv=len_kv, q_idx=draws.randrange(0, len_q, plan.block_q)
    )


EVERY_PLAN = {*PLANS.values(), *SHORT_PLANS.values(), *NARROW_PLANS.values(), WIDE_KEYS}
EVERY_PLAN |= {replace(plans[64], stages=BITS_STAGES) for plans in (PLANS, SHORT_PLANS)}
EVERY_PLAN |= {replace(PLANS[128], pingpong=False)}
ONE_LOOPS = {PLANS[128], SHORT_PLANS[64], replace(SHORT_PLANS[64], stages=BITS_STAGES)}
EVERY_PLAN |= {replace(plan, one_loop=True) for plan in ONE_LOOPS}


FIRST, *OTHERS = sorted(EVERY_PLAN, key=repr)


@pytest.mark.parametrize(
    "plan", [FIRST, *(pytest.param(plan, marks=pytest.mark.slow) for plan in OTHERS)]
)
def test_no_warp_waits_forever(plan):
    draws = random.Random(0)
    for _ in range(800):
        left = None if plan.one_loop else draws.choice((None, None, 0, 17, 70, 129, 200))
        right = draws.choice((None, 0, 0, 5, 40, 300))
        tiles = [draw_tile(draws, plan) for _ in range(draws.randint(1, 5))]
        kind = draws.choice(({"producers": 1}, {"producers": 2}, {"constant_time": True}))
        program = Program(
            plan,
            left,
            right,
            tiles,
            splits=draws.random() < 0.5,
            draws_tiles=draws.random() < 0.5,
            **kind,
        )
        for tile in tiles:
            begin, end = program.blocks(tile, tile.q_idx, plan.block_q)
            for c in range(plan.consumers):
                mine = program.blocks(tile, tile.q_idx + c * ROWS, ROWS)
                assert begin <= mine[0] < mine[1] <= end
        program.run(draws)
        # All warps count the same blocks.
        assert len(set(program.seen.values())) == 1
