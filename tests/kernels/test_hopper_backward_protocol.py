"""Who waits for whom in the Hopper backward: its own functions, run as Python on barriers that
count as the GPU's do, with warps in random order. No one may wait forever, no tile may change while
it is read, and what the matrix units or the copy engine read must have been fenced."""

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
from crew import Anything, Crew, make_plain

from lockstep.kernels.hopper.backward import nonfinite
from lockstep.kernels.hopper.backward.narrow import (
    add_parts,
    apart,
    dq_sums,
    kernel,
    last_part,
    steps,
    tile_queue,
    tiles,
    together,
)
from lockstep.kernels.hopper.common import mailbox, ring

MODULES = (
    add_parts, apart, dq_sums, kernel, last_part, mailbox, nonfinite, ring, steps, tile_queue,
    tiles, together,
)  # fmt: skip
NAMED = ("DQ_FULL", "EMPTY", "KV_EMPTY", "DKV_FULL", "CONSUMERS_MEET", "BOTH_CONSUMERS")
BLOCK_KV, HEAD_DIM = 128, {64: 128, 128: 64}
# Taken before they are replaced.
CREATE_TILES, CREATE_DQ_SUMS = tiles.Tiles.create.fn, dq_sums.DqSums.create.fn
CREATE_TILE_QUEUE, STAGE_DKV = tile_queue.TileQueue.create.fn, tiles.Tiles.stage_dkv.fn


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
    wait_dkv, publish_dkv = tiles.Tiles.wait_dkv.fn, tiles.Tiles.publish_dkv.fn

    def stage_dkv(self, w, slot, dk, dv) -> None:
        if not ROLE.shares_tiles:
            for tile in self.dkv(slot, w):
                tile.written = {}  # from here on it is this consumer's alone
        STAGE_DKV(self, w, slot, dk, dv)


class PlainDqSums:
    def __init__(self, parts_smem, empty_bar, scale, back_bar, whole, finished) -> None:
        self.parts_smem, self.empty_bar, self.scale = parts_smem, empty_bar, scale
        self.back_bar, self.WHOLE, self.FINISHED = back_bar, whole, finished

    wait_empty, publish = dq_sums.DqSums.wait_empty.fn, dq_sums.DqSums.publish.fn

    def stage(self, n, dq, half) -> None:
        slot = n % 2 * 2 + half if self.WHOLE else n % 2
        self.parts_smem.index(slot).store(dq)


