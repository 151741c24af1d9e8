"""Values that are not finite, in tiles of which some row does not see every key.

A hidden key weighs 0, and 0 times what is not finite is NaN. So such values are left out of the
product, and added to the rows that see them.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
)

# Rows of a tile that are cleaned at once: few enough for registers.
CLEANED = gl.constexpr(16)


@gluon.jit
def has_nonfinite(tile):
    """Whether any value of a tile [·, D] is not finite: its exponent is all ones."""
    D: gl.constexpr = tile.shape[1]
    words_shape: gl.constexpr = [tile.shape[0], D // 2]
    words = reinterpret(tile, gl.int32, words_shape, gl.NVMMASharedLayout(128, 32, 2))
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [4, 1], [1, 0])
    # Two values in a word: adding 1 to an exponent of ones sets the bit above it.
    EXPONENTS: gl.constexpr = 0x7F807F80 if tile.dtype == gl.bfloat16 else 0x7C007C00
    ONES: gl.constexpr = 0x00800080 if tile.dtype == gl.bfloat16 else 0x04000400
    found = gl.full([CLEANED, D // 2], 0, gl.int32, layout)
    for part in gl.static_range(tile.shape[0] // CLEANED):
        found = found | ((words.slice(part * CLEANED, CLEANED).load(layout) & EXPONENTS) + ONES)
    return gl.max(gl.max((found >> 15) & 0x10001, 1), 0)


@gluon.jit
def clean_values(tile, begin, end):
    """Makes a tile of values harmless to rows that do not see all of its keys.

    Rows of the tile that no row sees become 0, and so does what is not finite; returns whether
    there was any. Some row sees those from `begin` to `end`."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    found = gl.full([CLEANED, D], 0, gl.int32, layout)
    for part in gl.static_range(tile.shape[0] // CLEANED):
        some = tile.slice(part * CLEANED, CLEANED)
        row = part * CLEANED + gl.arange(0, CLEANED, gl.SliceLayout(1, layout))
        row = gl.expand_dims(row, 1)
        values = some.load(layout)
        is_finite = values.to(gl.float32) * 0.0 == 0.0
        is_there = (row >= begin) & (row < end)
        found = found | gl.where(is_there & (is_finite == 0), 1, 0)
        some.store(gl.where(is_there & is_finite, values, gl.zeros_like(values)))
    fence_async_shared()
    await_warps()
    return gl.max(gl.max(found, 1), 0)


@gluon.jit
def clean_columns(columns, begin, end):
    """`clean_values` of some columns, if there is anything to do."""
    found = begin * 0
    if has_nonfinite(columns) != 0:
        found = clean_values(columns, begin, end)
    return found


@gluon.jit
def clean_tile(v, i, begin, end):
    """`clean_columns` of the i-th tile of values."""
    found = clean_columns(v.tile(i), begin, end)
    if v.tile(i).shape[1] < v.D:
        found = found | clean_columns(v.rest(i), begin, end)
    return found


@gluon.jit
def add_nonfinite(
    rows, sizes, cache, run, tile, end, bounds, acc, column: gl.constexpr = 0
):  # fmt: skip
    """Adds to acc the values of the tiles from `tile` to `end` that are not finite, from a column
    on, each to the rows that see it. Any positive weight would do: the sum is infinite or NaN
    either way."""
    layout: gl.constexpr = acc.type.layout
    begin_key, end_key = bounds
    d = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    last = gl.minimum(end * sizes.BLOCK_KV, gl.maximum(run.kv_len, 0))
    for key in range(tile * sizes.BLOCK_KV, last):
        page, row = cache.place_of(run.b, key, last)
        at = page.to(gl.int64) * cache.stride_vp + row.to(gl.int64) * cache.stride_vs
        at += run.head.to(gl.int64) * cache.stride_vh
        values = gl.load(
            cache.v_ptr + at + d, mask=(d < rows.HEAD_DIM_V) & (page < cache.n_pages), other=0.0
        )
        values = values.to(gl.float32)
        values = gl.where(values * 0.0 == 0.0, 0.0, values)
        seen = key < end_key
        if sizes.HAS_LEFT:
            seen = seen & (key >= begin_key)
        seen = gl.convert_layout(seen, gl.SliceLayout(1, layout))
        acc += gl.where(gl.expand_dims(seen, 1), gl.expand_dims(values, 0), 0.0)
    return acc
