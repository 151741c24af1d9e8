"""Rows whose keys are one block, of which all scores are there at once: their scores, weights and
results.

Every maximum is known before the first weight, so no row fails by its scores. Keys are multiplied
in steps of 16, and their weights summed up in the order of a block of 128.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, add_product, zeros
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    empty_sums,
    join_all,
    n_pieces,
    piece_of,
    piece_start,
    piece_width,
    scale_rows,
)
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    close_rows,
    hide_from,
    max_rounding_error,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.forward.second_pass import clean_product


@gluon.jit
def keys_of(tile, KEYS: gl.constexpr, p: gl.constexpr):
    """The p-th piece of the first KEYS rows of a tile."""
    WIDTH: gl.constexpr = piece_width(KEYS, p)
    return tile if tile.shape[0] == WIDTH else tile.slice(piece_start(KEYS, p), WIDTH, dim=0)


@gluon.jit
def compute_scores(q, k, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Tiles q [ROWS, ·] and k [·, ·], transposed, multiplied over COLUMNS columns: [ROWS, KEYS] in
    pieces."""
    scores = ()
    for p in gl.static_range(n_pieces(KEYS)):
        keys = keys_of(k, KEYS, p)
        acc = zeros(piece_width(KEYS, p))
        for c in gl.static_range(n_pieces(COLUMNS)):
            right = piece_of(keys, COLUMNS, c).permute((1, 0))
            acc = warpgroup_mma(piece_of(q, COLUMNS, c), right, acc, use_acc=c > 0, is_async=True)
        scores = scores + (acc,)  # noqa: RUF005, Gluon does not unpack
    return await_all(scores)


