"""Who waits for whom in the wide Hopper backward: its own functions, run as Python on barriers that
count as mbarriers do, with warps in random order. No one may wait forever, and no tile may change
while it is read."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import Anything, Barrier, Crew, PlainGluon, Slots, as_plain, make_plain

from lockstep.kernels.hopper.backward.wide import keys, queries, tiles
from lockstep.kernels.hopper.common import ring

# Taken before they are replaced.
CREATE_KEYS, AWAIT_DOUT = keys.Program.create.fn, keys.Program.await_dout.fn
CREATE_QUERIES = queries.Program.create.fn
SCORES = SimpleNamespace(
    weights=lambda *_: (Anything(), Anything()), gradient=Anything(), scale=1.0, CAPPED=False
)
DESC = SimpleNamespace(block_type=SimpleNamespace(nbytes=1), dtype=None)


class PlainPieceRing:
    def __init__(self, main_smem, rest_smem, ring, N):
        self.main_smem, self.ring, self.N = main_smem, ring, N
        self.n_tiles = 0  # that will ever be sent

    create = staticmethod(tiles.PieceRing.create.fn)
    send, wait, release = (getattr(tiles.PieceRing, x).fn for x in ("send", "wait", "release"))
    piece = store = Anything()

    def chunk(self, i: int, c: int) -> SimpleNamespace:
        return self.main_smem[self.ring.slot(i)]

    def check(self, i: int) -> None:
        if i < self.n_tiles:
            assert self.main_smem[self.ring.slot(i)].holds == i

    def replace_nonfinite(self, i, value, constant_time):
        self.check(i)


@pytest.fixture
def crew(monkeypatch, request):
    crew = Crew(request.param)
    reads: dict = {}  # of each thread: what its products read

    def load(desc, at, barrier, tile):
        crew.pause()
        tile.holds = at[3] if len(at) == 5 else None
        barrier.change(0, -1)

    def read(*those):
        for tile_ring, i in those:
            tile_ring.check(i)
        reads.setdefault(threading.get_ident(), []).extend(those)
        return Anything()

    def settle(*_, **__):
        crew.pause()
        for tile_ring, i in reads.pop(threading.get_ident(), ()):
            tile_ring.check(i)
        return Anything(), Anything()

    plain = {
        "mbarrier": crew.mbarrier,
        "tma_load": load,
        "gl": PlainGluon(),
        "PieceRing": PlainPieceRing,
        "Ring": as_plain(ring.Ring),
        "barriers": lambda n, count: Slots(Barrier(count) for _ in range(n)),
        "allocate_tiles": lambda desc, n: Slots(SimpleNamespace(holds=None) for _ in range(n)),
        "issue_scores": lambda own, i, first, other, j: read((own, i), (other, j)),
        "add_products": lambda sums, weights, other, i: read((other, i)),
        "wait_all": settle,
        "warpgroup_mma_wait": lambda n, deps: settle()[0],
        "_allocate_pieces": lambda desc, n, _: Slots(SimpleNamespace(holds=None) for _ in range(n)),
        "pieces_of": lambda N: 1,
        "columns_of": Anything(),
        **dict.fromkeys(("fence_async_shared", "tma_store_wait", "has_nonfinite"), Anything()),
        **dict.fromkeys(("multiply_all", "store_share"), Anything()),
        **dict.fromkeys(("no_sums", "as_registers", "from_registers", "largest"), Anything()),
        "STAGES": keys.STAGES.value,
        "ROWS": 64,
        "CHUNK": 64,
        "Program": lambda *parts: parts,
    }
    make_plain(monkeypatch, (tiles, keys, queries, ring), plain)
    return crew


by_lot = pytest.mark.parametrize("crew", range(40), indirect=True)


def loop_of(draws: random.Random, masked: bool, none: tuple[int, ...] = (0,)) -> SimpleNamespace:
    n_steps = draws.choice([*none, 1, 2, 3, 7, 40])
    cuts = [masked and draws.random() < 0.4 for _ in range(n_steps + 1)]
    return SimpleNamespace(
        n_steps=n_steps,
        first_tile=0,
        BLOCK_Q=1,
        BLOCK_KV=1,
        HAS_LEFT=masked,
        HAS_RIGHT=masked,
        cuts=cuts.__getitem__,
        CONSTANT_TIME=False,
        hide=Anything(),
        next=lambda tile, t: (tile + 1, t + 1),
        next_number=lambda t: t + 1,
        first_number=lambda: 0,
        nan_if_bad=lambda: 0.0,
    )


@by_lot
@pytest.mark.parametrize("masked", [False, True])
def test_keys(crew, masked):
    loop = loop_of(crew.draws, masked)
    # Of which one share of several or all, if queries may be shared out.
    loop.share = crew.draws.choice([-1, 3])
    sizes = SimpleNamespace(SHARED=crew.draws.choice([False, True]), shares_ptr=None)
    (k, v), (q, dout), stats, inspected, weights, ends = CREATE_KEYS(*[DESC] * 5, 2, 3, masked)
    k.n_tiles = v.n_tiles = 1
    q.n_tiles = dout.n_tiles = loop.n_steps
    stats = Slots(Anything() for _ in stats)
    program = SimpleNamespace(k=k, v=v, q=q, dout=dout, stats_smem=stats, inspected_bar=inspected)
    program.weights_smem, program.weights = Slots([Anything()] * 2), weights[1]
    program.done_bar, program.dkv_full_bar = ends
    program.await_dout = lambda *a, **more: AWAIT_DOUT(program, *a, **more)
    key_tile = SimpleNamespace(
        q_head=0,
        share=loop.share,
        first_q_tile=0,
        kv_coordinates=lambda: (0,) * 5,
        dkv_coordinates=lambda: (0,) * 5,
        q_coordinates=lambda head, row: (0, 0, 0, row, 0),
    )
    crew.run(
        lambda: keys.sum_values(loop, program, SCORES, sizes),
        lambda: keys.sum_keys(loop, program, SCORES, sizes),
        lambda: keys.produce(key_tile, loop, program, *[DESC] * 7, sizes.SHARED),
        *([lambda: keys.inspect(loop, program)] if masked else []),
    )


@by_lot
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stages", [(2, 1), (3, 2)])
def test_queries(crew, stages, masked):
    # A bad sequence has less than no steps.
    loop = loop_of(crew.draws, masked, none=(0, -1))
    names = ("q", "dout", "k", "v", "inspected_bar", "dq_full_bar")
    parts = CREATE_QUERIES(*[DESC] * 4, 2, 3, *stages, masked)
    program = SimpleNamespace(**dict(zip(names, parts, strict=True)))
    program.q.n_tiles = program.dout.n_tiles = 1
    program.k.n_tiles = program.v.n_tiles = max(loop.n_steps, 0)
    query_tile = SimpleNamespace(
        q_idx=Anything(),
        len_q=Anything(),
        stats_tile=Anything(),
        q_coordinates=lambda: (0,) * 5,
        kv_coordinates=lambda key: (0, 0, 0, key, 0),
    )
    consumers = [
        lambda w=w: queries.consume(w, query_tile, loop, program, Anything(), SCORES)
        for w in (0, 1)
    ]
    crew.run(
        *consumers,
        lambda: queries.produce(query_tile, loop, program, *[DESC] * 5),
        *([lambda: queries.inspect(loop, program)] if masked else []),
    )
