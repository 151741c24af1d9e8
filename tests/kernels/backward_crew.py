"""Warps of the Hopper backward as plain Python: shared memory that remembers what it holds, and
barriers that count as the GPU's do. For the tests of who waits for whom."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from crew import Anything, Barrier, PlainGluon, Slots, as_plain

from lockstep.kernels.hopper.common import mailbox, ring


class Value(Anything):
    """One that knows what it was made of: a loop, and the number of a query tile in it."""

    shape = (64, 32)

    def __init__(self, of) -> None:
        self.of = of
        self.is_spoilt = False


class Tile:
    """Shared memory that remembers what it holds, who reads it, and which writes were fenced."""

    dtype, shape = None, (1, 1)

    def __init__(self) -> None:
        self.readers = 0
        self.glances = []  # scores under way, which may not be needed in the end
        self.loaded = None
        self.had_nonfinite = False  # when it was loaded
        self.nonfinite = set()  # consumers in whose half there are some
        self.written = {}  # by each consumer, since it was last loaded or sent
        self.unfenced = set()

    def slice(self, *_, **__):
        return self

    permute = reshape = slice

    def load(self, _):
        return Anything()

    def store(self, value):
        assert self.readers == 0, "written while it is read"
        self.loaded = None
        self.written[ROLE.consumer] = value.of
        self.unfenced.add(ROLE.consumer)
        ROLE.unfenced.append(self)

    def is_clean(self):
        return not self.nonfinite and not self.unfenced

    def holds(self, writers):
        """What these consumers, and no others, have written: the same, and fenced."""
        assert set(self.written) == set(writers), "half of it is missing"
        assert not self.unfenced, "not fenced"
        (value,) = set(self.written.values())
        return value


ROLE = threading.local()


class GluonOfTiles(PlainGluon):
    @staticmethod
    def max(x, axis):
        return x

    @staticmethod
    def allocate_shared_memory(_dtype, shape, _layout):
        return shaped(shape)


def shaped(shape):
    slots = Slots(Tile() for _ in range(shape[0]))
    slots.shape = shape
    return slots


def describe(rows, columns):
    nbytes = SimpleNamespace(nbytes=1)
    shape = [1, 1, 1, rows, columns]
    return SimpleNamespace(block_type=nbytes, block_shape=shape, dtype=None, layout=None)


class PlainTileQueue:
    """Holds loops as they are, in place of their numbers."""

    def __init__(self, mailbox, sizes) -> None:
        self.ring, self.sizes = mailbox.ring, sizes
        self.loops = {}

    def post(self, n, loop, _key_tile, is_large=0, _size=0) -> None:
        self.ring.wait_empty(n)
        self.loops[self.ring.slot(n)] = None if loop is None else (loop, is_large)
        self.ring.fill(n)

    def close(self, n) -> None:
        self.post(n, None, None)

    def has(self, n) -> bool:
        self.ring.wait_full(n)
        return self.loops[self.ring.slot(n)] is not None

    def read(self, n, kept=False):
        found = self.loops[self.ring.slot(n)]
        if not kept:
            self.ring.release(n)
        return found

    def rows(self, n, _wanted):
        return None

    # Of loops that may be cut: `PlainLoop.carried` is what `Sizes.carried` would be.

    def signals_before(self, n) -> int:
        return self.loops[self.ring.slot(n)][0].carried[0]

    def goes_on(self, n) -> bool:
        return self.loops[self.ring.slot(n)][0].carried[1]

    def sums_ptr(self, n) -> int:
        return self.loops[self.ring.slot(n)][0].carried[2]

    def signals_at(self, n) -> str:
        return self.loops[self.ring.slot(n)][0].carried[3]

    def release(self, n) -> None:
        self.ring.release(n)


def play(role, named, action, threads=32, consumer=None, apart=False, shares_tiles=False):
    """A warp, or a warpgroup, that knows who it is."""

    def run() -> None:
        ROLE.name, ROLE.named, ROLE.threads = role, named, threads
        ROLE.consumer, ROLE.apart, ROLE.steps, ROLE.is_new = consumer, apart, [], False
        ROLE.shares_tiles = shares_tiles  # consumers, of dk and dv
        ROLE.unfenced, ROLE.groups, ROLE.on_the_way = [], [], {}
        action()

    return run


class PlainLoop(SimpleNamespace):
    """From the tile `begins[ticket]` to the last one, or a span of these, from number `first`."""

    CONSTANT_TIME = False
    first = 0

    def next_in_group(self, tile, t, head):
        return tile + 1, t + 1, head

    def next(self, tile, t):
        return tile + 1, t + 1

    def next_number(self, t):
        return t + 1

    def first_number(self):
        return self.first

    def nan_if_bad(self):
        return 0.0


def fence():
    for tile in ROLE.unfenced:
        tile.unfenced.discard(ROLE.consumer)
    ROLE.unfenced.clear()


def read(*those):
    for tile in those:
        tile.readers += 1
    ROLE.groups.append((those, None))


def overwrite_nonfinite(tile, part, parts, value):
    assert tile.readers == 0, "cleaned while it is read"
    assert tile not in ROLE.on_the_way, "cleaned before it is there"
    tile.nonfinite -= {part} if parts == 2 else {0, 1}
    tile.unfenced.add(ROLE.consumer)
    ROLE.unfenced.append(tile)


def add_product(sums, weights, tile):
    ticket, t = weights.of
    assert tile.loaded == ("queries", ticket, t)
    assert tile.is_clean()
    assert sums.of in (None, ticket)
    read(tile)
    return Value(ticket)


def hardware(crew):
    """What kernels use of the GPU, by name, for the warps of a crew. Sums are not there: `send`."""
    crew.tickets = 0
    crew.counts = {}  # by tile: how often it has been counted up

    def load(desc, at, barrier, tile):
        crew.pause()
        assert tile.readers == 0, "loaded while it is read"
        assert not tile.written, "loaded before it has been sent"
        for value in tile.glances:
            value.is_spoilt = True
        tile.loaded = at
        tile.had_nonfinite = crew.has_nonfinite(at)
        tile.nonfinite = {0, 1} if tile.had_nonfinite else set()
        ROLE.on_the_way[tile] = barrier
        barrier.change(0, -1)

    def wait(barrier, phase, pred=True):
        crew.mbarrier.wait(barrier, phase, pred)
        if pred:
            arrived = [tile for tile, other in ROLE.on_the_way.items() if other is barrier]
            for tile in arrived:
                del ROLE.on_the_way[tile]

    def arrive_by_number(number, threads):
        came = ROLE.named.setdefault(number, {"who": {}, "phase": 0})
        assert ROLE.name not in came["who"], "came twice"
        came["who"][ROLE.name] = ROLE.threads
        assert sum(came["who"].values()) <= threads
        if sum(came["who"].values()) == threads:
            came["who"] = {}
            came["phase"] += 1
        crew.pause()
        return came

    def await_by_number(number, threads):
        phase = ROLE.named.setdefault(number, {"who": {}, "phase": 0})["phase"]
        came = arrive_by_number(number, threads)
        crew.pause(lambda: came["phase"] != phase)

    def settle(pending, deps):
        crew.pause()
        while len(ROLE.groups) > pending:
            those, value = ROLE.groups.pop(0)
            for tile in those:
                if value is None:
                    tile.readers -= 1
                else:
                    tile.glances.remove(value)
        return deps[0] if len(deps) == 1 else deps

    def await_count(tile, count, or_more=False):
        def is_there():
            found = crew.counts.get(tile, 0)
            return found >= count if or_more else found == count

        crew.pause(is_there)

    def signal(where):
        crew.pause()
        crew.counts[where] = crew.counts.get(where, 0) + ROLE.threads

    def atomic_add(where, one, **_):
        if where == "ticket":
            crew.tickets += 1
            return crew.tickets - 1
        crew.counts[where] = crew.counts.get(where, 0) + 1
        return None

    gluon = GluonOfTiles()
    gluon.atomic_add = atomic_add
    return {
        "mbarrier": SimpleNamespace(**{**vars(crew.mbarrier), "wait": wait}),
        "tma_load": load,
        "tma_store_wait": lambda n: settle(n, (0,)),
        "gl": gluon,
        "barriers": lambda n, count: Slots(Barrier(count) for _ in range(n)),
        "allocate_tiles": lambda desc, n: shaped([n, *desc.block_shape]),
        "allocate_numbers": lambda n: None,
        "KeyTile": lambda *_: None,
        "TileQueue": PlainTileQueue,
        "Ring": as_plain(ring.Ring),
        "Mailbox": as_plain(mailbox.Mailbox),
        "SLOTS": mailbox.SLOTS.value,
        "arrive": arrive_by_number,
        "await_all": await_by_number,
        "fence_async_shared": fence,
        "await_warps": lambda: None,
        "as_registers": lambda x: x,
        "halves": lambda x: (x, x),
        "load_half": lambda *_: Anything(),
        "warpgroup_mma_wait": settle,
        "find_nonfinite": lambda tile, part, parts: int(part in tile.nonfinite),
        "overwrite_nonfinite": overwrite_nonfinite,
        "has_nonfinite": lambda stats, *_: stats.q.had_nonfinite,
        "largest": lambda _: 0,
        "assign_keys": lambda ticket, *_: crew.assign(ticket),
        "await_count": await_count,
        "signal": signal,
        "await_sums": lambda _: settle(0, (0,)),
        "ROWS": 64,
    }