@pytest.fixture
def crew(monkeypatch, request):
    crew = Crew(request.param)
    crew.sums = {}  # key tiles that have added to each query tile, in order
    crew.derived = {}  # what has been stored, by key tile and first row
    crew.shares = {}  # what dk and dv of shares are made of, by share and consumer
    crew.finished = {}  # key tiles in dQ of each query tile, where it leaves the kernel
    crew.carried = {}  # what the sums of spans are made of, by their place

    def send(desc, at, tile, half=None):
        is_shared = ROLE.name.startswith("add") or ROLE.shares_tiles
        writers = (0, 1) if is_shared else (at[1] // 64,)
        value = tile.holds(writers if half is None else (half,))
        read(tile)
        if ROLE.name == "produce":
            crew.derived[at] = [*crew.derived.get(at, ()), value]
        else:
            ticket, t = value
            assert crew.begins[ticket] + t == at[0] // 32
            if half != 1:
                crew.sums.setdefault(at[0] // 32, []).append(ticket)
        tile.written = {}

    def store_part(desc, tile, sizes, parts, w):
        for half in (0, 1):
            send(desc, [tile * 32], parts.parts_smem.index(2 * w + half), half)

    def bring_back(desc, tile, part, barrier, phase, columns):
        plain["mbarrier"].expect(barrier, 1)
        plain["tma_load"](desc, ("sums", tile), barrier, part)
        plain["mbarrier"].wait(barrier, phase)

    def store_dq(desc, tile, t, rows, part, *_):
        assert part.readers == 0, "made dQ while it is read"
        if part.written:
            # The only part.
            crew.sums.setdefault(tile, []).append(part.holds((0, 1))[0])
        else:
            assert part.loaded == ("sums", tile)
        assert tile not in crew.finished
        crew.finished[tile] = list(crew.sums[tile])
        part.written, part.loaded = {}, None

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

    def place(block, first):
        """Programs here have columns of their own: what they count is left out."""
        return block >> 20, ROLE.consumer, first > 0

    def store_sums(block, pieces, first, columns):
        crew.pause()
        crew.carried[place(block, first)] = {x.of for x in pieces}

    def load_sums(block, first, columns):
        crew.pause()
        (key,) = crew.carried.pop(place(block, first))
        return (Value(key),) * columns.bit_count()

    plain = {
        **hardware(crew),
        "tma_store": send,
        "add_part": lambda desc, tile, part, is_first, columns: send(desc, [tile * 32], part),
        "store_part": store_part,
        "bring_back": bring_back,
        "store_dq": store_dq,
        "Tiles": PlainTiles,
        "DqSums": PlainDqSums,
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
        "whole": lambda left, right: left,
        "column_weights": column_weights,
        "store_share": lambda _ptr, number, pieces, *_: crew.shares.setdefault(number, []).append(
            {x.of for x in pieces}
        ),
        "LargeScores": lambda *_: SimpleNamespace(log2_l=lambda *_: None),
        # Both loops take the same steps: now one, now the other.
        "has_large_scores": lambda flags, loop, *_: loop.ticket % 2,
        "store_sums": store_sums,
        "load_sums": load_sums,
        **{
            name: getattr(tiles, name).value
            for name in ("STAGES", "PARTS", "DS_TILES", "CONSUMERS_AND_WARP", *NAMED)
        },
    }

    crew.scores = SimpleNamespace(hide_products=lambda s, *_: s, gradient=gradient, scale=1.0)
    make_plain(monkeypatch, MODULES, plain)
    return crew


def program(crew, block_q, is_apart, masked, shared, of_dq, n_tickets, spans=0):
    """The warps of one. Loops may be cut if there are `spans`; `of_dq` says whether its parts are
    whole, and whether last ones are made dQ."""
    shares_tiles = block_q == 128
    query, key = describe(block_q, HEAD_DIM[block_q]), describe(BLOCK_KV, HEAD_DIM[block_q])
    # One piece or two of each: `pieces.py`.
    widths = HEAD_DIM[block_q], HEAD_DIM[block_q] * 3 // 4
    columns = crew.draws.choice(widths), crew.draws.choice(widths)
    memory = CREATE_TILES(query, query, query, key, key, *columns, not is_apart)
    parts = CREATE_DQ_SUMS(query, 1.0, *of_dq)
    sizes = SimpleNamespace(
        BLOCK_Q=block_q,
        HAS_LEFT=False,
        HAS_RIGHT=masked,
        CONSTANT_TIME=False,
        heads_per_kv=1,
        LAYOUT="dense",
        BLOCK_KV=BLOCK_KV,
        SHARED=shared,
        shares_ptr=None,
        CUT=spans > 0,
        n_cut=0,  # more tickets, which are among them here
        spans=spans,
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
            n_tickets,
            1,
            1,
            True,
        ),
        "add 0": lambda: add_parts.add_parts(0, queue, parts, query, query, 0, 64),
        "add 1": lambda: add_parts.add_parts(1, queue, parts, query, query, 0, 64),
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
def test_no_warp_waits_forever_and_sums_have_one_order(crew, block_q, is_apart, masked):
    draws = crew.draws
    shared = draws.random() < 0.4
    # Parts that are all of dQ have no order: here, several are stored in one place.
    whole = draws.random() < 0.3
    finished = not whole and draws.random() < 0.5
    n_tiles = draws.choice([1, 2, 3, 5, 9])
    # By ticket: where a loop ends. Many are over at once.
    ends = [n_tiles, *range(n_tiles + 1)]
    crew.begins = begins = draws.choices(ends, k=draws.choice([1, 2, 5, 12]))
    # Which of them are shares of several: their dk and dv go to memory.
    shares = [ticket if draws.random() < 0.5 else -1 for ticket in range(len(begins) + 3)]
    cuts = [[masked and draws.random() < 0.4 for _ in range(n_tiles + 1)] for _ in begins]

    def assign(ticket):
        begin = begins[min(ticket, len(begins) - 1)]
        loop = PlainLoop(
            ticket=ticket,
            share=shares[ticket],
            first_tile=begin,
            n_steps=n_tiles - begin,
            BLOCK_Q=block_q,
            HAS_LEFT=False,
            HAS_RIGHT=masked,
            cuts=lambda t: cuts[ticket][t],
            turn=lambda t: sum(other <= begin + t for other in begins[:ticket]),
            is_last=lambda t: all(other > begin + t for other in begins[ticket + 1 :]),
        )
        key_tile = SimpleNamespace(
            q_head=0,
            share=shares[ticket],
            first_q_tile=0,
            q_coordinates=lambda head, row: ("queries", ticket, row // block_q),
            kv_coordinates=lambda: ("keys", ticket),
            dkv_coordinates=lambda row: (ticket, row),
        )
        return key_tile, loop

    nonfinite = {at: masked and draws.random() < 0.3 for at in range(len(begins))}

    def has_nonfinite(at):
        """Whether k and v have such values, or q and dout where they matter; both of a pair do."""
        if at[0] == "keys":
            return nonfinite[at[1]]
        return at[0] == "queries" and nonfinite[at[1]] and cuts[at[1]][at[2]]

    crew.assign, crew.has_nonfinite = assign, has_nonfinite
    programs = [
        program(crew, block_q, is_apart, masked, shared, (whole, finished), len(begins))
        for _ in range(draws.choice([1, 2, 3]))
    ]
    crew.run(*(warp for warps in programs for warp in warps))
    for tile in range(n_tiles):
        found = crew.sums.get(tile, [])
        expected = [i for i, b in enumerate(begins) if b <= tile]
        assert (sorted(found) if whole else found) == expected
        assert crew.finished.get(tile, []) == (expected if finished else [])
    # dk and dv of every key tile, once.
    for ticket, begin in enumerate(begins):
        made_of = ticket if begin < n_tiles else None
        is_share = shared and shares[ticket] >= 0
        for w in (0, 1):
            assert crew.shares.get(2 * ticket + w, []) == [{made_of}] * (2 * is_share)
        for row in range(0, BLOCK_KV, block_q):
            assert crew.derived.get((ticket, row), []) == [made_of] * (0 if is_share else 2)


@pytest.mark.parametrize("crew", range(40), indirect=True)
@pytest.mark.parametrize(("block_q", "is_apart"), [(64, False), (128, False), (128, True)])
def test_spans_of_a_loop_wait_for_each_other_and_add_up_as_it_does(crew, block_q, is_apart):
    """The last key tiles of a head are cut; all loops have as many steps."""
    draws = crew.draws
    n_spans, span_tiles = draws.choice([2, 3]), draws.choice([1, 2, 4])
    n_tiles = n_spans * span_tiles - draws.randrange(span_tiles)
    n_keys = draws.choice([1, 3, 6])
    n_whole = draws.randrange(n_keys)
    finished = draws.random() < 0.5
    crew.begins = [0] * n_keys
    crew.has_nonfinite = lambda _: False
    # Tickets: key tile, span.
    tickets = [(key, -1) for key in range(n_whole)]
    tickets += [(key, span) for span in range(n_spans) for key in range(n_whole, n_keys)]

    def assign(ticket):
        key, span = tickets[min(ticket, len(tickets) - 1)]
        first = max(span, 0) * span_tiles
        end = n_tiles if span < 0 else min(first + span_tiles, n_tiles)
        loop = PlainLoop(
            ticket=key,
            first=first,
            first_tile=first,
            n_steps=end - first,
            BLOCK_Q=block_q,
            HAS_LEFT=False,
            HAS_RIGHT=False,
            turn=lambda t: key,
            is_last=lambda t: key == n_keys - 1,
            carried=(max(span, 0) * 256, 0 <= span < n_spans - 1, key << 20, f"signals {key}"),
        )
        key_tile = SimpleNamespace(
            q_head=0,
            share=-1 if span < 0 else key * n_spans + span,
            first_q_tile=0,
            q_coordinates=lambda head, row: ("queries", key, row // block_q),
            kv_coordinates=lambda: ("keys", key),
            dkv_coordinates=lambda row: (key, row),
        )
        return key_tile, loop

    crew.assign = assign
    programs = [
        program(crew, block_q, is_apart, False, False, (False, finished), len(tickets), n_spans)
        for _ in range(draws.choice([1, 2, 3]))
    ]
    crew.run(*(warp for warps in programs for warp in warps))
    expected = {tile: list(range(n_keys)) for tile in range(n_tiles)}
    assert crew.sums == expected
    assert crew.finished == (expected if finished else {})
    rows = range(0, BLOCK_KV, block_q)
    assert crew.derived == {(key, row): [key] * 2 for key in range(n_keys) for row in rows}
    assert not crew.carried
