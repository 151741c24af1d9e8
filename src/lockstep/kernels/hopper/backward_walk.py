"""Which keys a program of the backward owns, and which query tiles it walks over.

A program owns BLOCK_KV keys of one head and walks over all query tiles that see any of them, from
the last to the first, once for each query head that shares these keys.
"""

from __future__ import annotations

from lockstep.kernels.hopper.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.schedule import RAGGED


@aggregate
class Walk:
    """The query tiles of a program. Tiles of all heads are numbered through, those of one head
    side by side: a head's tiles begin `tiles_per_head` after those of the head before."""

    first_tile: gl.tensor
    n_steps: gl.tensor
    n_tiles: gl.tensor  # of one head
    tiles_per_head: gl.tensor
    kv_tile: gl.tensor
    # Key r of the program and query c of a head's t-th tile see each other if r < room and
    #   low - t·BLOCK_Q <= r - c <= high - t·BLOCK_Q
    low: gl.tensor
    high: gl.tensor
    room: gl.tensor
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_EDGE: gl.constexpr  # the last key tile may be cut short

    @gluon.constexpr_function
    def __init__(self, sizes, BLOCK_Q, BLOCK_KV, HAS_LEFT, HAS_RIGHT, HAS_EDGE):
        self.first_tile = sizes[0]
        self.n_steps = sizes[1]
        self.n_tiles = sizes[2]
        self.tiles_per_head = sizes[3]
        self.kv_tile = sizes[4]
        self.low = sizes[5]
        self.high = sizes[6]
        self.room = sizes[7]
        self.BLOCK_Q = gl.constexpr(BLOCK_Q)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_EDGE = gl.constexpr(HAS_EDGE)

    @gluon.jit
    def next(self, tile, t):
        """The tile after `tile`, which is number `t` of its head; and its number."""
        over = self.tiles_per_head + self.n_tiles - 1
        return gl.where(t == self.n_tiles - 1, tile + over, tile - 1), self.next_number(t)

    @gluon.jit
    def next_number(self, t):
        """The number, in its head, of the tile after the t-th."""
        return gl.where(t == self.n_tiles - 1, 0, t + 1)

    @gluon.jit
    def turn(self, t):
        """How many key tiles add to a head's t-th tile before this program does."""
        turn = self.kv_tile
        if self.HAS_LEFT:
            first_seen = self.kv_tile * self.BLOCK_KV + self.low - t * self.BLOCK_Q
            turn -= gl.maximum(first_seen, 0) // self.BLOCK_KV
        return turn

    @gluon.jit
    def cuts(self, t):
        """Whether some key of the program is hidden from some query of the t-th tile."""
        low = self.low - t * self.BLOCK_Q
        high = self.high - t * self.BLOCK_Q
        cut = self.room < 0
        if self.HAS_EDGE:
            cut = self.room < self.BLOCK_KV
        if self.HAS_LEFT:
            cut = cut | (low > 1 - self.BLOCK_Q)
        if self.HAS_RIGHT:
            cut = cut | (high < self.BLOCK_KV - 1)
        return cut

    @gluon.jit
    def hide(self, s, t, first_row: gl.constexpr):
        """Scores [rows, BLOCK_Q] of the t-th tile, -inf where key and query are hidden from each
        other; `first_row` is the program's key in row 0."""
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
        key = gl.expand_dims(first_row + gl.arange(0, s.shape[0], rows), 1)
        query = gl.expand_dims(gl.arange(0, s.shape[1], columns) - t * self.BLOCK_Q, 0)
        if self.HAS_EDGE:
            s = gl.where(key < self.room, s, -float("inf"))
        if self.HAS_LEFT:
            s = gl.where(key - self.low >= query, s, -float("inf"))
        if self.HAS_RIGHT:
            s = gl.where(key - self.high <= query, s, -float("inf"))
        return s


@aggregate
class Job:
    """The keys of a program, and where their sequence lies in the tensors."""

    batch: gl.tensor
    head: gl.tensor  # of k and v
    kv_idx: gl.tensor  # first key, counted in its sequence
    last_q_tile: gl.tensor
    q_start: gl.tensor  # the sequence's first query row in the tensor
    kv_start: gl.tensor  # and its first key
    len_q: gl.tensor
    len_kv: gl.tensor
    LAYOUT: gl.constexpr  # "dense", "kv_lens" or "varlen"

    @gluon.constexpr_function
    def __init__(self, place, lengths, LAYOUT):
        self.batch = place[0]
        self.head = place[1]
        self.kv_idx = place[2]
        self.last_q_tile = place[3]
        self.q_start = lengths[0]
        self.kv_start = lengths[1]
        self.len_q = lengths[2]
        self.len_kv = lengths[3]
        self.LAYOUT = gl.constexpr(LAYOUT)

    @gluon.jit
    def q_coordinates(self, head, q_idx):
        """Where a row lies in the tensor maps of q and dout."""
        if self.LAYOUT == "varlen":
            return RAGGED, self.q_start + self.len_q, head, RAGGED - self.len_q + q_idx, 0
        return 0, self.batch, head, q_idx, 0

    @gluon.jit
    def kv_coordinates(self):
        """Where the keys lie in the tensor maps of k and v."""
        if self.LAYOUT == "dense":
            return 0, self.batch, self.head, self.kv_idx, 0
        end = self.kv_start + self.len_kv
        return RAGGED, end, self.head, RAGGED - self.len_kv + self.kv_idx, 0

    @gluon.jit
    def dkv_coordinates(self):
        """Where they lie in those of dk and dv: rows beyond a length in kv_lens are there too."""
        if self.LAYOUT == "varlen":
            return self.kv_coordinates()
        return 0, self.batch, self.head, self.kv_idx, 0


@gluon.jit
def find_sequence(slot, cu_ptr, B, BLOCK: gl.constexpr):
    """The packed sequence that owns a slot: sequence b has the slots from cu[b] // BLOCK + b on,
    enough for its tiles and at most one too many."""
    low = slot * 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        first = gl.load(cu_ptr + middle).to(gl.int32) // BLOCK + middle
        low = gl.where(first <= slot, middle, low)
        high = gl.where(first <= slot, high, middle)
    return low
