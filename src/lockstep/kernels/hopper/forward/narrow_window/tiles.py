"""Tiles of `kernel.py`: their scores, weights, sums and results.

Of eight heads that share their keys, a tile has eight queries, which see nearly the same keys: of a
window of 128, a tile multiplies 144.

Keys are multiplied in steps of 16, and their weights summed up in ascending order; what a row does
not see adds zeros. So a row's bits do not depend on its place in a tile, nor on the number of heads
in it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import (
    ROWS,
    accumulator,
    add_product,
    left_operand,
    zeros,
)
from lockstep.kernels.hopper.common.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    warpgroup_mma,
)
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    cut,
    join_all,
    n_pieces,
    piece_start,
    piece_width,
)
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    close_rows,
    hide_before,
    hide_from,
    max_rounding_error,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward.narrow_window.memory import (
    PANEL,
    STEP,
    box_of,
    log2,
    n_strips,
    panels,
    strip_of_keys,
    strip_of_tile,
    strip_width,
)
from lockstep.kernels.hopper.forward.one_block.rows import add_clean, add_in_order, weights_of
from lockstep.kernels.hopper.forward.scheduling.schedule import BAD


@gluon.jit
def take_queries(q, KEYS: gl.constexpr, D: gl.constexpr, STAY: gl.constexpr):
    """Strips of queries [ROWS, ·], to be multiplied with KEYS keys: where they are, if they STAY in
    shared memory, else in registers."""
    layout: gl.constexpr = left_operand(piece_width(KEYS, 0))
    strips = ()
    for c in gl.static_range(n_strips(D)):
        strip = strip_of_tile(q, D, c)
        if not STAY:
            strip = strip.load(layout)
        strips = strips + (strip,)  # noqa: RUF005, Gluon does not unpack
    return strips


@gluon.jit
def scores_of(queries, k, at, WIDTH: gl.constexpr, D: gl.constexpr, STAY: gl.constexpr):
    """Scores [ROWS, WIDTH] of queries with the keys from step `at` of k on, under way."""
    acc = zeros(WIDTH)
    for c in gl.static_range(n_strips(D)):
        keys = strip_of_keys(k, at, WIDTH, D, c).permute((1, 0))
        left = queries[c]
        if not STAY:
            left = gl.convert_layout(left, left_operand(WIDTH), assert_trivial=True)
        acc = warpgroup_mma(left, keys, acc, use_acc=c > 0, is_async=True)
    return acc


@gluon.jit
def compute_scores(queries, k, at, KEYS: gl.constexpr, D: gl.constexpr, STAY: gl.constexpr):
    """`scores_of` KEYS keys, in pieces."""
    scores = ()
    for p in gl.static_range(n_pieces(KEYS)):
        step = at + piece_start(KEYS, p) // STEP
        acc = scores_of(queries, k, step, piece_width(KEYS, p), D, STAY)
        scores = scores + (acc,)  # noqa: RUF005
    return await_all(scores)


@gluon.jit
def issue_products(weights, v, at, KEYS: gl.constexpr, DV: gl.constexpr):
    """Pieces of weights times values from a step of v on: strips of out, under way."""
    sums = ()
    for c in gl.static_range(n_strips(DV)):
        sums = sums + (zeros(strip_width(DV, c)),)  # noqa: RUF005
    for p in gl.static_range(n_pieces(KEYS)):
        rounded = round_pairs(weights[p], v.dtype)
        added = ()
        for c in gl.static_range(n_strips(DV)):
            step = at + piece_start(KEYS, p) // STEP
            values = strip_of_keys(v, step, piece_width(KEYS, p), DV, c)
            added = added + (add_product(sums[c], rounded, values),)  # noqa: RUF005
        sums = added
    return sums


@gluon.jit
def clean_products(weights, seen, v, at, KEYS: gl.constexpr, DV: gl.constexpr):
    """`issue_products`, done, of values that may not be finite, which are overwritten."""
    sums = ()
    for c in gl.static_range(n_strips(DV)):
        acc = zeros(strip_width(DV, c))
        for p in gl.static_range(n_pieces(KEYS)):
            step = at + piece_start(KEYS, p) // STEP
            values = strip_of_keys(v, step, piece_width(KEYS, p), DV, c)
            acc = add_clean(weights[p], seen[p], values, acc)
        sums = sums + (acc,)  # noqa: RUF005
    return sums


@gluon.jit
def hide_part(s, begin, end, START: gl.constexpr, BEFORE: gl.constexpr, FROM: gl.constexpr):
    """Scores of STEP keys from START on, -inf before `begin` [ROWS], if any row begins behind
    START, and from `end` on, if any row ends earlier than they do."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if START < BEFORE:
        s = hide_before(s, gl.convert_layout(begin - START, rows, assert_trivial=True))
    if START + STEP > FROM:
        s = hide_from(s, gl.convert_layout(end - START, rows, assert_trivial=True))
    return s


