"""Key tiles of the backward, and the loop over the query tiles that see one of them.

A program owns BLOCK_KV keys of one head. Its loop goes over all query tiles that see any of them,
from the last to the first, of each query head that shares these keys: either one head after the
other, or the heads of this group in turn, at each tile or at a bunch of them. Under a causal mask
loops end at the diagonal, so the first keys of a head have the longest loops, and come first.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.cuts import find_cut
from lockstep.kernels.hopper.backward.sizes import visible_tiles
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.tensor_maps import coordinates

# With a window, heads take turns at so many tiles: loops over neighbouring keys begin at other
# tiles, and the fewer of one head come in a row, the longer L2 has to keep them for the next loop.
WINDOW_BUNCH = gl.constexpr(8)


@aggregate
class QueryLoop:
    """The query tiles that see the keys of a program. Tiles are numbered through all heads: those
    of a head begin `tiles_per_head` after those of the head before."""

    first_tile: gl.tensor
    n_steps: gl.tensor
    n_tiles: gl.tensor  # of one head; -1 if the sequence is bad: then there are no steps
    tiles_per_head: gl.tensor
    heads_per_kv: gl.tensor  # of queries in this loop
    # Key r of the program and query c of a head's t-th tile see each other if r < room and
    #   low + t·BLOCK_Q <= r - c <= high + t·BLOCK_Q
    low: gl.tensor
    high: gl.tensor
    room: gl.tensor
    first_key: gl.tensor  # in its sequence
    share: gl.tensor  # where queries may be shared out: number of this loop's dk and dv, or -1
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_EDGE: gl.constexpr  # the last key tile may be cut short
    CONSTANT_TIME: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, bounds, heads_per_kv, share, sizes):
        self.first_tile, self.n_steps, self.n_tiles = tiles
        self.tiles_per_head = sizes.q_slots
        self.heads_per_kv = heads_per_kv
        self.low, self.high, self.room, self.first_key = bounds
        self.share = share
        self.BLOCK_Q = sizes.BLOCK_Q
        self.BLOCK_KV = sizes.BLOCK_KV
        self.HAS_LEFT = sizes.HAS_LEFT
        self.HAS_RIGHT = sizes.HAS_RIGHT
        self.HAS_EDGE = sizes.HAS_EDGE
        self.CONSTANT_TIME = sizes.CONSTANT_TIME

    @gluon.jit
    def next_in_group(self, tile, t, head):
        """The tile after `tile`, which is number `t` of the group's head `head`, if heads take
        turns; its number and its head."""
        BUNCH: gl.constexpr = WINDOW_BUNCH if self.HAS_LEFT else 1
        before = (self.n_tiles - 1 - t) & (BUNCH - 1)  # in its bunch
        is_end = (t == 0) | (before == BUNCH - 1)
        is_last = head + 1 == self.heads_per_kv
        over = self.tiles_per_head + before
        back = (self.heads_per_kv - 1) * self.tiles_per_head + 1
        tile = gl.where(is_end, gl.where(is_last, tile - back, tile + over), tile - 1)
        t = gl.where(is_end & (is_last == 0), t + before, t - 1)
        return tile, t, gl.where(is_end, gl.where(is_last, 0, head + 1), head)

    @gluon.jit
    def next(self, tile, t):
        """The tile after `tile`, which is number `t` of its head, if heads take no
        turns; and its number."""
        over = self.tiles_per_head + self.n_tiles - 1
        return gl.where(t == 0, tile + over, tile - 1), self.next_number(t)

    @gluon.jit
    def next_number(self, t):
        """The number, in its head, of the tile after the t-th, if heads take no turns."""
        return gl.where(t == 0, self.first_number(), t - 1)

    @gluon.jit
    def first_number(self):
        """The number, in its head, of the tile that a loop begins with."""
        return gl.maximum(self.n_tiles - 1, 0)

    @gluon.jit
    def nan_if_bad(self):
        """NaN if the sequence is bad, else 0: a term of the factors of results."""
        return gl.where(self.n_tiles < 0, float("nan"), 0.0)

    @gluon.jit
    def turn(self, t):
        """How many key tiles add to a head's t-th tile before this program does: those before its
        own that the tile sees."""
        first_seen = self.first_key * 0
        if self.HAS_LEFT:
            first_seen = gl.maximum(self.first_key + self.low + t * self.BLOCK_Q, 0)
        return self.first_key // self.BLOCK_KV - first_seen // self.BLOCK_KV

    @gluon.jit
    def is_last(self, t):
        """Whether no later key tile adds to a head's t-th tile."""
        is_last = self.room <= self.BLOCK_KV
        if self.HAS_RIGHT:
            is_last = is_last | (self.high + t * self.BLOCK_Q <= self.BLOCK_KV - self.BLOCK_Q)
        return is_last

    @gluon.jit
    def cuts(self, t):
        """Whether some key of the program is hidden from some query of the t-th tile."""
        cut = self.room < 0
        if self.HAS_EDGE:
            cut = self.room < self.BLOCK_KV
        if self.HAS_LEFT:
            cut = cut | (self.low + t * self.BLOCK_Q > 1 - self.BLOCK_Q)
        if self.HAS_RIGHT:
            cut = cut | (self.high + t * self.BLOCK_Q < self.BLOCK_KV - 1)
        return cut

    @gluon.jit
    def hide(
        self, x, t, first_row: gl.constexpr, value: gl.constexpr, first_column: gl.constexpr = 0
    ):  # fmt: skip
        """x [rows, columns] of the t-th tile, `value` where key and query are hidden from each
        other; `first_row` is the program's key in row 0, `first_column` the tile's query in
        column 0."""
        rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        columns: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        key = gl.expand_dims(first_row + gl.arange(0, x.shape[0], rows), 1)
        query = gl.arange(first_column, first_column + x.shape[1], columns)
        query = gl.expand_dims(query + t * self.BLOCK_Q, 0)
        if self.HAS_EDGE:
            x = gl.where(key < self.room, x, value)
        if self.HAS_LEFT:
            x = gl.where(key - self.low >= query, x, value)
        if self.HAS_RIGHT:
            x = gl.where(key - self.high <= query, x, value)
        return x


