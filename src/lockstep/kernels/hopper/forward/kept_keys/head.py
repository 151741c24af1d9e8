"""Heads whose keys stay in shared memory: where they are, and where the rows of their tiles lie."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier
from lockstep.kernels.hopper.common.pieces import issue_products, issue_transposed, piece_start
from lockstep.kernels.hopper.common.ring import TileRing
from lockstep.kernels.hopper.common.scores import LOG2E
from lockstep.kernels.hopper.common.sizes import columns
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward.few_keys import store_piece
from lockstep.kernels.hopper.forward.kept_keys.rows import close
from lockstep.kernels.hopper.forward.one_block.rows import hide_piece
from lockstep.kernels.hopper.forward.one_block.tiles import HeadTiles
from lockstep.kernels.hopper.forward.program import Results

columns_of = gluon.constexpr_function(columns)


@gluon.constexpr_function
def wide_layout(width):
    """The layout of an accumulator [ROWS, width] in which a thread has 8 columns beside each other:
    those that the four threads of a row had by twos."""
    strips = [[0, 32 << i] for i in range((width // 32).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], *strips, [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
def widen(x):
    """x [ROWS, ·] in `wide_layout`, if it has as many columns."""
    if x.shape[1] >= 32:
        layout: gl.constexpr = wide_layout(x.shape[1])
        return gl.convert_layout(x, layout)
    else:  # noqa: RET505, Gluon would go on and return both
        return x


@aggregate
class Keys:
    """The keys of a head, or its values: a block, and behind it the *rest*."""

    first: TileRing
    rest: TileRing
    REST: gl.constexpr  # keys of the rest, 0 for none

    @gluon.constexpr_function
    def __init__(self, first, rest, REST):
        self.first = first
        self.rest = rest
        self.REST = gl.constexpr(REST)

    @gluon.jit
    def create(descs, COLUMNS: gl.constexpr, REST: gl.constexpr):
        first = TileRing.create_alone(descs[0], COLUMNS)
        rest = first
        if REST > 0:
            rest = TileRing.create_alone(descs[1], COLUMNS)
        return Keys(first, rest, REST)

    @gluon.jit
    def load(self, n, descs, tiles, tile):
        """Send those of a tile on their way, the n-th in all."""
        self.first.load(n, descs[0], tiles.kv_at(tile))
        if self.REST > 0:
            self.rest.load(n, descs[1], tiles.kv_at(tile, descs[0].block_shape[3]))

    @gluon.jit
    def wait(self, n):
        self.first.wait(n)
        if self.REST > 0:
            self.rest.wait(n)

    @gluon.jit
    def block(self, b: gl.constexpr):
        """The first block, or the rest."""
        return self.first if b == 0 else self.rest

    @gluon.jit
    def issue_scores(self, q, b: gl.constexpr):
        """Queries times the keys of a block, transposed: [ROWS, ·], under way."""
        keys = self.block(b)
        return issue_transposed(q.pieces(0), keys, 0, keys.tiles_smem.shape[4])

    @gluon.jit
    def issue_products(self, p, b: gl.constexpr, acc):
        """acc and weights p times the values of a block, under way. The first block has no acc."""
        return issue_products(p, self.block(b), 0, acc, b > 0)

    @gluon.jit
    def invalidate(self):
        mbarrier.invalidate(self.first.ring.full_bar.index(0))
        if self.REST > 0:
            mbarrier.invalidate(self.rest.ring.full_bar.index(0))


@aggregate
class Head:
    """What all tiles of a program share. A tile has HEADS heads that share their keys, and as many
    queries of each: row r is query r % (ROWS / HEADS) of head r // (ROWS / HEADS)."""

    results: Results
    tiles: HeadTiles  # of which a head is HEADS of them
    scale: gl.tensor
    right: gl.tensor
    q: TileRing
    k: Keys
    v: Keys
    SCALED: gl.constexpr  # scores are multiplied by a scale that is not positive
    HAS_RIGHT: gl.constexpr
    HAS_SINKS: gl.constexpr
    HEADS: gl.constexpr
    DV: gl.constexpr
    BLOCK: gl.constexpr  # keys of the first block
    FIXED_MAX: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, results, tiles, scale, right, q, k, v, SCALED, HAS_RIGHT, HAS_SINKS, HEADS, DV,
        BLOCK, FIXED_MAX,
    ):  # fmt: skip
        self.results = results
        self.tiles = tiles
        self.scale = scale
        self.right = right
        self.q = q
        self.k = k
        self.v = v
        self.SCALED = gl.constexpr(SCALED)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.HEADS = gl.constexpr(HEADS)
        self.DV = gl.constexpr(DV)
        self.BLOCK = gl.constexpr(BLOCK)
        self.FIXED_MAX = gl.constexpr(FIXED_MAX)

    @gluon.jit
    def unit(self):
        """The factor that turns final scores into log2 units."""
        if self.SCALED:
            return LOG2E
        else:  # noqa: RET505, Gluon would go on and return both
            return self.scale

    @gluon.jit
    def rows_of(self, tile):
        """The queries of a tile [ROWS], and their heads."""
        layout: gl.constexpr = gl.SliceLayout(1, accumulator(self.BLOCK))
        QUERIES: gl.constexpr = ROWS // self.HEADS
        row = gl.arange(0, ROWS, layout)
        q_idx = tile.q_tile * QUERIES + row % QUERIES
        return q_idx, self.tiles.head_of(tile) * self.HEADS + row // QUERIES

    @gluon.jit
    def inner_end(self, tile):
        """The first block that some row does not see whole, of the 64 queries of its head that the
        kernel for all calls would have in one tile: there, values are cleaned."""
        first = tile.q_tile * (ROWS // self.HEADS) // ROWS * ROWS
        end = first + (self.tiles.Skv - self.tiles.Sq + self.right + 1)
        return gl.minimum(end, self.tiles.Skv) // self.BLOCK

    @gluon.jit
    def q_at(self, tile):
        """Where a tile lies in the tensor map of the queries."""
        head = self.tiles.head_of(tile) * self.HEADS
        return coordinates(tile.batch, 0, 0, head, tile.q_tile * (ROWS // self.HEADS), 0, False)

    @gluon.jit
    def row(self, tile, q_idx, heads):
        """Where rows [ROWS] are in lse, and rows of out."""
        start = tile.batch * self.results.stride_b + heads * self.results.stride_h
        return start + q_idx * self.results.stride_s

    @gluon.jit
    def mask(self, s, end, b: gl.constexpr):
        """Scores of a block in their final units, -inf for keys from `end` [ROWS] on."""
        s = s * self.scale if self.SCALED else s
        # Without a mask, only the last block ends before its last key.
        IS_CUT: gl.constexpr = self.HAS_RIGHT or b > 0 or self.k.REST == 0
        return hide_piece(s, end - self.BLOCK * b) if IS_CUT else s

    @gluon.jit
    def close(self, heads, acc, m, l, beside, is_exact, dtype: gl.constexpr):
        """Pieces of out, lse, m and l."""
        sink = None
        if self.HAS_SINKS:
            sink = gl.load(self.results.sinks_ptr + heads)
        return close(acc, m, l, beside, is_exact, self.unit(), sink, dtype)

    @gluon.jit
    def store(self, tile, q_idx, heads, out, lse, m, l, chosen, dtype: gl.constexpr):
        """Write the `chosen` rows [ROWS] of a tile."""
        row = self.row(tile, q_idx, heads)
        COLUMNS: gl.constexpr = columns_of(self.DV)
        for p in gl.static_range(len(out)):
            x = widen(out[p].to(dtype))
            store_piece(self.results, row, chosen, x, piece_start(COLUMNS, p), self.DV)
        self.results.store_statistics(row, lse, m, l, chosen)
