"""Which queries a program of the wide backward owns, and which key tiles they see.

A program owns BLOCK_Q queries of one head and loops over the key tiles that any of them sees, from
the first to the last.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.sizes import visible_tiles
from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.tensor_maps import coordinates

BLOCK_Q = gl.constexpr(2 * ROWS.value)


@aggregate
class KeyLoop:
    """The key tiles that a program's queries see, from the first to the last."""

    first_tile: gl.tensor
    n_steps: gl.tensor  # -1 if the sequence is bad
    # Query r of the program sees key c of its t-th tile if c < room - t·BLOCK_KV and
    #   low - t·BLOCK_KV <= c - r <= high - t·BLOCK_KV
    low: gl.tensor
    high: gl.tensor
    room: gl.tensor
    BLOCK_KV: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_EDGE: gl.constexpr  # the last key tile may be cut short
    CONSTANT_TIME: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, bounds, sizes):
        self.first_tile, self.n_steps = tiles
        self.low, self.high, self.room = bounds
        self.BLOCK_KV = sizes.BLOCK_KV
        self.HAS_LEFT = sizes.HAS_LEFT
        self.HAS_RIGHT = sizes.HAS_RIGHT
        self.HAS_EDGE = sizes.HAS_EDGE
        self.CONSTANT_TIME = sizes.CONSTANT_TIME

    @gluon.jit
    def nan_if_bad(self):
        """NaN if the sequence is bad, else 0: a term of the factor of results."""
        return gl.where(self.n_steps < 0, float("nan"), 0.0)

    @gluon.jit
    def cuts(self, t):
        """Whether some key of the t-th tile is hidden from some query of the program."""
        at = t * self.BLOCK_KV
        cut = self.room < 0
        if self.HAS_EDGE:
            cut = self.room - at < self.BLOCK_KV
        if self.HAS_LEFT:
            cut = cut | (self.low - at > 1 - BLOCK_Q)
        if self.HAS_RIGHT:
            cut = cut | (self.high - at < self.BLOCK_KV - 1)
        return cut

    @gluon.jit
    def hide(
        self, x, t, first_row: gl.constexpr, value: gl.constexpr, first_column: gl.constexpr = 0
    ):  # fmt: skip
        """x [ROWS, columns] of the t-th tile, `value` where key and query are hidden from each
        other; `first_row` is the program's query in row 0, `first_column` the tile's key in
        column 0."""
        rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        columns: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        query = gl.expand_dims(first_row + gl.arange(0, x.shape[0], rows), 1)
        key = gl.arange(first_column, first_column + x.shape[1], columns)
        key = gl.expand_dims(key + t * self.BLOCK_KV, 0)
        if self.HAS_EDGE:
            x = gl.where(key < self.room, x, value)
        if self.HAS_LEFT:
            x = gl.where(query + self.low <= key, x, value)
        if self.HAS_RIGHT:
            x = gl.where(query + self.high >= key, x, value)
        return x


@aggregate
class QueryTile:
    """The queries of a program, and where their sequence lies in the tensors."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    q_idx: gl.tensor  # first query, counted in its sequence
    stats_tile: gl.tensor  # of the sequence's first query
    q_start: gl.tensor  # the sequence's first query row in the tensor
    kv_start: gl.tensor  # and its first key
    len_q: gl.tensor
    len_kv: gl.tensor
    LAYOUT: gl.constexpr  # "dense", "kv_lens" or "varlen"

    @gluon.constexpr_function
    def __init__(self, place, lengths, LAYOUT):
        self.batch, self.head, self.kv_head, self.q_idx, self.stats_tile = place
        self.q_start, self.kv_start, self.len_q, self.len_kv = lengths
        self.LAYOUT = gl.constexpr(LAYOUT)

    @gluon.jit
    def q_coordinates(self):
        """Where the queries lie in the tensor maps of q, dout and dq."""
        return coordinates(
            self.batch, self.q_start, self.len_q, self.head, self.q_idx, 0, self.LAYOUT == "varlen"
        )

    @gluon.jit
    def kv_coordinates(self, kv_idx):
        """Where a key lies in those of k and v."""
        return coordinates(
            self.batch, self.kv_start, self.len_kv, self.kv_head, kv_idx, 0, self.LAYOUT != "dense"
        )


@gluon.jit
def assign_queries(slot, head, sizes):
    """The queries of a slot, and the loop over the keys they see."""
    stats_tile = head * sizes.q_slots
    batch, head, q_start, kv_start, len_q, len_kv, is_good = sizes.locate(slot, head, False)
    q_idx = slot * BLOCK_Q
    if sizes.LAYOUT == "varlen":
        q_idx = (slot - q_start // BLOCK_Q - batch) * BLOCK_Q
        stats_tile += q_start // ROWS + batch
    first_tile, n_tiles, corner = visible_tiles(
        q_idx, len_q, len_kv, is_good, sizes.left, sizes.right, sizes.HAS_LEFT, sizes.HAS_RIGHT,
        BLOCK_Q, sizes.BLOCK_KV,
    )  # fmt: skip
    room = len_kv - first_tile * sizes.BLOCK_KV
    loop = KeyLoop((first_tile, n_tiles), (corner - sizes.left, corner + sizes.right, room), sizes)
    place = (batch, head, head // sizes.heads_per_kv, q_idx, stats_tile)
    return QueryTile(place, (q_start, kv_start, len_q, len_kv), sizes.LAYOUT), loop