@aggregate
class KeyTile:
    """The keys of a program, and where their sequence lies in the tensors."""

    batch: gl.tensor
    head: gl.tensor  # of k and v
    q_head: gl.tensor  # the first one of their loop
    kv_idx: gl.tensor  # first key, counted in its sequence
    first_q_tile: gl.tensor
    share: gl.tensor  # `QueryLoop.share`
    q_start: gl.tensor  # the sequence's first query row in the tensor
    kv_start: gl.tensor  # and its first key
    len_q: gl.tensor
    len_kv: gl.tensor
    LAYOUT: gl.constexpr  # "dense", "kv_lens" or "varlen"

    @gluon.constexpr_function
    def __init__(self, place, lengths, LAYOUT):
        self.batch, self.head, self.q_head, self.kv_idx, self.first_q_tile, self.share = place
        self.q_start, self.kv_start, self.len_q, self.len_kv = lengths
        self.LAYOUT = gl.constexpr(LAYOUT)

    @gluon.jit
    def q_coordinates(self, head, q_idx):
        """Where a row lies in the tensor maps of q and dout."""
        return coordinates(
            self.batch, self.q_start, self.len_q, head, q_idx, 0, self.LAYOUT == "varlen"
        )

    @gluon.jit
    def kv_coordinates(self):
        """Where the keys lie in the tensor maps of k and v."""
        return self._key_coordinates(0, self.LAYOUT != "dense")

    @gluon.jit
    def dkv_coordinates(self, first_row: gl.constexpr = 0):
        """Where they, from one of them on, lie in those of dk and dv: rows beyond a length in
        kv_lens are there too."""
        return self._key_coordinates(first_row, self.LAYOUT == "varlen")

    @gluon.jit
    def _key_coordinates(self, first_row: gl.constexpr, CLIPPED: gl.constexpr):
        row = self.kv_idx + first_row
        return coordinates(self.batch, self.kv_start, self.len_kv, self.head, row, 0, CLIPPED)


