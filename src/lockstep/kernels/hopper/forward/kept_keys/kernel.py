"""The forward of heads whose keys stay in shared memory: wide heads with one block of keys, and
others with little more.

A program is one warpgroup, and an SM has room for two or three of them: while one computes
exponentials or stores its results, another has the tensor cores. It works on tiles of 64 rows one
after the other: queries of one head, or, if several share their keys, of some of these. The keys
and values of a head stay for all of its tiles. Those of the next one come while the last tile is at
work: keys when the scores are there, values when they are multiplied. Keys behind the first block
are the *rest*.

Rows that failed (`softmax.py`, `second_pass.py`) are computed again when all others are done. A row
has the bits that `consumer.py` would give it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    empty_sums,
    n_pieces,
    row_sums,
)
from lockstep.kernels.hopper.common.ring import TileRing
from lockstep.kernels.hopper.common.softmax import LARGE_MAX, OVERFLOW
from lockstep.kernels.hopper.forward.kept_keys.head import Head, Keys
from lockstep.kernels.hopper.forward.kept_keys.rows import (
    add_block,
    add_in_strips,
    as_left,
    first_again,
    first_beside,
    first_weights,
    later_again,
    later_weights,
)
from lockstep.kernels.hopper.forward.one_block.shares import Shares
from lockstep.kernels.hopper.forward.one_block.tiles import HeadTiles
from lockstep.kernels.hopper.forward.program import Results
from lockstep.kernels.launch import unspecialized


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def load_next(head, descs, i, n, after, goes_on, changes):
    """Send the next queries on their way, and keys if it `changes` them: all scores of this tile
    are there."""
    await_warps()
    head.q.load(i + 1, descs[0], head.q_at(after), goes_on)
    # Each load takes a barrier of all warps, also one that is not to be.
    if changes:
        head.k.load(n + 1, descs[1], head.tiles, after)


@gluon.jit
def attend(head, descs, i, n, end, after, goes_on, changes):
    """The i-th tile against the n-th keys, of which rows see those before `end` [ROWS]: acc, m
    [ROWS], l [ROWS, 4] and what is beside it. The next queries, and keys and values if it `changes`
    them, are under way on return."""
    q, k, v = head.q, head.k, head.v
    COLUMNS: gl.constexpr = v.first.COLUMNS
    unit = head.unit()
    q.wait(i)
    k.wait(n)
    s = k.issue_scores(q, 0)
    if k.REST > 0:
        s_rest = k.issue_scores(q, 1)
        s = warpgroup_mma_wait(n_pieces(q.COLUMNS), deps=(s,))
    else:
        s = warpgroup_mma_wait(0, deps=(s,))
        load_next(head, descs, i, n, after, goes_on, changes)
    weights, m, l = first_weights(head.mask(s, end, 0), unit)
    beside = first_beside(m, l, end, unit, head.BLOCK)
    v.wait(n)
    p = as_left(weights, COLUMNS, descs[0].dtype)
    acc = v.issue_products(p, 0, empty_sums(COLUMNS))
    if k.REST > 0:
        s_rest = warpgroup_mma_wait(n_pieces(COLUMNS), deps=(s_rest,))
        load_next(head, descs, i, n, after, goes_on, changes)
        s_rest = head.mask(s_rest, end, 1)
        weights, m, part, alpha = later_weights(s_rest, m, l, beside, unit, head.FIXED_MAX)
        acc = await_all(acc)
        acc, l, beside = add_block(weights, acc, part, l, beside, alpha, head.FIXED_MAX)
        p = as_left(weights, COLUMNS, descs[0].dtype)
        acc = v.issue_products(p, 1, acc)
    acc = await_all(acc)
    if changes:
        await_warps()
        v.load(n + 1, descs[2], head.tiles, after)
    return acc, m, l, beside


@gluon.jit
def first_pass(head, descs):
    """Compute all tiles; bit i % 32 of the result is set if rows of the i-th of them failed, and
    how many keys there were. The first queries, keys and values are under way."""
    dtype: gl.constexpr = descs[0].dtype
    tiles = head.tiles
    tile = tiles.first
    q_idx, _heads = head.rows_of(tile)
    row_layout: gl.constexpr = q_idx.type.layout
    wrong = q_idx * 0
    n = tiles.count * 0
    for i in range(tiles.count):
        after = tiles.behind(tile)
        goes_on = i + 1 < tiles.count
        changes = goes_on & after.is_first_of_keys()
        q_idx, heads = head.rows_of(tile)
        end = tiles.key_end(q_idx, head.right, head.HAS_RIGHT)
        acc, m, l, beside = attend(head, descs, i, n, end, after, goes_on, changes)
        fails = (gl.abs(m) * head.unit() >= LARGE_MAX) & (m > -float("inf"))
        out, lse, m, l = head.close(heads, acc, m, l, beside, None, dtype)
        fails = fails | ((l < OVERFLOW) == 0)
        if head.HAS_RIGHT:
            is_nonfinite = (gl.abs(row_sums(out, row_layout)) < float("inf")) == 0
            lse = gl.where(is_nonfinite & (fails == 0), float("inf"), lse)
            wrong |= gl.where(is_nonfinite & (q_idx < tiles.Sq), 1, 0) << (i % 32)
        lse = gl.where(fails, float("nan"), lse)
        wrong |= gl.where(fails & (q_idx < tiles.Sq), 1, 0) << (i % 32)
        head.store(tile, q_idx, heads, out, lse, m, l, q_idx < tiles.Sq, dtype)
        n += changes.to(gl.int32)
        tile = after
    return gl.reduce(wrong, 0, _either), n + 1


@gluon.jit
def add_values(head, acc, weights, end, inner_end, b: gl.constexpr, dtype: gl.constexpr):
    """acc and weights times the values of a block, which may not be finite from block `inner_end`
    on."""
    if head.HAS_RIGHT:
        return add_in_strips(acc, weights, end - head.BLOCK * b, b >= inner_end, head.v, b)
    else:  # noqa: RET505, Gluon would go on and return both
        p = as_left(weights, head.v.first.COLUMNS, dtype)
        return await_all(head.v.issue_products(p, b, acc))


@gluon.jit
def attend_again(head, end, inner_end, is_exact, dtype: gl.constexpr):
    """The tile in shared memory, as `attend_second_pass` has it: acc, m, l and what is beside
    it."""
    q, k = head.q, head.k
    unit = head.unit()
    s = warpgroup_mma_wait(0, deps=(k.issue_scores(q, 0),))
    weights, m, l, beside = first_again(
        head.mask(s, end, 0), end, is_exact, unit, head.BLOCK, head.FIXED_MAX
    )
    acc = empty_sums(head.v.first.COLUMNS)
    acc = add_values(head, acc, weights, end, inner_end, 0, dtype)
    if k.REST > 0:
        s = warpgroup_mma_wait(0, deps=(k.issue_scores(q, 1),))
        weights, acc, m, l, beside = later_again(
            head.mask(s, end, 1), acc, m, l, beside, is_exact, unit, head.FIXED_MAX
        )
        acc = add_values(head, acc, weights, end, inner_end, 1, dtype)
    return acc, m, l, beside


@gluon.jit
def second_pass(head, descs, wrong, n):
    """Rows that failed in the first pass, which left a mark in their lse, once more: see
    `second_pass.py`. Keys and values, of which n were loaded before, are loaded again for each
    tile, which may write to them."""
    q_desc, k_descs, v_descs = descs
    dtype: gl.constexpr = q_desc.dtype
    tiles = head.tiles
    tile = tiles.first
    done = tiles.count
    for i in range(tiles.count):
        if (wrong >> (i % 32)) & 1:
            fence_async_shared()
            await_warps()
            head.q.load(done, q_desc, head.q_at(tile))
            head.k.load(n, k_descs, tiles, tile)
            head.v.load(n, v_descs, tiles, tile)
            q_idx, heads = head.rows_of(tile)
            row = head.row(tile, q_idx, heads)
            mark = gl.load(head.results.lse_ptr + row, mask=q_idx < tiles.Sq, other=0.0)
            is_exact = mark != mark
            chosen = is_exact | (mark == float("inf"))
            head.q.wait(done)
            head.k.wait(n)
            head.v.wait(n)
            end = tiles.key_end(q_idx, head.right, head.HAS_RIGHT)
            inner_end = head.inner_end(tile)
            acc, m, l, beside = attend_again(head, end, inner_end, is_exact, dtype)
            done += 1
            n += 1
            out, lse, m, l = head.close(heads, acc, m, l, beside, is_exact, dtype)
            head.store(tile, q_idx, heads, out, lse, m, l, chosen, dtype)
        tile = tiles.behind(tile)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def kept_keys_kernel(
    q_desc,  # tiles [HEADS, ROWS / HEADS, D] of q [B, Hq, Sq, D], or chunks of their columns
    k_desc,  # the first block of k [B, Hkv, Skv, D], alike
    k_rest_desc,  # REST keys behind it
    v_desc,  # and of v [B, Hkv, Skv, Dv]
    v_rest_desc,
    out_ptr,  # contiguous [B, Hq, Sq, Dv]
    lse_ptr,  # contiguous [B, Hq, Sq] fp32
    statistics_ptr,  # [*lse, 2]
    sinks_ptr,  # [Hq]
    scale,
    row_stride_b,  # of lse, and of out in rows
    row_stride_h,
    row_stride_s,
    shares: Shares,  # of programs in all tiles
    n_q_tiles,
    Hq,
    heads_per_kv,
    Sq,
    Skv,
    right,
    HAS_RIGHT: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HEADS: gl.constexpr,  # of a tile
    D_COLUMNS: gl.constexpr,  # that are multiplied
    DV_COLUMNS: gl.constexpr,
    DV: gl.constexpr,
    REST: gl.constexpr,  # keys behind the first block, 0 for none
    FIXED_MAX: gl.constexpr,
):
    BLOCK: gl.constexpr = k_desc.block_shape[3]
    tiles = HeadTiles.of_all(shares, n_q_tiles, Hq // HEADS, heads_per_kv // HEADS, Sq, Skv)
    descs = (q_desc, (k_desc, k_rest_desc), (v_desc, v_rest_desc))
    q = TileRing.create_alone(q_desc, D_COLUMNS)
    k = Keys.create(descs[1], D_COLUMNS, REST)
    v = Keys.create(descs[2], DV_COLUMNS, REST)
    results = Results(
        (out_ptr, lse_ptr, statistics_ptr, sinks_ptr), row_stride_b, row_stride_h, row_stride_s, Sq
    )
    head = Head(
        results, tiles, scale, right, q, k, v, SCORES == "scaled", HAS_RIGHT, HAS_SINKS, HEADS, DV,
        BLOCK, FIXED_MAX,
    )  # fmt: skip
    # Every program has a tile.
    q.load(0, q_desc, head.q_at(tiles.first))
    k.load(0, descs[1], tiles, tiles.first)
    v.load(0, descs[2], tiles, tiles.first)
    wrong, n = first_pass(head, descs)
    if wrong != 0:
        second_pass(head, descs, wrong, n)
    # Until then nothing else may have their place in shared memory.
    mbarrier.invalidate(q.ring.full_bar.index(0))
    k.invalidate()
    v.invalidate()
