"""The producer: one warp that says which run is next, and streams its keys and values.

A tile of BLOCK_KV keys may lie in several pages. The copy engine writes COLUMNS columns of the rows
of one page at a time, to where they belong in the tile. A page that does not exist lies outside of
the tensor map: its keys are NaN then, its values 0.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents

from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)
from lockstep.kernels.hopper.common.pieces import piece_start, piece_width
from lockstep.kernels.hopper.common.ring import Ring
from lockstep.kernels.hopper.decode import plan, tiles
from lockstep.kernels.hopper.decode.folding.arrivals import mark_arrivals
from lockstep.kernels.hopper.decode.prefetch import prefetch_pages, prefetch_queries
from lockstep.kernels.hopper.decode.runs import Run
from lockstep.kernels.hopper.decode.schedule import (
    FEW,
    FIELDS,
    SPAN_COST,
    count_as,
    place_at,
    spans_before,
    stretch_of,
)

COLUMNS = gl.constexpr(plan.COLUMNS)
SEQUENCE, Q_TILE = gl.constexpr(tiles.SEQUENCE), gl.constexpr(tiles.Q_TILE)
Q_START = gl.constexpr(tiles.Q_START)


@gluon.constexpr_function
def first_columns(columns):
    """The columns of a tile that lie in its first part: a power of two."""
    return 1 << columns.bit_length() - 1


@aggregate
class Tiles:
    """A ring of tiles [BLOCK_KV, D], each of which comes in boxes of a tensor map. Those of 192
    columns lie in two parts, the first 128 columns and the others."""

    boxes_smem: gl.shared_memory_descriptor  # [STAGES · boxes of a tile, 1, 1, rows, COLUMNS]
    rest_smem: gl.shared_memory_descriptor  # the same of the second part, or boxes_smem
    ring: Ring
    BLOCK_KV: gl.constexpr
    D: gl.constexpr
    COLUMNS: gl.constexpr  # of products: D, or fewer that hold the head dim

    @gluon.constexpr_function
    def __init__(self, boxes_smem, rest_smem, ring, BLOCK_KV, D, columns):
        self.boxes_smem = boxes_smem
        self.rest_smem = rest_smem
        self.ring = ring
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.D = gl.constexpr(D)
        self.COLUMNS = gl.constexpr(columns)

    @gluon.jit
    def create(
        desc, STAGES: gl.constexpr, BLOCK_KV: gl.constexpr, D: gl.constexpr, columns: gl.constexpr
    ):
        boxes: gl.constexpr = STAGES * (BLOCK_KV // desc.block_shape[2])
        FIRST: gl.constexpr = first_columns(D)
        shape: gl.constexpr = [boxes * (FIRST // COLUMNS)] + desc.block_shape  # noqa: RUF005, Gluon does not unpack
        smem = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
        rest_smem = smem
        if FIRST < D:
            rest_shape: gl.constexpr = [boxes] + desc.block_shape  # noqa: RUF005
            rest_smem = gl.allocate_shared_memory(desc.dtype, rest_shape, desc.layout)
        ring = Ring.create(STAGES, 1)
        return Tiles(smem, rest_smem, ring, BLOCK_KV, D, columns)

    @gluon.jit
    def send(self, i, desc, places, head):
        """Producer: load the i-th tile; `places` are those of its parts."""
        ROWS: gl.constexpr = desc.block_shape[2]
        PARTS: gl.constexpr = self.BLOCK_KV // ROWS
        self.ring.wait_empty(i)
        full = self.ring.full(i)
        N: gl.constexpr = first_columns(self.D) // COLUMNS
        first = self.ring.slot(i) * (PARTS * N)
        mbarrier.expect(full, self.BLOCK_KV * self.D * 2)
        for part in gl.static_range(PARTS):
            for column in gl.static_range(self.D // COLUMNS):
                at = [places[part][0], head, places[part][1], column * COLUMNS]
                if column < N:
                    tma_load(desc, at, full, self.boxes_smem.index(first + column * PARTS + part))
                else:
                    box = self.rest_smem.index(self.ring.slot(i) * PARTS + part)
                    tma_load(desc, at, full, box)

    @gluon.jit
    def tile(self, i):
        """Where the i-th tile is, [BLOCK_KV, D], or the first part of it."""
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        shape: gl.constexpr = [self.ring.STAGES, self.BLOCK_KV, first_columns(self.D)]
        whole = reinterpret(self.boxes_smem, self.boxes_smem.dtype, shape, layout)
        return whole.index(self.ring.slot(i))

    @gluon.jit
    def rest(self, i):
        """Where the second part of the i-th tile is, [BLOCK_KV, COLUMNS]."""
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        shape: gl.constexpr = [self.ring.STAGES, self.BLOCK_KV, COLUMNS]
        whole = reinterpret(self.rest_smem, self.rest_smem.dtype, shape, layout)
        return whole.index(self.ring.slot(i))

    @gluon.jit
    def piece(self, i, p: gl.constexpr):
        """Where the p-th piece of the columns of a product is in the i-th tile (`pieces.py`)."""
        START: gl.constexpr = piece_start(self.COLUMNS, p)
        WIDTH: gl.constexpr = piece_width(self.COLUMNS, p)
        FIRST: gl.constexpr = first_columns(self.D)
        if START < FIRST:
            tile = self.tile(i)
            return tile if WIDTH == FIRST else tile.slice(START, WIDTH, dim=1)
        else:  # noqa: RET505, Gluon would go on and return both
            tile = self.rest(i)
            return tile if WIDTH == COLUMNS else tile.slice(START - FIRST, WIDTH, dim=1)

    @gluon.jit
    def last_columns(self, i):
        """Where the last COLUMNS columns of the i-th tile are, [BLOCK_KV, COLUMNS]."""
        FIRST: gl.constexpr = first_columns(self.D)
        if FIRST < self.D:
            return self.rest(i)
        else:  # noqa: RET505, as above
            N: gl.constexpr = FIRST // COLUMNS
            layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
            shape: gl.constexpr = [self.ring.STAGES * N, self.BLOCK_KV, COLUMNS]
            whole = reinterpret(self.boxes_smem, self.boxes_smem.dtype, shape, layout)
            return whole.index(self.ring.slot(i) * N + N - 1)


@aggregate
class Cache:
    """Where the pages of a sequence are."""

    table_ptr: gl.tensor  # [B, ·]
    v_ptr: gl.tensor  # [n_pages, page, Hkv, Dv]
    starts_ptr: gl.tensor  # [B], of sequences in one tensor
    stride_tb: gl.tensor
    stride_vp: gl.tensor
    stride_vs: gl.tensor
    stride_vh: gl.tensor
    n_pages: gl.tensor
    page_size: gl.tensor
    ROWS: gl.constexpr  # of a page that the copy engine loads at once
    PAGED: gl.constexpr  # else each sequence is a page of its own
    WHOLE_PAGES: gl.constexpr  # which have ROWS keys then
    HAS_STARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointers, numbers, ROWS, PAGED, WHOLE_PAGES, HAS_STARTS):
        self.table_ptr = pointers[0]
        self.v_ptr = pointers[1]
        self.starts_ptr = pointers[2]
        self.stride_tb = numbers[0]
        self.stride_vp = numbers[1]
        self.stride_vs = numbers[2]
        self.stride_vh = numbers[3]
        self.n_pages = numbers[4]
        self.page_size = numbers[5]
        self.ROWS = gl.constexpr(ROWS)
        self.PAGED = gl.constexpr(PAGED)
        self.WHOLE_PAGES = gl.constexpr(WHOLE_PAGES)
        self.HAS_STARTS = gl.constexpr(HAS_STARTS)

    @gluon.jit
    def place_of(self, b, key, end):
        """The page of a key of sequence b and its row there; the page is `n_pages` if there is none
        of that number, and for keys from `end` on."""
        if not self.PAGED:
            row = key
            if self.HAS_STARTS:
                row += gl.load(self.starts_ptr + b).to(gl.int32)
            return gl.where(key < end, b, self.n_pages), row
        size = self.ROWS if self.WHOLE_PAGES else self.page_size
        at = self.table_ptr + b.to(gl.int64) * self.stride_tb + key // size
        page = gl.load(at, mask=key < end, other=-1)
        is_there = (page >= 0) & (page < self.n_pages)
        return gl.where(is_there, page, self.n_pages).to(gl.int32), key % size

    @gluon.jit
    def places_of(self, b, tile, end, BLOCK_KV: gl.constexpr):
        """The places of the parts of a tile."""
        places = ()
        for part in gl.static_range(BLOCK_KV // self.ROWS):
            key = tile * BLOCK_KV + part * self.ROWS
            places = places + (self.place_of(b, key, end),)  # noqa: RUF005
        return places


@gluon.jit
def note_slot(slots_ptr, slot, pair, begin, end):
    """Whose parts are in a slot, -1 if there are none, and from which to which."""
    gl.store(slots_ptr + 3 * slot, pair)
    gl.store(slots_ptr + 3 * slot + 1, begin)
    gl.store(slots_ptr + 3 * slot + 2, end)


@gluon.jit
def find_queries(sizes, b):
    """The sequence of a tile of query rows, the number of the tile in it, and where the queries of
    the sequence begin."""
    if sizes.PACKED:
        tile_ptr = sizes.kv_lens_ptr + b * FIELDS
        sequence = gl.load(tile_ptr + SEQUENCE)
        q_tile = gl.load(tile_ptr + Q_TILE)
        q_start = gl.load(tile_ptr + Q_START)
    else:
        sequence, q_tile = sizes.find_tile(b)
        q_start = b * 0
    return sequence, q_tile, q_start


@gluon.jit
def post_run(sizes, queue, slots_ptr, n, line, head_at, run):
    """Says which run is the n-th, and notes for the second kernel where a head has its parts, where
    slots are those of heads. `line`: its length, how many teams share it, and whether heads are not
    cut; `head_at`: the tile of query rows, where the head begins in the line and its first tile of
    keys, and where this program's parts of a head that is cut go. Returns the slot of the run."""
    total, n_teams, keeps_whole = line
    b, at, tile_begin, member = head_at
    is_whole = run.n_own == run.n_spans
    pair = b * sizes.heads + run.head
    # The program in whose stretch the head begins.
    owner = place_at(at, total, n_teams)
    slot = gl.where(has_slot_each(sizes), pair, owner * sizes.team + member)
    if queue.INSIDE == 0:  # noqa: SIM102, Gluon would evaluate both
        if has_slot_each(sizes) & (run.first_span == 0):
            last = run.n_own - 1
            note_slot(slots_ptr, pair, gl.where(is_whole, -1, pair), last, run.n_spans)
    message = (
        1, run.b, run.head, run.q_tile, run.begin, run.end, run.span, run.first_span, run.kv_len,
        gl.where(is_whole, -1 - slot, slot),
    )  # fmt: skip
    if sizes.PACKED:
        message = message + (run.n_q, run.q_start)  # noqa: RUF005
    if queue.INSIDE:
        behind = stretch_of(owner + 1, total, n_teams) - at
        owned = spans_before(sizes, behind, tile_begin, run.span, run.n_spans, keeps_whole)
        message = message + (run.n_own, run.n_spans, owned - 1)  # noqa: RUF005
    queue.post(n, message)
    return slot


