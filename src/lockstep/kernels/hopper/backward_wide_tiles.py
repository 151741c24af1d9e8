"""What the wide backward kernels share: tiles of up to 256 columns, and products of them.

Tiles come in chunks of 64 columns, which lie one behind the other in shared memory, as the matrix
units want them. Matrices have a power of two of columns, so three chunks make two pieces, of 128
and 64 columns, and any other number one piece.
"""

from __future__ import annotations

from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin

from lockstep.kernels.hopper.backward_strays import replace_strays
from lockstep.kernels.hopper.backward_tiles import allocate_tiles, barriers
from lockstep.kernels.hopper.gluon_shim import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CHUNK = gl.constexpr(64)
ROWS = gl.constexpr(64)  # of a warpgroup: the height of a wgmma


@gluon.constexpr_function
def pieces_of(N):
    """How many pieces N chunks make."""
    return 2 if N == 3 else 1


@gluon.constexpr_function
def columns_of(N, piece):
    return 64 if piece == 1 else 128 if N == 3 else 64 * N


@builtin
def _joined(chunk, columns, _semantic=None):
    """A chunk [rows, CHUNK] and those behind it as one matrix. Gluon has had a public name for
    `memdesc_reinterpret` since 3.9."""
    shape = [chunk.shape[0], _unwrap_if_constexpr(columns)]
    layout = gl.NVMMASharedLayout.get_default_for(shape, chunk.dtype)
    return _semantic.memdesc_reinterpret(chunk, chunk.dtype, shape, layout)


@aggregate
class Ring:
    """Tiles [rows, N · CHUNK] on their way from the producer to consumers: the i-th since the
    program began is in slot i % STAGES. `full` completes when it has landed, `empty` when all
    consumers are done with it."""

    chunks: gl.shared_memory_descriptor  # [STAGES * N, 1, 1, 1, rows, CHUNK]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    N: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, chunks, full, empty, N, STAGES):
        self.chunks = chunks
        self.full = full
        self.empty = empty
        self.N = gl.constexpr(N)
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def create(desc, N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
        chunks = allocate_tiles(desc, STAGES * N)
        return Ring(chunks, barriers(STAGES, 1), barriers(STAGES, CONSUMERS), N, STAGES)

    @gluon.jit
    def send(self, i, desc, coordinates, further_bytes: gl.constexpr = 0):
        """Producer: load the i-th tile, whose first row is at `coordinates`. It is full when so
        many further bytes have landed, too."""
        slot = i % self.STAGES
        full = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), ((i // self.STAGES) & 1) ^ 1)
        mbarrier.expect(full, self.N * desc.block_type.nbytes + further_bytes)
        a, b, head, row, _ = coordinates
        for c in gl.static_range(self.N):
            at = [a, b, head, row, c * CHUNK]
            tma_load(desc, at, full, self.chunks.index(slot * self.N + c))

    @gluon.jit
    def wait(self, i, pred=True):
        mbarrier.wait(self.full.index(i % self.STAGES), (i // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def release(self, i, pred=True):
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1, pred=pred)

    @gluon.jit
    def chunk(self, i, c):
        """Columns c · CHUNK … of the i-th tile [rows, CHUNK]."""
        tile = self.chunks.index(i % self.STAGES * self.N + c)
        return tile.reshape([tile.shape[3], tile.shape[4]])

    @gluon.jit
    def piece(self, i, p: gl.constexpr):
        """The p-th piece of the i-th tile [rows, columns]."""
        return _joined(self.chunk(i, 2 * p), columns_of(self.N, p))

    @gluon.jit
    def replace_strays(self, i, value: gl.constexpr):
        """Set what is not finite in the i-th tile to a number with these bits."""
        for c in range(self.N):
            replace_strays(self.chunk(i, c), self.chunks.dtype, value)

    @gluon.jit
    def store(self, desc, coordinates):
        """Producer: store the tile in slot 0."""
        a, b, head, row, _ = coordinates
        for c in gl.static_range(self.N):
            tma_store(desc, [a, b, head, row, c * CHUNK], self.chunks.index(c))


@gluon.jit
def multiply_rows(own, i, first: gl.constexpr, tiles, j):
    """ROWS rows from `first` on of own's i-th tile times the j-th of `tiles` [n, D], transposed:
    [ROWS, n], under way."""
    n: gl.constexpr = tiles.chunks.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
    acc = gl.zeros([ROWS, n], gl.float32, layout)
    for p in gl.static_range(pieces_of(tiles.N)):
        a = own.piece(i, p).slice(first, ROWS, dim=0)
        b = tiles.piece(j, p).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=p > 0, is_async=True)
    return acc


@gluon.jit
def no_sums(N: gl.constexpr):
    """Accumulators [ROWS, columns] of each piece of N chunks."""
    if N == 3:
        return _zeros(columns_of(N, 0)), _zeros(columns_of(N, 1))
    else:  # noqa: RET505, Gluon would go on and return both
        return (_zeros(columns_of(N, 0)),)


@gluon.jit
def _zeros(columns: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    return gl.zeros([ROWS, columns], gl.float32, layout)


@gluon.jit
def add_products(sums, weights, tiles, i):
    """sums + weights [ROWS, n] times the i-th of `tiles` [n, D], under way."""
    weights = weights.to(tiles.chunks.dtype)
    if tiles.N == 3:
        return _add(sums[0], weights, tiles.piece(i, 0)), _add(sums[1], weights, tiles.piece(i, 1))
    else:  # noqa: RET505
        return (_add(sums[0], weights, tiles.piece(i, 0)),)


@gluon.jit
def _add(acc, weights, tile):
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(weights, left), tile, acc, is_async=True)


@gluon.jit
def settle(scores, sums):
    """Wait for all products under way."""
    done = warpgroup_mma_wait(0, deps=(scores,) + sums)  # noqa: RUF005, Gluon does not unpack
    return done[0], done[1:]