@gluon.jit
def hide(scores, begin, end, KEYS: gl.constexpr, BEFORE: gl.constexpr, FROM: gl.constexpr):
    """Scores, -inf but for columns from `begin` to `end` [ROWS]; no row begins behind BEFORE or
    ends before FROM."""
    hidden = ()
    for p in gl.static_range(n_pieces(KEYS)):
        parts = cut(scores[p], STEP)
        found = ()
        for i in gl.static_range(len(parts)):
            part = hide_part(parts[i], begin, end, piece_start(KEYS, p) + i * STEP, BEFORE, FROM)
            found = found + (part,)  # noqa: RUF005
        hidden = hidden + join_all(found, (scores[p],))
    return hidden


@gluon.jit
def mask_scores(chunk, n, scores, KEYS: gl.constexpr, BEFORE: gl.constexpr, FROM: gl.constexpr):
    """Scores of tile n, -inf where a row does not see a key. Within a sequence, all rows see the
    keys from BEFORE to FROM."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator(piece_width(KEYS, 0)))
    POSITIONS: gl.constexpr = chunk.POSITIONS
    left, right = chunk.schedule.left, chunk.schedule.right
    first_key = chunk.first_key(n)
    q_begin, _ = chunk.queries(n)
    row = gl.arange(0, ROWS, LAYOUT) & (POSITIONS - 1)
    begin = row + (q_begin + chunk.shift() - left - first_key)
    end = begin + (left + right + 1)
    scores = hide(scores, begin, end, KEYS, BEFORE, FROM)
    # At the ends of a sequence there are fewer.
    if (first_key < 0) | ((n + 1) * POSITIONS + right > chunk.len_kv):
        none = gl.full([ROWS], 0, gl.int32, LAYOUT)
        scores = hide(scores, none - first_key, none + (chunk.len_kv - first_key), KEYS, KEYS, 0)
    return scores


@gluon.jit
def sum_in_order(weights):
    """`thread_sums` of all pieces: pairs of columns, one after the other."""
    l = thread_sums(weights[0])
    for p in gl.static_range(1, len(weights)):
        parts = cut(weights[p], STEP)
        for i in gl.static_range(len(parts)):
            pairs = parts[i].reshape([ROWS, STEP // 8, 4, 2])
            l = add_in_order(l, gl.sum(pairs, 3))
    return l


@gluon.jit
def plain_weights(s, offset, unit):
    """exp2(s·unit + offset) of scores [ROWS, ·]."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    column = gl.expand_dims(gl.convert_layout(offset, rows, assert_trivial=True), 1)
    return gl.exp2(gl.fma(s, zero + unit, zero + column))


@gluon.jit
def piece_weights(scores, m, unit, is_large):
    """Pieces of weights relative to the maximum m [ROWS]; rows that are `is_large`, if not None,
    have those of `exp2_weights_exact`."""
    offset = gl.where(m == -float("inf"), 0.0, -m * unit)
    weights = ()
    if is_large is not None:
        origin = gl.where(is_large, m, 0.0)
        offset = gl.where(is_large, 0.0, offset)
        for p in gl.static_range(len(scores)):
            weights = weights + (weights_of(scores[p], origin, offset, unit),)  # noqa: RUF005
    else:
        for p in gl.static_range(len(scores)):
            weights = weights + (plain_weights(scores[p], offset, unit),)  # noqa: RUF005
    return weights


