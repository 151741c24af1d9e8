"""Columns that are no power of two, cut into pieces that are.

Gluon's matrices have a power of two of columns, the matrix units take any multiple of 16: 80
columns are a piece of 64 and one of 16, 192 are 128 and 64.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import accumulator, add_product, left_operand, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def n_pieces(columns):
    """How many pieces `columns` make."""
    return columns.bit_count()


@gluon.constexpr_function
def piece_width(columns, p):
    """The columns of the p-th piece: the p-th highest bit of `columns`."""
    return [1 << i for i in range(columns.bit_length() - 1, -1, -1) if columns >> i & 1][p]


@gluon.constexpr_function
def piece_start(columns, p):
    """The first column of the p-th piece."""
    return sum([1 << i for i in range(columns.bit_length() - 1, -1, -1) if columns >> i & 1][:p])


@gluon.jit
def empty_sums(COLUMNS: gl.constexpr):
    """Accumulators [ROWS, ·] fp32 of each piece, without products."""
    sums = ()
    for p in gl.static_range(n_pieces(COLUMNS)):
        sums = sums + (zeros(piece_width(COLUMNS, p)),)  # noqa: RUF005, Gluon does not unpack
    return sums


@gluon.jit
def piece_of(tile, COLUMNS: gl.constexpr, p: gl.constexpr):
    """Where the p-th piece of a tile [rows, ·] in shared memory is."""
    WIDTH: gl.constexpr = piece_width(COLUMNS, p)
    return tile if tile.shape[1] == WIDTH else tile.slice(piece_start(COLUMNS, p), WIDTH, dim=1)


@gluon.jit
def issue_transposed(left, ring, i, BLOCK_KV: gl.constexpr):
    """Pieces of the left operand [ROWS, COLUMNS] in shared memory times the i-th tile of `ring`
    [BLOCK_KV, COLUMNS], transposed: [ROWS, BLOCK_KV], under way."""
    acc = zeros(BLOCK_KV)
    for p in gl.static_range(n_pieces(ring.COLUMNS)):
        right = ring.piece(i, p).permute((1, 0))
        acc = warpgroup_mma(left[p], right, acc, use_acc=p > 0, is_async=True)
    return acc


@gluon.jit
def issue_products(left, ring, i, sums, use_sums=True):
    """sums + the left operand [ROWS, rows] in registers times the i-th tile of `ring`
    [rows, COLUMNS], under way; 0 in place of sums, unless `use_sums`."""
    added = ()
    for p in gl.static_range(n_pieces(ring.COLUMNS)):
        x = gl.convert_layout(left, left_operand(piece_width(ring.COLUMNS, p)))
        acc = warpgroup_mma(x, ring.piece(i, p), sums[p], use_acc=use_sums, is_async=True)
        added = added + (acc,)  # noqa: RUF005
    return added


@gluon.jit
def issue_scores(a, b, COLUMNS: gl.constexpr):
    """Tiles a [ROWS, ·] and b [n, ·] in shared memory, b transposed: [ROWS, n], under way. Products
    are over the first COLUMNS columns."""
    acc = zeros(b.shape[0])
    for p in gl.static_range(n_pieces(COLUMNS)):
        right = piece_of(b, COLUMNS, p).permute((1, 0))
        acc = warpgroup_mma(piece_of(a, COLUMNS, p), right, acc, use_acc=p > 0, is_async=True)
    return acc


@gluon.jit
def add_products(sums, weights, tile, COLUMNS: gl.constexpr):
    """sums + weights [ROWS, n] times the first COLUMNS columns of a tile [n, ·], under way."""
    added = ()
    for p in gl.static_range(n_pieces(COLUMNS)):
        acc = add_product(sums[p], weights, piece_of(tile, COLUMNS, p))
        added = added + (acc,)  # noqa: RUF005
    return added


@gluon.jit
def await_all(sums):
    """The sums, when all products under way are done."""
    done = warpgroup_mma_wait(0, deps=sums)
    if len(sums) == 1:
        return (done,)
    else:  # noqa: RET505, Gluon would go on and return both
        return done


@gluon.jit
def scale_rows(x, factor):
    """x [BLOCK_Q, ·] times factor [BLOCK_Q], whatever the layout of either."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(factor, rows), 1)