@gluon.jit
def has_slot_each(sizes):
    """Whether slots are those of heads, and not of programs, of which there are no more. A program
    has at most one head that begins in its stretch and does not end there."""
    return sizes.B * sizes.heads <= gl.num_programs(0)


@gluon.jit
def send_run(
    sizes, queue, loads, slots_ptr, rows, queries, n, sent, line, head_at, run,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    """The n-th run: its queries, its message and its tiles, before which `sent` were sent. Returns
    how many have been. PREFETCH: `produce`."""
    k, v, k_desc, v_desc, cache = loads
    BLOCK_KV: gl.constexpr = sizes.BLOCK_KV
    kv_len = gl.maximum(run.kv_len, 0)
    # Loaded while all that follows is worked out.
    places = cache.places_of(run.b, run.begin, kv_len, BLOCK_KV)
    if PREFETCH:  # noqa: SIM102, Gluon would evaluate both
        if sizes.B > FEW:
            prefetch_pages(cache, run.b, run.begin * BLOCK_KV, kv_len)
    if queries.ORDER == "prefetched":
        prefetch_queries(rows, run.b, run.head, run.q_tile, run.q_start, run.n_q)
    slot = post_run(sizes, queue, slots_ptr, n, line, head_at, run)
    queries.await_first(n)
    for tile in range(run.begin, run.end):
        end = gl.where(tile + 1 < run.end, kv_len, 0)
        next_places = cache.places_of(run.b, tile + 1, end, BLOCK_KV)
        k.send(sent, k_desc, places, run.head)
        if queue.INSIDE:  # noqa: SIM102, as above
            # Before the consumer can have the last tile, and behind the first loads.
            if (run.n_own < run.n_spans) & (tile + 1 == run.end):
                mark_arrivals(rows, slot)
        v.send(sent, v_desc, places, run.head)
        sent += 1
        places = next_places
    return sent


@gluon.jit
def produce(
    sizes, queue, loads, slots_ptr, rows, queries, PREFETCH: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """All runs of this program. Notes for `folding/fold.py` which head has its parts in which slot.
    PREFETCH: it changes from one sequence to the next so often that the next is prepared. LATE:
    `folding/fold.py` may start from here on, when the last loads are under way."""
    total, stretch_begin, stretch_end, b, begin, even = sizes.stretch()
    keeps_whole = (sizes.whole != 0) | (even > 0)
    place, n_teams = sizes.place()
    member = gl.program_id(0) - divide(gl.program_id(0), sizes.team) * sizes.team
    blocks = divide(sizes.heads, sizes.team)
    sent = b * 0
    runs = b * 0
    cut = b * 0 - 1  # the tile of query rows whose parts are in this program's slot
    cut_begin = b * 0
    cut_end = b * 0
    while (begin < stretch_end) & (b < sizes.B):
        found = sizes.look_at(b, b >= 0)
        tile_begin, tile_end, span, n_spans = sizes.tiles_of(found)
        work = count_as(tile_end - tile_begin + n_spans * SPAN_COST, even)
        block = divide(gl.maximum(stretch_begin - begin, 0), work)
        at = begin + block * work
        n_blocks = gl.where(found[2] > 0, blocks, 0)
        sequence, q_tile, q_start = find_queries(sizes, b)
        if PREFETCH:  # noqa: SIM102, Gluon would evaluate both
            if sizes.B > FEW:
                next_sequence, _next_tile = sizes.find_tile(gl.minimum(b + 1, sizes.B - 1))
                prefetch_pages(loads[4], next_sequence, b * 0, sizes.Skv)
        while (at < stretch_end) & (block < n_blocks):
            head = block * sizes.team + member
            first = spans_before(sizes, stretch_begin - at, tile_begin, span, n_spans, keeps_whole)
            last = spans_before(sizes, stretch_end - at, tile_begin, span, n_spans, keeps_whole)
            if first < last:
                grid = divide(tile_begin, span) + first  # spans from the first key on
                run_begin = gl.maximum(grid * span, tile_begin)
                run_end = gl.minimum((grid + last - first) * span, tile_end)
                # Its slot and its first part are not known yet.
                run = Run(
                    (b * 0 + 1, sequence, head, q_tile, run_begin, run_end, span, first, found[0],
                     b * 0, found[1], q_start, last - first, n_spans, b * 0)
                )  # fmt: skip
                sent = send_run(
                    sizes, queue, loads, slots_ptr, rows, queries, runs, sent,
                    (total, n_teams, keeps_whole), (b, at, tile_begin, member), run, PREFETCH,
                )  # fmt: skip
                is_cut_here = (first == 0) & (last < n_spans)
                cut = gl.where(is_cut_here, b * sizes.heads + head, cut)
                cut_begin = gl.where(is_cut_here, last - 1, cut_begin)
                cut_end = gl.where(is_cut_here, n_spans, cut_end)
                runs += 1
            at += work
            block += 1
        begin += work * n_blocks
        b += 1
    if LATE:
        gdc_launch_dependents()
    queue.post(runs, (0,))
    if queue.INSIDE == 0:  # noqa: SIM102, as above
        if has_slot_each(sizes) == 0:
            note_slot(slots_ptr, place * sizes.team + member, cut, cut_begin, cut_end)
