"""Rings of slots in shared memory, through which one partition passes tiles to others.

Slot `i % STAGES` holds the i-th item since the kernel began. Two mbarriers guard each slot: `full`
completes when an item is there, `empty` when every consumer has released it. A barrier's phase
flips each time it completes, so consumers of the i-th item wait for phase `i // STAGES` modulo 2,
and the producer, one round ahead, for the other one: waiting for the phase before the first returns
at once, so a new ring needs no priming.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)
from lockstep.kernels.hopper.common.pieces import n_pieces, piece_start, piece_width
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers, phase_of, slot_of


@aggregate
class Ring:
    """The barriers of a ring. BY_BITS, STAGES is a power of two, and slots are found by `&` in
    place of `%`, which is a signed division."""

    full_bar: gl.shared_memory_descriptor  # [STAGES, 1]
    empty_bar: gl.shared_memory_descriptor  # [STAGES, 1]
    STAGES: gl.constexpr
    BY_BITS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full_bar, empty_bar, STAGES, BY_BITS):
        self.full_bar = full_bar
        self.empty_bar = empty_bar
        self.STAGES = gl.constexpr(STAGES)
        self.BY_BITS = gl.constexpr(BY_BITS)

    @gluon.jit
    def create(
        STAGES: gl.constexpr,
        CONSUMERS: gl.constexpr,
        PRODUCERS: gl.constexpr = 1,
        BY_BITS: gl.constexpr = False,
    ):
        """A ring whose items PRODUCERS partitions write and CONSUMERS partitions release."""
        full_bar, empty_bar = barriers(STAGES, PRODUCERS), barriers(STAGES, CONSUMERS)
        return Ring(full_bar, empty_bar, STAGES, BY_BITS)

    @gluon.jit
    def slot(self, i):
        """The slot of the i-th item."""
        return slot_of(i, self.STAGES) if self.BY_BITS else i % self.STAGES

    @gluon.jit
    def phase(self, i):
        """The parity of the phase that the i-th item completes of its slot's barriers."""
        return phase_of(i, self.STAGES) if self.BY_BITS else (i // self.STAGES) & 1

    @gluon.jit
    def full(self, i):
        """The barrier that completes when the i-th item is there."""
        return self.full_bar.index(self.slot(i))

    @gluon.jit
    def wait_empty(self, i):
        """Producer: wait until the slot of the i-th item may be written."""
        mbarrier.wait(self.empty_bar.index(self.slot(i)), self.phase(i) ^ 1)

    @gluon.jit
    def wait_full(self, i, pred=True):
        """Consumer: wait until the i-th item is there."""
        mbarrier.wait(self.full(i), self.phase(i), pred=pred)

    @gluon.jit
    def fill(self, i):
        """Producer: the i-th item has been written."""
        mbarrier.arrive(self.full(i), count=1)

    @gluon.jit
    def release(self, i, CONSUMERS: gl.constexpr = 1, pred=True):
        """Consumer: the i-th item is no longer needed, by so many of them."""
        mbarrier.arrive(self.empty_bar.index(self.slot(i)), count=CONSUMERS, pred=pred)


@gluon.constexpr_function
def _in_chunks(desc, columns):
    """Whether a tensor map has the columns of a tile in several blocks."""
    return desc.block_shape[4] < columns


@gluon.constexpr_function
def _first_columns(columns):
    """The columns of a tile that lie in its first part, where it has two."""
    return 1 << (columns.bit_length() - 1)


@gluon.constexpr_function
def _columns_in_boxes(desc, columns):
    """The columns of the first part of a tile that comes in boxes: all, or 128 of up to 192; of
    boxes with fewer than 64, as in chunks."""
    if desc.block_shape[4] < 64:
        return _first_columns(columns)
    return 64 if columns <= 64 else 256 if columns > 192 else 128


@gluon.jit
def _allocate_columns(desc, STAGES: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory [STAGES, 1, 1, heads, rows, COLUMNS] for what a tensor map has in chunks."""
    shape: gl.constexpr = [STAGES, 1, 1, desc.block_shape[2], desc.block_shape[3], COLUMNS]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def _chunks_of(tile, WIDTH: gl.constexpr):
    """A tile [1, 1, heads, rows, columns] as chunks [n, 1, 1, heads, rows, WIDTH], one after the
    other."""
    shape: gl.constexpr = [tile.shape[4] // WIDTH, 1, 1, tile.shape[2], tile.shape[3], WIDTH]
    return reinterpret(tile, tile.dtype, shape, tile.layout)


@aggregate
class TileRing:
    """A ring of tiles [rows, COLUMNS] that the copy engine loads.

    Shared memory has a power of two of columns, of which those after COLUMNS are not used. Tiles of
    which a tensor map has less than all columns lie in two parts: the first 64 or 128, and as many
    as the map has."""

    tiles_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, rows, ·]
    rest_smem: gl.shared_memory_descriptor  # the other columns, or tiles_smem
    ring: Ring
    COLUMNS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_smem, rest_smem, ring, COLUMNS):
        self.tiles_smem = tiles_smem
        self.rest_smem = rest_smem
        self.ring = ring
        self.COLUMNS = gl.constexpr(COLUMNS)

    @gluon.jit
    def create(
        desc,
        STAGES: gl.constexpr,
        CONSUMERS: gl.constexpr,
        COLUMNS: gl.constexpr,
        BY_BITS: gl.constexpr = False,
    ):
        """A ring for tiles of `desc`, each of which CONSUMERS partitions wait for and release."""
        if _in_chunks(desc, COLUMNS):
            tiles_smem = _allocate_columns(desc, STAGES, _first_columns(COLUMNS))
            rest_smem = _allocate_columns(desc, STAGES, desc.block_shape[4])
        else:
            tiles_smem = allocate_tiles(desc, STAGES)
            rest_smem = tiles_smem
        ring = Ring.create(STAGES, CONSUMERS, 1, BY_BITS)
        return TileRing(tiles_smem, rest_smem, ring, COLUMNS)

    @gluon.jit
    def create_alone(desc, COLUMNS: gl.constexpr):
        """One place for tiles of `desc`, which the same warps load and read: none is released."""
        full_bar = barriers(1, 1)
        ring = Ring(full_bar, full_bar, 1, True)
        WIDTH: gl.constexpr = desc.block_shape[4]
        if _in_chunks(desc, COLUMNS):
            first = _allocate_columns(desc, 1, _first_columns(COLUMNS))
            return TileRing(first, _allocate_columns(desc, 1, WIDTH), ring, COLUMNS)
        else:  # noqa: RET505, Gluon would go on and return both
            first = _allocate_columns(desc, 1, WIDTH)
            return TileRing(first, first, ring, COLUMNS)

    @gluon.jit
    def create_in_boxes(
        desc,
        STAGES: gl.constexpr,
        CONSUMERS: gl.constexpr,
        COLUMNS: gl.constexpr,
        BLOCK: gl.constexpr,
    ):
        """`create`, of tiles of BLOCK rows that come in boxes (`pages.py`)."""
        WIDTH: gl.constexpr = _columns_in_boxes(desc, COLUMNS)
        shape: gl.constexpr = [STAGES, 1, 1, 1, BLOCK, WIDTH]
        tiles_smem = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
        rest_smem = tiles_smem
        if WIDTH < COLUMNS:
            rest_shape: gl.constexpr = [STAGES, 1, 1, 1, BLOCK, desc.block_shape[4]]
            rest_smem = gl.allocate_shared_memory(desc.dtype, rest_shape, desc.layout)
        return TileRing(tiles_smem, rest_smem, Ring.create(STAGES, CONSUMERS), COLUMNS)

    @gluon.jit
    def send(self, i, desc, coordinates):
        """Producer: load the i-th tile as soon as its slot is empty."""
        self.ring.wait_empty(i)
        self.load(i, desc, coordinates)

    @gluon.jit
    def load(self, i, desc, coordinates, pred=True):
        """Load the i-th tile to its slot, which is empty, if `pred`."""
        full = self.ring.full(i)
        tile = self.tiles_smem.index(self.ring.slot(i))
        if _in_chunks(desc, self.COLUMNS):
            WIDTH: gl.constexpr = desc.block_shape[4]
            N: gl.constexpr = tile.shape[4] // WIDTH
            mbarrier.expect(full, (N + 1) * desc.block_type.nbytes, pred=pred)
            a, b, head, row, column = coordinates
            chunks = _chunks_of(tile, WIDTH)
            rest = self.rest_smem.index(self.ring.slot(i))
            for n in gl.static_range(N):
                at = [a, b, head, row, column + n * WIDTH]
                tma_load(desc, at, full, chunks.index(n), pred=pred)
            tma_load(desc, [a, b, head, row, column + N * WIDTH], full, rest, pred=pred)
        else:
            mbarrier.expect(full, desc.block_type.nbytes, pred=pred)
            tma_load(desc, coordinates, full, tile, pred=pred)

    @gluon.jit
    def wait(self, i, pred=True):
        """Consumer: wait until the i-th tile is there."""
        self.ring.wait_full(i, pred)

    @gluon.jit
    def tile(self, i):
        """Where the i-th tile is [rows, ·], or the first part of it."""
        tile = self.tiles_smem.index(self.ring.slot(i))
        return tile.reshape([tile.shape[2] * tile.shape[3], tile.shape[4]])

    @gluon.jit
    def piece(self, i, p: gl.constexpr):
        """Where the p-th piece of the i-th tile is (`pieces.py`)."""
        WIDTH: gl.constexpr = piece_width(self.COLUMNS, p)
        START: gl.constexpr = piece_start(self.COLUMNS, p)
        FIRST: gl.constexpr = self.tiles_smem.shape[5]
        if START < FIRST:
            tile = self.tile(i)
            return tile if WIDTH == FIRST else tile.slice(START, WIDTH, dim=1)
        else:  # noqa: RET505, Gluon would go on and return both
            tile = self.rest_smem.index(self.ring.slot(i))
            tile = tile.reshape([tile.shape[2] * tile.shape[3], tile.shape[4]])
            return tile if tile.shape[1] == WIDTH else tile.slice(START - FIRST, WIDTH, dim=1)

    @gluon.jit
    def pieces(self, i):
        """All pieces of the i-th tile."""
        found = ()
        for p in gl.static_range(n_pieces(self.COLUMNS)):
            found = found + (self.piece(i, p),)  # noqa: RUF005, Gluon does not unpack
        return found

    @gluon.jit
    def release(self, i, CONSUMERS: gl.constexpr = 1):
        """Consumer: the i-th tile is no longer needed, by so many of them."""
        self.ring.release(i, CONSUMERS)
