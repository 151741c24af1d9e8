"""Who waits for whom in the Hopper backward: its own functions, run as Python on barriers that
count as the GPU's do, with warps in random order. No one may wait forever, no tile may change while
it is read, and what the matrix units or the copy engine read must have been fenced."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import Anything, Barrier, Crew, PlainGluon, Slots, as_plain, make_plain

from lockstep.kernels.hopper.backward import nonfinite
from lockstep.kernels.hopper.backward.narrow import (
    apart,
    dq_sums,
    kernel,
    steps,
    tile_queue,
    tiles,
    together,
)
from lockstep.kernels.hopper.common import mailbox, ring

MODULES = (
    apart, dq_sums, kernel, mailbox, nonfinite, ring, steps, tile_queue, tiles, together,
)  # fmt: skip
NAMED = ("DQ_FULL", "EMPTY", "KV_EMPTY", "DKV_FULL", "CONSUMERS_MEET", "BOTH_CONSUMERS")
BLOCK_KV, HEAD_DIM = 128, {64: 128, 128: 64}
# Taken before they are replaced.
CREATE_TILES, CREATE_DQ_SUMS = tiles.Tiles.create.fn, dq_sums.DqSums.create.fn
CREATE_TILE_QUEUE, STAGE_DKV = tile_queue.TileQueue.create.fn, tiles.Tiles.stage_dkv.fn


class Value(Anything):
    """One that knows what it was made of: a loop, and the number of a query tile in it."""

    shape = (64,)

    def __init__(self, of) -> None:
        self.of = of
        self.is_spoilt = False


class Tile:
    """Shared memory that remembers what it holds, who reads it, and which writes were fenced."""

    dtype, shape = None, (1, 1)

    def __init__(self) -> None:
        self.readers = 0
        self.glances = []  # scores under way, which nobody may need in the end
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


class PlainTiles:
    def __init__(self, queries, keys, full_bar, ds, kv_bars, columns, together, stats) -> None:
        self.D_COLUMNS, self.DV_COLUMNS = columns
        self.TOGETHER, self.STATS = together, stats
        self.q_smem, self.stats_smem, self.dout_smem = queries
        self.k_smem, self.v_smem, self.ds_smem = keys
        self.full_bar, self.ds = full_bar, ds
        self.kv_full_bar, self.dkv_stored_bar = kv_bars
        self.named: dict = {}
        for stats, q in zip(self.stats_smem, self.q_smem, strict=True):
            stats.q = q

    def matrix(self, tile):
        return tile

    def keys(self, n, kept):
        return self.k_smem.index(0), self.v_smem.index(0)

    wait, queries, ds_tile = (getattr(tiles.Tiles, x).fn for x in ("wait", "queries", "ds_tile"))
    release, wait_empty = tiles.Tiles.release.fn, tiles.Tiles.wait_empty.fn
    release_keys, wait_keys_empty = tiles.Tiles.release_keys.fn, tiles.Tiles.wait_keys_empty.fn
    sync_consumers, dkv = tiles.Tiles.sync_consumers.fn, tiles.Tiles.dkv.fn
    wait_dkv = tiles.Tiles.wait_dkv.fn

    def stage_dkv(self, w, slot, dk, dv) -> None:
        if not ROLE.shares_tiles:
            for tile in self.dkv(slot, w):
                tile.written = {}  # from here on it is this consumer's alone
        STAGE_DKV(self, w, slot, dk, dv)


class PlainDqSums:
    def __init__(self, parts_smem, empty_bar) -> None:
        self.parts_smem, self.empty_bar = parts_smem, empty_bar

    wait_empty, publish = dq_sums.DqSums.wait_empty.fn, dq_sums.DqSums.publish.fn

    def stage(self, n, dq, half) -> None:
        self.parts_smem.index(n % 2).store(dq)


class PlainTileQueue:
    """Holds loops as they are, in place of their numbers."""

    def __init__(self, mailbox, sizes) -> None:
        self.ring, self.sizes = mailbox.ring, sizes
        self.loops = {}

    def post(self, n, loop, is_large=0) -> None:
        self.ring.wait_empty(n)
        self.loops[self.ring.slot(n)] = None if loop is None else (loop, is_large)
        self.ring.fill(n)

    def close(self, n) -> None:
        self.post(n, None)

    def has(self, n) -> bool:
        self.ring.wait_full(n)
        return self.loops[self.ring.slot(n)] is not None

    def read(self, n):
        found = self.loops[self.ring.slot(n)]
        self.ring.release(n)
        return found


@pytest.fixture
def crew(monkeypatch, request):
    crew = Crew(request.param)
    crew.sums = {}  # key tiles that have added to each query tile, in order
    crew.derived = {}  # what has been stored, by key tile and first row
    crew.tickets = 0
    crew.counts = {}  # by tile: how many key tiles have added to it

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

    def fence():
        for tile in ROLE.unfenced:
            tile.unfenced.discard(ROLE.consumer)
        ROLE.unfenced.clear()

    def read(*those):
        for tile in those:
            tile.readers += 1
        ROLE.groups.append((those, None))

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

    def send(desc, at, tile):
        is_shared = ROLE.name.startswith("add") or ROLE.shares_tiles
        value = tile.holds((0, 1) if is_shared else (at[1] // 64,))
        read(tile)
        if ROLE.name == "produce":
            crew.derived[at] = [*crew.derived.get(at, ()), value]
        else:
            ticket, t = value
            assert crew.begins[ticket] + t == at[0] // 32
            crew.sums.setdefault(at[0] // 32, []).append(ticket)
        tile.written = {}

    def overwrite_nonfinite(tile, part, parts, value):
        assert tile.readers == 0, "cleaned while it is read"
        assert tile not in ROLE.on_the_way, "cleaned before it is there"
        tile.nonfinite -= {part} if parts == 2 else {0, 1}
        tile.unfenced.add(ROLE.consumer)
        ROLE.unfenced.append(tile)

    def issue_scores(own, queries, columns):
        value = Value((own.loaded, queries.loaded))
        value.is_spoilt = not own.is_clean() or not queries.is_clean()
        for _ in range(columns.bit_count()):
            for tile in (own, queries):
                tile.glances.append(value)
            ROLE.groups.append(((own, queries), value))
        return value

    def column_weights(scores, large, s, lse2, log2_l, loop, tile, t, first_row, first_column):
        step = loop.ticket, t
        assert s.of == (("keys", loop.ticket), ("queries", *step))
        assert not s.is_spoilt
        if first_column == 0:
            ROLE.steps.append(step)
        ROLE.is_new = True
        return Value(step), Anything()

    def gradient(p, dp, *_):
        assert dp.of == (("keys", p.of[0]), ("queries", *p.of))
        assert not dp.is_spoilt
        return p

    def issue_dq(ds, k, half, columns):
        # Consumers apart multiply the step before; where there is none, it goes nowhere.
        goes = len(ROLE.steps) == (1 + (ROLE.apart and ROLE.is_new))
        ROLE.is_new = False
        if not goes:
            read()
            return Value(None)
        read(k, ds)
        step = ROLE.steps.pop(0)
        assert k.loaded == ("keys", step[0])
        assert k.is_clean()
        assert ds.holds((0, 1)) == step
        return Value(step)

    def add_product(sums, weights, tile):
        ticket, t = weights.of
        assert tile.loaded == ("queries", ticket, t)
        assert tile.is_clean()
        assert sums.of in (None, ticket)
        read(tile)
        return Value(ticket)

    plain = {
        "mbarrier": SimpleNamespace(**{**vars(crew.mbarrier), "wait": wait}),
        "tma_load": load,
        "tma_store": send,
        "add_part": lambda desc, tile, part, is_first, columns: send(desc, [tile * 32], part),
        "tma_store_wait": lambda n: settle(n, (0,)),
        "gl": GluonOfTiles(),
        "barriers": lambda n, count: Slots(Barrier(count) for _ in range(n)),
        "allocate_tiles": lambda desc, n: shaped([n, *desc.block_shape]),
        "allocate_numbers": lambda n: None,
        "KeyTile": lambda *_: None,
        "Tiles": PlainTiles,
        "DqSums": PlainDqSums,
        "TileQueue": PlainTileQueue,
        "Ring": as_plain(ring.Ring),
        "Mailbox": as_plain(mailbox.Mailbox),
        "SLOTS": mailbox.SLOTS.value,
        "arrive": arrive_by_number,
        "await_all": await_by_number,
        "fence_async_shared": fence,
        "await_warps": lambda: None,
        "n_pieces": int.bit_count,
        "empty_sums": lambda columns: (Value(None),) * columns.bit_count(),
        "nan_for_nonfinite": lambda sums: sums,
        "multiply_all": lambda sums, _number: sums,
        "store_pieces": lambda pieces, tile, _columns: [tile.store(x) for x in pieces],
        "issue_scores": issue_scores,
        "issue_dq": issue_dq,
        "add_products": lambda sums, weights, tile, columns: tuple(
            add_product(x, weights, tile) for x in sums
        ),
        "warpgroup_mma_wait": settle,
        "halves": lambda x: (x, x),
        "whole": lambda left, right: left,
        "load_half": lambda *_: Anything(),
        "column_weights": column_weights,
        "find_nonfinite": lambda tile, part, parts: int(part in tile.nonfinite),
        "overwrite_nonfinite": overwrite_nonfinite,
        "LargeScores": lambda *_: SimpleNamespace(log2_l=lambda *_: None),
        # Both loops take the same steps: now one, now the other.
        "has_large_scores": lambda flags, loop, heads: loop.ticket % 2,
        "has_nonfinite": lambda stats, *_: stats.q.had_nonfinite,
        "largest": lambda _: 0,
        "assign_keys": lambda ticket, *_: crew.assign(ticket),
        "_await_count": lambda tile, count: crew.pause(lambda: crew.counts.get(tile, 0) == count),
        "await_sums": lambda _: None,
        **{
            name: getattr(tiles, name).value
            for name in ("STAGES", "PARTS", "DS_TILES", "CONSUMERS_AND_WARP", *NAMED)
        },
        "ROWS": 64,
    }

    def atomic_add(where, one, **_):
        if where == "ticket":
            crew.tickets += 1
            return crew.tickets - 1
        crew.counts[where] = crew.counts.get(where, 0) + 1
        return None

    plain["gl"].atomic_add = atomic_add
    crew.scores = SimpleNamespace(hide_products=lambda s, *_: s, gradient=gradient, scale=1.0)
    make_plain(monkeypatch, MODULES, plain)
    return crew


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
    """From the tile `begins[ticket]` to the last one."""

    CONSTANT_TIME = False

    def next_in_group(self, tile, t, head):
        return tile + 1, t + 1, head

    def next(self, tile, t):
        return tile + 1, t + 1

    def next_number(self, t):
        return t + 1

    def first_number(self):
        return 0

    def nan_if_bad(self):
        return 0.0


def program(crew, block_q, is_apart, masked, draws):
    """The warps of one."""
    shares_tiles = block_q == 128
    query, key = describe(block_q, HEAD_DIM[block_q]), describe(BLOCK_KV, HEAD_DIM[block_q])
    # One piece or two of each: `pieces.py`.
    widths = HEAD_DIM[block_q], HEAD_DIM[block_q] * 3 // 4
    columns = crew.draws.choice(widths), crew.draws.choice(widths)
    memory = CREATE_TILES(query, query, query, key, key, *columns, not is_apart)
    parts = CREATE_DQ_SUMS(query)
    sizes = SimpleNamespace(
        BLOCK_Q=block_q,
        HAS_LEFT=False,
        HAS_RIGHT=masked,
        CONSTANT_TIME=False,
        heads_per_kv=1,
        LAYOUT="dense",
    )
    queue = CREATE_TILE_QUEUE(4, sizes)
    roles = {
        "produce": lambda: kernel.produce(
            queue,
            memory,
            *[query] * 3,
            *[key] * 2,
            *[query] * 2,
            None,
            "ticket",
            len(draws),
            1,
            1,
            True,
        ),
        "add 0": lambda: dq_sums.add_parts(0, queue, parts, query, 0, 64),
        "add 1": lambda: dq_sums.add_parts(1, queue, parts, query, 0, 64),
    }
    for name, run in roles.items():
        yield play(name, memory.named, run, apart=is_apart, shares_tiles=shares_tiles)
    for w in (0, 1):

        def consume(w=w):
            kernel.consume(w, queue, memory, parts, crew.scores, None, True)

        yield play(f"consume {w}", memory.named, consume, 128, w, is_apart, shares_tiles)


@pytest.mark.parametrize("crew", range(60), indirect=True)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("block_q", "is_apart"), [(64, False), (128, False), (128, True)])
def test_nobody_waits_forever_and_sums_have_one_order(crew, block_q, is_apart, masked):
    draws = crew.draws
    n_tiles = draws.choice([1, 2, 3, 5, 9])
    # By ticket: where a loop ends. Many are over at once.
    ends = [n_tiles, *range(n_tiles + 1)]
    crew.begins = begins = draws.choices(ends, k=draws.choice([1, 2, 5, 12]))
    cuts = [[masked and draws.random() < 0.4 for _ in range(n_tiles + 1)] for _ in begins]

    def assign(ticket):
        begin = begins[min(ticket, len(begins) - 1)]
        loop = PlainLoop(
            ticket=ticket,
            first_tile=begin,
            n_steps=n_tiles - begin,
            BLOCK_Q=block_q,
            HAS_LEFT=False,
            HAS_RIGHT=masked,
            cuts=lambda t: cuts[ticket][t],
            turn=lambda t: sum(other <= begin + t for other in begins[:ticket]),
        )
        key_tile = SimpleNamespace(
            head=0,
            first_q_tile=0,
            q_coordinates=lambda head, row: ("queries", ticket, row // block_q),
            kv_coordinates=lambda: ("keys", ticket),
            dkv_coordinates=lambda row: (ticket, row),
        )
        return key_tile, loop

    nonfinite = {at: masked and draws.random() < 0.3 for at in range(len(begins))}

    def has_nonfinite(at):
        """Of k and v, or of q and dout where they matter. The two of a pair are loaded alike."""
        if at[0] == "keys":
            return nonfinite[at[1]]
        return at[0] == "queries" and nonfinite[at[1]] and cuts[at[1]][at[2]]

    crew.assign, crew.has_nonfinite = assign, has_nonfinite
    programs = [
        program(crew, block_q, is_apart, masked, begins) for _ in range(draws.choice([1, 2, 3]))
    ]
    crew.run(*(warp for warps in programs for warp in warps))
    for tile in range(n_tiles):
        assert crew.sums.get(tile, []) == [i for i, b in enumerate(begins) if b <= tile]
    # dk and dv of every key tile, once.
    for ticket, begin in enumerate(begins):
        made_of = ticket if begin < n_tiles else None
        for row in range(0, BLOCK_KV, block_q):
            assert crew.derived[ticket, row] == [made_of] * 2