@gluon.jit
def close(acc, sums, m, unit, sink, is_large, nan_if_bad, dtype: gl.constexpr):
    """Strips of out, lse, m and l, as `program.normalize` has them."""
    layout: gl.constexpr = m.type.layout
    error = max_rounding_error(m, unit)
    if is_large is not None:
        error = gl.where(is_large, 0.0, error)
    factor = gl.exp2(-error)
    top = gl.exp2(error)
    l = gl.convert_layout(gl.sum(sums, 1), layout, assert_trivial=True)
    r = gl.where(l == 0.0, l, l + (top.to(dtype).to(gl.float32) - top))
    return close_rows(acc, m, l, r, factor, unit, sink, nan_if_bad, BRIEF=True)


@gluon.jit
def large(m, unit):
    """Which maxima [ROWS] are too large for `exp2_weights`."""
    return (gl.abs(m) * unit >= LARGE_MAX) & (m > -float("inf"))


@gluon.jit
def store_tile(chunk, n, results, out, lse, m, l, memory, o_desc, o_start, DV: gl.constexpr):
    """Send the results of tile n away, out by shared memory."""
    q_begin, q_end = chunk.queries(n)
    for c in gl.static_range(n_strips(DV)):
        strip_of_tile(memory, DV, c).store(out[c].to(memory.dtype))
    fence_async_shared()
    for c in gl.static_range(panels(DV)):
        at = coordinates(chunk.batch, o_start, q_end, chunk.head, q_begin, c * PANEL, True)
        tma_store(o_desc, at, box_of(memory, o_desc, c))
    row = gl.arange(0, ROWS, m.type.layout)
    q_idx = q_begin + (row & (chunk.POSITIONS - 1))
    head = chunk.head + (row >> log2(chunk.POSITIONS))
    at = chunk.batch * results.stride_b + head * results.stride_h
    at += (chunk.q_start + q_idx) * results.stride_s
    results.store_statistics(at, lse, m, l, q_idx < q_end)


@gluon.jit
def failures(chunk, n, out, is_large, like):
    """1 for threads [ROWS, 4] with a part of a row that has to be computed again, else 0; in the
    layout of `like`."""
    layout: gl.constexpr = like.type.layout
    total = gl.full([ROWS, 4], 0.0, gl.float32, layout)
    for c in gl.static_range(len(out)):
        total += gl.convert_layout(thread_sums(out[c]), layout, assert_trivial=True)
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    q_begin, q_end = chunk.queries(n)
    q_idx = q_begin + (gl.arange(0, ROWS, rows) & (chunk.POSITIONS - 1))
    exists = (q_idx < q_end) & (chunk.len_kv != BAD)
    is_large = gl.convert_layout(is_large, rows, assert_trivial=True)
    # A sum of numbers that are finite may not be; then the row is computed again in vain.
    fails = gl.expand_dims(is_large, 1) | ((gl.abs(total) < float("inf")) == 0)
    return gl.where(fails & gl.expand_dims(exists, 1), 1, 0)


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def seen_keys(chunk, n, KEYS: gl.constexpr, BEFORE: gl.constexpr, FROM: gl.constexpr):
    """Pieces [ROWS, KEYS], 1 where a row of tile n sees a key, else 0."""
    scores = ()
    for p in gl.static_range(n_pieces(KEYS)):
        scores = scores + (zeros(piece_width(KEYS, p)),)  # noqa: RUF005
    scores = mask_scores(chunk, n, scores, KEYS, BEFORE, FROM)
    seen = ()
    for p in gl.static_range(n_pieces(KEYS)):
        seen = seen + (gl.exp2(scores[p]),)  # noqa: RUF005
    return seen