@gluon.jit
def issue_products(weights, v, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Pieces of weights [ROWS, KEYS] times values [·, ·]: pieces [ROWS, COLUMNS], under way."""
    sums = empty_sums(COLUMNS)
    for p in gl.static_range(n_pieces(KEYS)):
        values = keys_of(v, KEYS, p)
        rounded = round_pairs(weights[p], v.dtype)
        added = ()
        for c in gl.static_range(n_pieces(COLUMNS)):
            acc = add_product(sums[c], rounded, piece_of(values, COLUMNS, c))
            added = added + (acc,)  # noqa: RUF005
        sums = added
    return sums


@gluon.jit
def thread_maxima(s):
    """`thread_sums`, but the largest."""
    pairs = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    return gl.max(gl.max(pairs, 3), 1)


@gluon.jit
def row_maxima(scores, LAYOUT: gl.constexpr):
    """The largest score of each row [ROWS] in all pieces."""
    top = thread_maxima(scores[0])
    for p in gl.static_range(1, len(scores)):
        of_piece = thread_maxima(scores[p])
        top = gl.maximum(top, gl.convert_layout(of_piece, top.type.layout, assert_trivial=True))
    return gl.convert_layout(gl.max(top, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def halves(x):
    """x [ROWS, n, 4] as two [ROWS, n / 2, 4]."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2, 4]).permute((0, 2, 3, 1)).split()


@gluon.jit
def add_one(l, x):
    """l [ROWS, 4] + x [ROWS, 1, 4]."""
    x = x.reshape([x.shape[0], 4])
    return l + gl.convert_layout(x, l.type.layout, assert_trivial=True)


@gluon.jit
def add_in_order(l, x):
    """l [ROWS, 4] + x [ROWS, n, 4], one after the other, where n is 2 or 4."""
    left, right = halves(x)
    if x.shape[1] == 4:
        first, second = halves(left)
        l = add_one(add_one(l, first), second)
        first, second = halves(right)
        return add_one(add_one(l, first), second)
    else:  # noqa: RET505, Gluon would go on and return both
        return add_one(add_one(l, left), right)


@gluon.jit
def sum_pieces(weights):
    """`thread_sums` of all pieces, in the order that it has in one block: pairs of columns, one
    after the other."""
    l = thread_sums(weights[0])
    for p in gl.static_range(1, len(weights)):
        w = weights[p]
        pairs = w.reshape([w.shape[0], w.shape[1] // 8, 4, 2])
        l = add_in_order(l, gl.sum(pairs, 3))
    return l


@gluon.jit
def weights_of(s, origin, offset, unit):
    """exp2((s - origin)·unit + offset) of scores [ROWS, ·]. Where origin [ROWS] is 0, or None, they
    have the bits of `exp2_weights`, and where offset is, of `exp2_weights_exact`."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if origin is not None:
        s = s - gl.expand_dims(gl.convert_layout(origin, rows, assert_trivial=True), 1)
    offset = gl.expand_dims(gl.convert_layout(offset, rows, assert_trivial=True), 1)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    return gl.exp2(gl.fma(s, zero + unit, zero + offset))


@gluon.jit
def hide_piece(s, end):
    """`hide_from`, with `end` [ROWS] in any layout of rows."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    return hide_from(s, gl.convert_layout(end, rows, assert_trivial=True))


@gluon.jit
def hide(scores, end, KEYS: gl.constexpr, FIRST: gl.constexpr):
    """Pieces of scores [ROWS, KEYS], -inf from column `end` [ROWS] on; pieces before the one of
    number FIRST are seen whole."""
    hidden = ()
    for p in gl.static_range(n_pieces(KEYS)):
        s = scores[p]
        if p >= FIRST:
            s = hide_piece(s, end - piece_start(KEYS, p))
        hidden = hidden + (s,)  # noqa: RUF005
    return hidden


@gluon.jit
def weights_and_maxima(scores, unit, LAYOUT: gl.constexpr, EXACT: gl.constexpr):
    """Pieces of weights [ROWS, KEYS] of scores in their final units, their maximum [ROWS], and
    whether it is too large for `exp2_weights`: such rows have other weights if EXACT, else wrong
    ones."""
    m = row_maxima(scores, LAYOUT)
    is_large = (gl.abs(m) * unit >= LARGE_MAX) & (m > -float("inf"))
    offset = gl.where(m == -float("inf"), 0.0, -m * unit)
    origin = None
    if EXACT:
        origin = gl.where(is_large, m, 0.0)
        offset = gl.where(is_large, 0.0, offset)
    weights = ()
    for p in gl.static_range(len(scores)):
        weights = weights + (weights_of(scores[p], origin, offset, unit),)  # noqa: RUF005
    return weights, m, is_large


@gluon.jit
def close(acc, weights, m, is_large, unit, sink, dtype: gl.constexpr):
    """Pieces of out, lse, m and l, as `program.normalize` has them; acc is under way. Rows that are
    `is_large`, if not None, have the weights of `exp2_weights_exact`."""
    layout: gl.constexpr = m.type.layout
    sums = sum_pieces(weights)
    error = max_rounding_error(m, unit)
    if is_large is not None:
        error = gl.where(is_large, 0.0, error)
    factor = gl.exp2(-error)
    top = gl.exp2(error)
    l = gl.convert_layout(gl.sum(sums, 1), layout, assert_trivial=True)
    r = gl.where(l == 0.0, l, l + (top.to(dtype).to(gl.float32) - top))
    if dtype == gl.bfloat16 and sink is None:
        l = gl.convert_layout(gl.sum(scale_rows(sums, factor), 1), layout, assert_trivial=True)
        factor = gl.full([ROWS], 1.0, gl.float32, layout)
    acc = await_all(acc)
    return close_rows(acc, m, l, r, factor, unit, sink, 0.0, BRIEF=True)


@gluon.jit
def failures(out, is_large, exists, like):
    """1 for threads [ROWS, 4] with a part of a row that is not finite, or of one that is `is_large`
    [ROWS], and `exists` [ROWS], else 0; in the layout of `like`. A sum of numbers that are finite
    may not be; then the row is computed again in vain."""
    layout: gl.constexpr = like.type.layout
    total = gl.full(like.shape, 0.0, gl.float32, layout)
    for c in gl.static_range(len(out)):
        total += gl.convert_layout(thread_sums(out[c]), layout, assert_trivial=True)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    is_large = gl.expand_dims(gl.convert_layout(is_large, rows, assert_trivial=True), 1)
    exists = gl.expand_dims(gl.convert_layout(exists, rows, assert_trivial=True), 1)
    return gl.where((is_large | ((gl.abs(total) < float("inf")) == 0)) & exists, 1, 0)


@gluon.jit
def add_clean(weights, seen, values, acc):
    """acc and weights [ROWS, n] times values [n, ·], as `clean_product` has it."""
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(round_pairs(weights, values.dtype), left)
    seen = gl.convert_layout(seen.to(values.dtype), left)
    return clean_product(weights, seen, values, acc)


@gluon.jit
def clean_strip(weights, end, v, KEYS: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr):
    """Columns [ROWS, WIDTH] from START on of `clean_products`."""
    acc = zeros(WIDTH)
    for p in gl.static_range(n_pieces(KEYS)):
        seen = gl.exp2(hide_piece(zeros(piece_width(KEYS, p)), end - piece_start(KEYS, p)))
        values = keys_of(v, KEYS, p)
        if values.shape[1] > WIDTH:
            values = values.slice(START, WIDTH, dim=1)
        acc = add_clean(weights[p], seen, values, acc)
    return acc


@gluon.jit
def clean_products(weights, end, v, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """`issue_products`, done, of values that may not be finite, which are overwritten: rows see
    those before `end` [ROWS]. Up to 64 columns at a time: registers are few."""
    sums = ()
    for c in gl.static_range(n_pieces(COLUMNS)):
        if piece_width(COLUMNS, c) == 128:
            left = clean_strip(weights, end, v, KEYS, 0, 64)
            right = clean_strip(weights, end, v, KEYS, 64, 64)
            sums = sums + join_all((left, right), (zeros(128),))
        else:
            acc = clean_strip(
                weights, end, v, KEYS, piece_start(COLUMNS, c), piece_width(COLUMNS, c)
            )
            sums = sums + (acc,)  # noqa: RUF005
    return sums