@gluon.jit
def scale_all(pieces, factor):
    """Pieces [BLOCK_Q, ·] times factor [BLOCK_Q]."""
    scaled = ()
    for p in gl.static_range(len(pieces)):
        scaled = scaled + (scale_rows(pieces[p], factor),)  # noqa: RUF005
    return scaled


@gluon.jit
def row_sums(pieces, layout: gl.constexpr):
    """The sum of each row [BLOCK_Q] over all pieces."""
    total = gl.convert_layout(gl.sum(pieces[0], 1), layout)
    for p in gl.static_range(1, len(pieces)):
        total += gl.convert_layout(gl.sum(pieces[p], 1), layout)
    return total


@gluon.jit
def halves(s):
    """The left and the right columns of s [BLOCK_Q, BLOCK_KV]."""
    return s.reshape([s.shape[0], 2, s.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def cut(x, WIDTH: gl.constexpr):
    """A tuple of the columns of x [ROWS, ·], so many at a time."""
    layout: gl.constexpr = accumulator(WIDTH)
    parts = (x,)
    for _step in gl.static_range(_log2(x.shape[1] // WIDTH)):
        narrower = ()
        for i in gl.static_range(len(parts)):
            left, right = halves(parts[i])
            narrower = narrower + (left, right)  # noqa: RUF005, Gluon does not unpack
        parts = narrower
    found = ()
    for i in gl.static_range(len(parts)):
        part = gl.convert_layout(parts[i], layout, assert_trivial=True)
        found = found + (part,)  # noqa: RUF005
    return found


@gluon.jit
def cut_all(pieces, WIDTH: gl.constexpr):
    """The columns of all pieces [ROWS, ·], so many at a time."""
    found = ()
    for i in gl.static_range(len(pieces)):
        found = found + cut(pieces[i], WIDTH)
    return found


@gluon.jit
def _joined(parts, like):
    """The columns that `cut` made of a tensor `like` this, together again."""
    layout: gl.constexpr = like.type.layout
    for _step in gl.static_range(_log2(len(parts))):
        wider = ()
        for i in gl.static_range(len(parts) // 2):
            both = gl.join(parts[2 * i], parts[2 * i + 1]).permute((0, 2, 1))
            both = both.reshape([both.shape[0], 2 * both.shape[2]])
            wider = wider + (both,)  # noqa: RUF005
        parts = wider
    return gl.convert_layout(parts[0], layout, assert_trivial=True)


@gluon.jit
def join_all(parts, like):
    """What `cut_all` made of pieces `like` these, together again."""
    found = ()
    for i in gl.static_range(len(like)):
        piece = _joined(parts[: like[i].shape[1] // parts[0].shape[1]], like[i])
        found = found + (piece,)  # noqa: RUF005
        parts = parts[like[i].shape[1] // parts[0].shape[1] :]
    return found


@gluon.jit
def nan_for_nonfinite(pieces):
    """Pieces with NaN for whatever is not finite."""
    found = ()
    for p in gl.static_range(len(pieces)):
        found = found + (pieces[p] + pieces[p] * 0.0,)  # noqa: RUF005
    return found


@gluon.jit
def multiply_all(pieces, number):
    """Pieces times a number."""
    products = ()
    for p in gl.static_range(len(pieces)):
        products = products + (pieces[p] * number,)  # noqa: RUF005
    return products


@gluon.jit
def store_pieces(pieces, tile, COLUMNS: gl.constexpr):
    """Store pieces as the first COLUMNS columns of a tile in shared memory."""
    for p in gl.static_range(len(pieces)):
        piece_of(tile, COLUMNS, p).store(pieces[p].to(tile.dtype))
