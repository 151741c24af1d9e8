"""Who waits for whom in the Hopper backward: its own functions, run as Python on barriers that
count as the GPU's do, with warps in random order. No one may wait forever, no tile may change while
it is read, and what the matrix units or the copy engine read must have been fenced."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import Anything, Barrier, Crew, PlainGluon, Slots, make_plain

from lockstep.kernels.hopper import backward_apart as apart
from lockstep.kernels.hopper import backward_kernel as kernel
from lockstep.kernels.hopper import backward_products as products
from lockstep.kernels.hopper import backward_strays as strays
from lockstep.kernels.hopper import backward_tiles as tiles
from lockstep.kernels.hopper import backward_together as together
from lockstep.kernels.hopper import backward_turns as turns

MODULES = (apart, kernel, products, strays, tiles, together, turns)
# Taken before they are replaced.
CREATE_TILES, CREATE_TURNS = tiles.Tiles.create.fn, turns.Turns.create.fn
DESC = SimpleNamespace(
    block_type=SimpleNamespace(nbytes=1), block_shape=[1] * 5, dtype=None, layout=None
)


class Tile:
    """Shared memory that remembers who reads it, and which writes have been fenced."""

    dtype = None

    def __init__(self) -> None:
        self.readers = 0
        self.written = [0, 0]  # how often, by each consumer
        self.fenced = [0, 0]

    def slice(self, *_, **__):
        return self

    permute = reshape = slice

    def load(self, _):
        return Anything()

    def store(self, _):
        assert self.readers == 0, "written while it is read"
        me = ROLE.consumer
        self.written[me] += 1
        ROLE.unfenced.append((self, me))

    def read_exchanged(self) -> None:
        """What both consumers have written is there, and fenced."""
        assert self.written[0] == self.written[1], "half of it is missing"
        assert self.fenced == self.written, "not fenced"
        self.readers += 1


ROLE = threading.local()


class GluonOfTiles(PlainGluon):
    @staticmethod
    def allocate_shared_memory(_dtype, shape, _layout):
        return Slots(Tile() for _ in range(shape[0]))


class PlainTiles:
    def __init__(self, queries, keys, q_bars, ds_bars, kv_bars) -> None:
        self.q, self.stats, self.dout = queries
        self.k, self.v, self.ds = keys
        self.k.shape = (1,) * 6
        self.full, self.inspected = q_bars
        self.ds_full, self.ds_empty = ds_bars
        self.kv_full, self.dkv_full, self.k_inspected = kv_bars
        self.named: dict = {}

    def matrix(self, tile):
        return tile

    def keys(self, n, kept):
        return self.k.index(0), self.v.index(0)

    release, await_empty = tiles.Tiles.release.fn, tiles.Tiles.await_empty.fn
    meet = tiles.Tiles.meet.fn


class PlainTurns:
    def __init__(self, parts, drained, ready, passed) -> None:
        self.parts, self.drained, self.ready, self.passed = parts, drained, ready, passed

    await_room, announce = turns.Turns.await_room.fn, turns.Turns.announce.fn

    def leave(self, n, dq, half) -> None:
        self.parts.index(n % 2).store(dq)


@pytest.fixture
def crew(monkeypatch, request):
    crew = Crew(request.param)
    crew.sums = {}  # key tiles that have added to each query tile, in order

    def load(desc, at, barrier, tile):
        crew.pause()
        assert tile.readers == 0, "loaded while it is read"
        barrier.change(0, -1)

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

    def fence():
        for tile, who in ROLE.unfenced:
            tile.fenced[who] += 1
        ROLE.unfenced.clear()

    def read(*those, exchanged=None):
        for tile in those:
            tile.readers += 1
        if exchanged is not None:
            exchanged.read_exchanged()
        ROLE.groups.append([*those, *([exchanged] if exchanged is not None else [])])
        return Anything()

    def settle(pending, deps):
        crew.pause()
        while len(ROLE.groups) > pending:
            for tile in ROLE.groups.pop(0):
                tile.readers -= 1
        return deps[0] if len(deps) == 1 else deps

    def send(desc, at, part):
        if ROLE.name == "produce":
            return  # dk and dv, when everyone is done
        part.read_exchanged()
        ROLE.groups.append([part])
        crew.sums.setdefault(at[0] // 32, []).append(ROLE.program)

    def multiply_dq(ds, k, half):
        ROLE.products += 1
        # Consumers apart first multiply what lies there, and it goes nowhere.
        nowhere = ROLE.apart and ROLE.products == 1
        return read(k, exchanged=None if nowhere else ds)

    plain = {
        "mbarrier": crew.mbarrier,
        "tma_load": load,
        "tma_store": send,
        "_tma_add": send,
        "tma_store_wait": lambda n: settle(n, (0,)),
        "gl": GluonOfTiles(),
        "barriers": lambda n, count: Slots(Barrier(count) for _ in range(n)),
        "allocate_tiles": lambda desc, n: Slots(Tile() for _ in range(n)),
        "Tiles": PlainTiles,
        "Turns": PlainTurns,
        "arrive": arrive_by_number,
        "await_all": await_by_number,
        "fence_async_shared": fence,
        "multiply_scores": lambda own, queries: read(own, queries),
        "multiply_dq": multiply_dq,
        "warpgroup_mma": lambda left, right, *_, **__: read(right),
        "warpgroup_mma_wait": settle,
        "weigh_seen": lambda *_: (Anything(), Anything()),
        "derive_scores": lambda *_: Anything(),
        "replace_strays": lambda *_: None,
        "has_strays": lambda *_: False,
        "largest": lambda _: 0,
        "_await_count": lambda tile, count: crew.pause(
            lambda: len(crew.counts.setdefault(tile, [])) == count
        ),
        "_await_sums": lambda _: None,
        **{name: getattr(tiles, name).value for name in ("STAGES", "PARTS", "STAGED", "EMPTY")},
        **{name: getattr(tiles, name).value for name in ("MEETING", "CONSUMERS")},
        "CONSUMERS_AND_WARP": tiles.CONSUMERS_AND_WARP.value,
        "SLOTS": turns.SLOTS.value,
        "ROWS": 64,
    }
    crew.counts = {}  # by tile: a 1 for each key tile that has added to it
    plain["gl"].atomic_add = lambda tile, one, **_: crew.counts.setdefault(tile, []).append(one)
    make_plain(monkeypatch, MODULES, plain)
    return crew


def play(role, program, named, action, threads=32, consumer=None, apart=False):
    """A warp, or a warpgroup, that knows who it is."""

    def run() -> None:
        ROLE.name, ROLE.program, ROLE.named, ROLE.threads = role, program, named, threads
        ROLE.consumer, ROLE.apart, ROLE.products = consumer, apart, 0
        ROLE.unfenced, ROLE.groups = [], []
        action()

    return run


@pytest.mark.parametrize("crew", range(30), indirect=True)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_q", [64, 128])
def test_nobody_waits_forever_and_sums_have_one_order(crew, block_q, masked):
    draws = crew.draws
    n_tiles = draws.choice([1, 2, 3, 5, 9])
    # By ticket; whoever comes later walks further, as under a causal mask.
    begins = sorted(draws.randrange(n_tiles + 1) for _ in range(draws.choice([1, 2, 3])))[::-1]
    warps = []
    for program, begin in enumerate(begins):
        team = CREATE_TILES(*[DESC] * 5)
        parts = CREATE_TURNS(DESC)
        cuts = [masked and draws.random() < 0.4 for _ in range(n_tiles + 1)]
        walk = SimpleNamespace(
            first_tile=begin,
            n_steps=n_tiles - begin,
            BLOCK_Q=block_q,
            HAS_LEFT=False,
            HAS_RIGHT=masked,
            cuts=cuts.__getitem__,
            next=lambda tile, t: (tile + 1, t + 1),
            next_number=lambda t: t + 1,
            turn=lambda t, i=program, b=begin: sum(other <= b + t for other in begins[:i]),
        )
        is_apart = block_q == 128
        for w in (0, 1):

            def consumer(w=w, walk=walk, team=team, parts=parts):
                kernel.consume(w, walk, team, parts, 1.0, 1.0, 1.0, False, True)

            warps.append(play(f"consume {w}", program, team.named, consumer, 128, w, is_apart))
        helpers = {
            "produce": lambda walk=walk, team=team: kernel.produce(
                Anything(), walk, team, 1, *[DESC] * 7
            ),
            "take turns": lambda walk=walk, parts=parts: turns.take_turns(parts, 0, walk),
            "add": lambda walk=walk, parts=parts: turns.add_parts(parts, DESC, 0, walk),
        }
        if masked:
            helpers["inspect"] = lambda walk=walk, team=team: strays.inspect(walk, team)
        warps += [play(name, program, team.named, run) for name, run in helpers.items()]
    crew.run(*warps)
    for tile in range(n_tiles):
        assert crew.sums.get(tile, []) == [i for i, b in enumerate(begins) if b <= tile]
