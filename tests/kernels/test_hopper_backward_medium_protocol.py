"""Who waits for whom in the Hopper backward of medium heads: its own functions, run as Python on
barriers that count as the GPU's do, with warps in random order. No one may wait forever, no tile
may change while it is read, and what the matrix units or the copy engine read must have been
fenced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from backward_crew import (
    ROLE,
    PlainLoop,
    Value,
    add_product,
    describe,
    hardware,
    play,
    read,
)
from crew import Anything, Crew, as_plain, make_plain

from lockstep.kernels.hopper.backward.medium import consumer, dq_sums, kernel, tiles
from lockstep.kernels.hopper.backward.narrow import tile_queue
from lockstep.kernels.hopper.common import mailbox, ring

MODULES = (consumer, dq_sums, kernel, mailbox, ring, tile_queue, tiles)
NAMED = ("DQ_FULL", "EMPTY", "DS_READ", "DKV_FULL", "CONSUMERS_MEET")
THREADS = ("BOTH_CONSUMERS", "CONSUMERS_AND_WARP", "CONSUMER_AND_WARP")
# Taken before they are replaced.
CREATE_TILES, CREATE_DQ_SUMS = tiles.Tiles.create.fn, dq_sums.DqSums.create.fn
CREATE_TILE_QUEUE, STAGE_DKV = tile_queue.TileQueue.create.fn, tiles.Tiles.stage_dkv.fn
SUMS_ROWS = dq_sums.SUMS_ROWS.value


class Weights(Value):
    """Weights of a step. Only their own gradients may be multiplied by them."""

    def __mul__(self, dp):
        assert dp.of == (("keys", self.of[0]), ("queries", *self.of))
        return self


class PlainTiles(as_plain(tiles.Tiles)):
    def __init__(self, *parts) -> None:
        super().__init__(*parts)
        self.named: dict = {}
        for stats, q in zip(self.stats_smem, self.q_smem, strict=True):
            stats.q = q

    def matrix(self, tile):
        return tile

    def dk_tiles(self, slot, w):
        if w == 0:
            return self.q_smem.index(slot), self.q_rest_smem.index(slot)
        return self.dout_smem.index(slot), self.ds_smem.index(0)

    def stage_dkv(self, w, slot, *sums) -> None:
        for tile in self.dk_tiles(slot, w):
            tile.written = {}  # from here on it is this consumer's alone
        STAGE_DKV(self, w, slot, *sums)


@pytest.fixture
def crew(monkeypatch, request):
    crew = Crew(request.param)
    crew.sums = {}  # key tiles that have added to the parts of each query tile, in order
    crew.derived = {}  # what has been stored, by key tile

    def send(desc, at, tile):
        if ROLE.name == "produce":
            ticket, row = at
            writers = (0, 1) if row is None else (row // 64,)
            crew.derived.setdefault(ticket, []).append((row, tile.holds(writers)))
        else:
            ticket, t = tile.holds((int(ROLE.name[-1]),))
            assert crew.begins[ticket] + t == at[0] // SUMS_ROWS
            crew.sums.setdefault(at[0], []).append(ticket)
        read(tile)
        tile.written = {}

    def issue_scores(w, n, slot, memory):
        """After the last step of a loop they are not needed."""
        k, q = memory.k_smem.index(0), memory.q_smem.index(slot)
        rest = memory.k_rest_smem.index(0), memory.q_rest_smem.index(slot)
        value = Value((k.loaded, q.loaded))
        value.is_spoilt = not all(tile.is_clean() for tile in (k, q, *rest))
        for those in ((k, q), rest):
            for tile in those:
                tile.glances.append(value)
            ROLE.groups.append((those, value))
        return value

    def multiply(a, b, acc, use_acc=True, is_async=False):
        """dP or a part of dQ."""
        assert b.is_clean()
        read(a, b)
        if b.loaded[0] == "keys":
            step = a.holds((0, 1))
            assert b.loaded == ("keys", step[0])
            return Value(step)
        assert a.is_clean()
        return Value((a.loaded, b.loaded))

    def weights_and_slopes(scores, s, stats_smem, loop, t, w, first):
        assert s.of == (("keys", loop.ticket), ("queries", loop.ticket, t))
        assert not s.is_spoilt
        return Weights((loop.ticket, t)), Anything()

    plain = {
        **hardware(crew),
        "tma_store": send,
        "tma_add": send,
        "Tiles": PlainTiles,
        "DqSums": as_plain(dq_sums.DqSums),
        "rest_of": lambda at: at,
        "zeros": lambda columns: Value(None),
        "weights_and_slopes": weights_and_slopes,
        "issue_scores": issue_scores,
        "warpgroup_mma": multiply,
        "add_product": add_product,
        **{name: getattr(tiles, name).value for name in ("STAGES", *NAMED, *THREADS)},
        "SUMS_ROWS": SUMS_ROWS,
        "HALF": 32,
    }

    crew.scores = SimpleNamespace(CAPPED=False, scale=1.0)
    make_plain(monkeypatch, MODULES, plain)
    return crew


def program(crew, masked, n_tickets):
    """The warps of one."""
    query, key = describe(64, 128), describe(128, 128)
    memory = CREATE_TILES(query, query, query, query, key, key, key)
    sums = CREATE_DQ_SUMS(query, query)
    sizes = SimpleNamespace(
        BLOCK_Q=64, HAS_LEFT=False, HAS_RIGHT=masked, CONSTANT_TIME=False, heads_per_kv=1,
        SHARED=False, CUT=False, LAYOUT="dense",
    )  # fmt: skip
    queue = CREATE_TILE_QUEUE(4, sizes)
    descs = [query] * 4 + [key] * 6
    roles = {
        "produce": lambda: kernel.produce(queue, memory, *descs, "ticket", n_tickets, 1, 1),
        "add 0": lambda: dq_sums.add_halves(0, queue, sums, query, query, 0),
        "add 1": lambda: dq_sums.add_halves(1, queue, sums, query, query, 0),
    }
    for name, run in roles.items():
        yield play(name, memory.named, run)
    for w in (0, 1):

        def consume(w=w):
            kernel.consume(w, queue, memory, sums, crew.scores)

        yield play(f"consume {w}", memory.named, consume, 128, w)


@pytest.mark.parametrize("crew", range(60), indirect=True)
@pytest.mark.parametrize("masked", [False, True])
def test_no_warp_waits_forever_and_sums_have_one_order(crew, masked):
    draws = crew.draws
    n_tiles = draws.choice([1, 2, 3, 5, 9])
    # By ticket: where a loop ends. Many are over at once.
    ends = [n_tiles, *range(n_tiles + 1)]
    crew.begins = begins = draws.choices(ends, k=draws.choice([1, 2, 5, 12]))
    cuts = [[masked and draws.random() < 0.4 for _ in range(n_tiles + 1)] for _ in begins]

    def assign(ticket):
        begin = begins[ticket]
        loop = PlainLoop(
            ticket=ticket,
            first_tile=begin,
            n_steps=n_tiles - begin,
            BLOCK_Q=64,
            HAS_LEFT=False,
            HAS_RIGHT=masked,
            cuts=lambda t: cuts[ticket][t],
            turn=lambda t: sum(other <= begin + t for other in begins[:ticket]),
        )
        key_tile = SimpleNamespace(
            q_head=0,
            first_q_tile=0,
            q_coordinates=lambda head, row: ("queries", ticket, row // 64),
            kv_coordinates=lambda: ("keys", ticket),
            dkv_coordinates=lambda row=None: (ticket, row),
        )
        return key_tile, loop

    nonfinite = {at: masked and draws.random() < 0.3 for at in range(len(begins))}

    def has_nonfinite(at):
        """Whether k and v have such values, or q and dout where they matter; all pieces do then."""
        if at[0] == "keys":
            return nonfinite[at[1]]
        return at[0] == "queries" and nonfinite[at[1]] and cuts[at[1]][at[2]]

    crew.assign, crew.has_nonfinite = assign, has_nonfinite
    programs = [program(crew, masked, len(begins)) for _ in range(draws.choice([1, 2, 3]))]
    crew.run(*(warp for warps in programs for warp in warps))
    for tile in range(n_tiles):
        added = [i for i, b in enumerate(begins) if b <= tile]
        # A chunk and a half of the middle one of each consumer.
        for row in (0, 16, 24, 32):
            assert crew.sums.get(tile * SUMS_ROWS + row, []) == added
    # dk, in two pieces, and dv of every key tile, once.
    for ticket, begin in enumerate(begins):
        made_of = ticket if begin < n_tiles else None
        rows = (0, 0, 64, 64, None)
        assert crew.derived[ticket] == [(row, made_of) for row in rows]
