"""Tiles of up to 256 columns for the wide backward kernels, and products of them.

Tiles come in chunks of 64 columns, which lie one after the other in shared memory, as the matrix
units want them. Matrices have a power of two of columns, so three chunks make two pieces, of 128
and 64 columns, and any other number one piece.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.nonfinite import replace_nonfinite
from lockstep.kernels.hopper.common.accumulator import ROWS, add_product, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.ring import Ring

CHUNK = gl.constexpr(64)


@gluon.constexpr_function
def pieces_of(N):
    """How many pieces N chunks make."""
    return 2 if N == 3 else 1


@gluon.constexpr_function
def columns_of(N, piece):
    return 64 if piece == 1 else 128 if N == 3 else 64 * N


@gluon.jit
def _in_chunks(piece):
    """A piece [rows, columns] as its chunks [n, 1, 1, 1, rows, CHUNK]."""
    shape: gl.constexpr = [piece.shape[1] // CHUNK, 1, 1, 1, piece.shape[0], CHUNK]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    return reinterpret(piece, piece.dtype, shape, layout)


@gluon.jit
def _allocate_pieces(desc, STAGES: gl.constexpr, columns: gl.constexpr):
    rows: gl.constexpr = desc.block_shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [STAGES, rows, columns], layout)


@aggregate
class PieceRing:
    """A ring of tiles [rows, N · CHUNK] that the copy engine loads, in pieces."""

    main_smem: gl.shared_memory_descriptor  # [STAGES, rows, columns], the first pieces
    rest_smem: gl.shared_memory_descriptor  # the second ones, if there are any
    ring: Ring
    N: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, main_smem, rest_smem, ring, N):
        self.main_smem = main_smem
        self.rest_smem = rest_smem
        self.ring = ring
        self.N = gl.constexpr(N)

    @gluon.jit
    def create(desc, N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
        main_smem = _allocate_pieces(desc, STAGES, columns_of(N, 0))
        rest_smem = main_smem
        if pieces_of(N) == 2:
            rest_smem = _allocate_pieces(desc, STAGES, columns_of(N, 1))
        return PieceRing(main_smem, rest_smem, Ring.create(STAGES, CONSUMERS), N)

    @gluon.jit
    def send(self, i, desc, coordinates, further_bytes: gl.constexpr = 0):
        """Producer: load the i-th tile, whose first row is at `coordinates`. It is full when so
        many further bytes have landed, too."""
        full = self.ring.full(i)
        self.ring.wait_empty(i)
        mbarrier.expect(full, self.N * desc.block_type.nbytes + further_bytes)
        a, b, head, row, _ = coordinates
        for c in gl.static_range(self.N):
            tma_load(desc, [a, b, head, row, c * CHUNK], full, self.chunk(i, c))

    @gluon.jit
    def wait(self, i, pred=True):
        """Consumer: wait until the i-th tile is there."""
        self.ring.wait_full(i, pred)

    @gluon.jit
    def release(self, i, pred=True):
        """Consumer: the i-th tile is no longer needed."""
        self.ring.release(i, pred=pred)

    @gluon.jit
    def piece(self, i, p: gl.constexpr):
        """The p-th piece of the i-th tile [rows, columns]."""
        pieces_smem = self.main_smem if p == 0 else self.rest_smem
        return pieces_smem.index(self.ring.slot(i))

    @gluon.jit
    def chunk(self, i, c: gl.constexpr):
        """The c-th chunk of the i-th tile, as tensor maps have it."""
        PIECE: gl.constexpr = 1 if self.N == 3 and c == 2 else 0
        return _in_chunks(self.piece(i, PIECE)).index(c - 2 * PIECE)

    @gluon.jit
    def replace_nonfinite(self, i, value: gl.constexpr, CONSTANT_TIME: gl.constexpr):
        """Set what is not finite in the i-th tile to a number with these bits."""
        for p in gl.static_range(pieces_of(self.N)):
            replace_nonfinite(self.piece(i, p), value, CONSTANT_TIME)

    @gluon.jit
    def store(self, desc, coordinates):
        """Producer: store the tile in slot 0."""
        a, b, head, row, _ = coordinates
        for c in gl.static_range(self.N):
            tma_store(desc, [a, b, head, row, c * CHUNK], self.chunk(0, c))


@gluon.jit
def issue_scores(own, i, first: gl.constexpr, tiles, j):
    """ROWS rows from `first` on of own's i-th tile times the j-th of `tiles` [n, D], transposed:
    [ROWS, n], under way."""
    acc = zeros(tiles.main_smem.shape[1])
    for p in gl.static_range(pieces_of(tiles.N)):
        a = own.piece(i, p).slice(first, ROWS, dim=0)
        b = tiles.piece(j, p).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=p > 0, is_async=True)
    return acc


@gluon.jit
def no_sums(N: gl.constexpr):
    """Accumulators [ROWS, columns] of each piece of N chunks."""
    if N == 3:
        return zeros(columns_of(N, 0)), zeros(columns_of(N, 1))
    else:  # noqa: RET505, Gluon would go on and return both
        return (zeros(columns_of(N, 0)),)


@gluon.jit
def add_products(sums, weights, tiles, i):
    """sums + weights [ROWS, n] times the i-th of `tiles` [n, D], under way."""
    weights = weights.to(tiles.main_smem.dtype)
    first = add_product(sums[0], weights, tiles.piece(i, 0))
    if tiles.N == 3:
        return first, add_product(sums[1], weights, tiles.piece(i, 1))
    else:  # noqa: RET505
        return (first,)


@gluon.jit
def wait_all(scores, sums):
    """Wait for all products under way."""
    done = warpgroup_mma_wait(0, deps=(scores,) + sums)  # noqa: RUF005, Gluon does not unpack
    return done[0], done[1:]