@gluon.jit
def assign_keys(ticket, kv_slots, n_heads, heads_at_once, sizes):
    """The keys of a ticket, and the loop over the queries that see them: keys of a head from the
    first to the last, `heads_at_once` heads in turn. So whatever a program waits for (`dq_sums.py`)
    has an earlier ticket."""
    if sizes.CUT:
        ticket, span, number = find_cut(ticket, sizes)
    first_head = ticket // (kv_slots * heads_at_once) * heads_at_once
    heads = gl.minimum(heads_at_once, n_heads - first_head)
    ticket -= first_head * kv_slots
    slot = ticket // heads
    head = first_head + ticket % heads
    batch, head, q_start, kv_start, len_q, len_kv, is_good = sizes.locate(slot, head, True)
    q_head = head * sizes.heads_per_kv
    if sizes.LAYOUT == "varlen":
        tile = q_head * sizes.q_slots + q_start // sizes.BLOCK_Q + batch
    else:
        tile = (batch * sizes.H + head) * sizes.heads_per_kv * sizes.q_slots
    heads = sizes.heads_per_kv
    if sizes.SHARED:
        kv_tile, share, first_head, heads, first_tile, end_tile = find_share(
            slot, kv_slots, batch, head, len_kv, sizes
        )
        q_head += first_head
        tile += first_head * sizes.q_slots
    elif sizes.LAYOUT == "varlen":
        kv_tile = slot - kv_start // sizes.BLOCK_KV - batch
    else:
        kv_tile = slot
    kv_idx = kv_tile * sizes.BLOCK_KV
    # A query sees `left` keys before it, so a key is seen by `left` queries after it.
    first_q_tile, n_tiles, corner = visible_tiles(
        kv_idx, len_kv, len_q, is_good, sizes.right, sizes.left, sizes.HAS_RIGHT, sizes.HAS_LEFT,
        sizes.BLOCK_KV, sizes.BLOCK_Q,
    )  # fmt: skip
    if sizes.SHARED:
        begin = gl.maximum(first_q_tile, first_tile)
        end = gl.minimum(first_q_tile + n_tiles, end_tile)
        corner -= (begin - first_q_tile) * sizes.BLOCK_Q
        first_q_tile = begin
        n_tiles = gl.where(n_tiles < 0, n_tiles, gl.maximum(end - begin, 0))
    elif sizes.CUT:
        # Spans from the last to the first: loops begin at the last tile.
        end = n_tiles - gl.maximum(span, 0) * sizes.span_tiles
        begin = gl.where(span < 0, 0, gl.maximum(end - sizes.span_tiles, 0))
        first_q_tile, n_tiles = begin, end - begin
        # -1 for whole loops, otherwise the number of the loop, and its span.
        share = gl.where(span < 0, -1, number * sizes.spans + span)
    else:
        share = kv_idx
    last_q_tile = first_q_tile + gl.maximum(n_tiles - 1, 0)
    loop = QueryLoop(
        (tile + last_q_tile, gl.maximum(n_tiles, 0) * heads, n_tiles),
        (-sizes.left - corner, sizes.right - corner, len_kv - kv_idx, kv_idx),
        heads,
        share,
        sizes,
    )
    place = (batch, head, q_head, kv_idx, first_q_tile, share)
    return KeyTile(place, (q_start, kv_start, len_q, len_kv), sizes.LAYOUT), loop


@gluon.jit
def find_share(slot, kv_slots, batch, head, len_kv, sizes):
    """Which share a slot of a sequence is, where queries may be shared out: its key tile; the
    number of its dk and dv, -1 if it is the only one; its first query head among those that share
    the keys, and how many it has; the query tile that it begins with, and where it ends."""
    if sizes.LAYOUT == "dense":
        heads, span_tiles = sizes.share_heads, sizes.span_tiles
        spans, n_shares = sizes.spans, sizes.n_shares
        first = batch * kv_slots
    else:
        # `rows.py`
        plan_ptr = sizes.plan_ptr + batch
        ROW = sizes.B + 2
        if sizes.LAYOUT == "varlen":
            slot -= gl.load(plan_ptr)
        first = gl.load(plan_ptr + ROW)
        heads, span_tiles = gl.load(plan_ptr + 2 * ROW), gl.load(plan_ptr + 3 * ROW)
        spans, n_shares = gl.load(plan_ptr + 4 * ROW), gl.load(plan_ptr + 5 * ROW)
    kv_tile = slot
    number = -1 + slot * 0
    share = slot * 0
    if n_shares > 1:
        kv_tiles = gl.cdiv(len_kv, sizes.BLOCK_KV)
        kv_tile = slot // n_shares
        share = slot - kv_tile * n_shares
        number = (first + slot) * sizes.H + head
        if kv_tile >= kv_tiles:
            # Beyond a length in kv_lens, key tiles have one slot each, and no gradient.
            kv_tile = slot - kv_tiles * (n_shares - 1)
            share = slot * 0
            number = -1 + slot * 0
    first_head = share * heads
    first_tile = slot * 0
    if spans > 1:
        first_head = share // spans * heads
        first_tile = share % spans * span_tiles
    heads = gl.minimum(heads, sizes.heads_per_kv - first_head)
    return kv_tile, number, first_head, heads, first_tile, first_tile + span_tiles
