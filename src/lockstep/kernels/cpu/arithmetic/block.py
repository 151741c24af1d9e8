"""Where the wide path has what it works on, and how it gets there.

A *block* is up to ROWS query rows of one KV head; a *span* is SPAN keys, aligned to absolute
key positions. Keys and values of a span are laid out once per block and serve all its tiles of
LANES rows: queries as columns, a head dim of all rows of a tile after the other; keys and values as
panels, MR keys, or MR head dims, side by side. Matrix units take other layouts (`pairs`).
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.cpu.arithmetic.memory import (
    copy_panels,
    gather_columns,
    gather_panels,
    plan_ahead,
)
from lockstep.kernels.cpu.arithmetic.pairs import clean, copy_rows, load_pairs, turn_rows
from lockstep.kernels.cpu.arithmetic.tiles import PIECE, ROW, scale_vectors
from lockstep.kernels.cpu.call.record import (
    diagonal_of,
    fill_kv_rows,
    has_tiles,
    key_range,
    next_row,
    of_sequence,
    row_address,
    slope_of,
    split_row,
    visible,
)
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.matrix import DEPTH, TILE
from lockstep.kernels.cpu.compiler.vectors import LANES, MR, f32
from lockstep.kernels.window import NO_LIMIT

# The unit of the KV reduction, shared by prefill, chunks and decode: bits depend on it. Its pieces,
# PIECE keys each, are added one after the other.
SPAN = 256
# Rows of a block: a multiple of every machine's LANES. Bits do not depend on it.
ROWS = 384
TILES = ROWS // LANES
# From one panel of columns to the next, in rows: a cache line more than a span, or all panels of a
# row would be stored to lines that share their place in a cache.
PANEL = SPAN + 64 // (4 * MR)
# From one head dim to the next of values that are turned, in bytes, with a cache line more too.
TURNED = 2 * SPAN + 64


class Block(NamedTuple):
    """Where the parts of a block lie in scratch, by address."""

    zero_row: int  # [zeros_for(D, Dv)]
    q_rows: int  # [ROWS] addresses
    kv_rows: int  # [SPAN] addresses
    q_idx: int  # [ROWS] int64; the last row repeats to fill its tile
    q_head: int  # [ROWS] int64
    lo: int  # [ROWS] int32: keys [lo, hi) are visible
    hi: int  # [ROWS] int32
    diagonal: int  # [ROWS] int32 and
    slope: int  # [ROWS] fp32, with ALiBi only
    ranges: int  # [ROWS, 2] int64: keys [lo, hi) of a row
    bounds: int  # [TILES, 4] int64: see note_bounds
    next_rows: int  # [2 · ROWS] addresses of rows that are needed next, and
    ahead: int  # [8] how far they are on their way
    q_t: int  # [TILES, D, LANES]; for matrix units pairs [TILES, D / 2, LANES]
    k_panels: int  # [SPAN / MR, D, MR]; rows [SPAN, D]
    v_panels: int  # [Dv / MR, PANEL, MR]; turned values [Dv, SPAN]
    s: int  # [SPAN, LANES] scores, then weights; pairs [SPAN / 2, LANES]
    part: int  # [Dv, LANES] acc of one span
    part_m: int  # [LANES] its m and l
    part_l: int  # [LANES]
    end: int


@compiled
def padded(n, step):
    return (n + step - 1) // step * step


@compiled
def zeros_for(D, Dv):
    """How long a row of zeros is that stands for a key or a value, in whole cache lines."""
    return padded(max(D, Dv), 16)


@compiled
def carve_block(base, D, Dv):
    """Lay a Block out from address ``base``, each part on a cache line."""
    q_rows = base + 4 * zeros_for(D, Dv)
    kv_rows = q_rows + 8 * ROWS
    q_idx = kv_rows + 8 * SPAN
    q_head = q_idx + 8 * ROWS
    lo = q_head + 8 * ROWS
    hi = lo + 4 * ROWS
    diagonal = hi + 4 * ROWS
    slope = diagonal + 4 * ROWS
    ranges = slope + 4 * ROWS
    bounds = ranges + 16 * ROWS
    next_rows = bounds + 32 * padded(TILES, 2)
    ahead = next_rows + 16 * ROWS
    q_t = ahead + 64
    # Where numbers of 16 bits are padded to more than twice as many, they need more room.
    k_panels = q_t + ROWS * max(4 * D, 2 * padded(D, DEPTH))
    v_panels = k_panels + SPAN * max(4 * D, 2 * padded(D, DEPTH))
    s = v_panels + max(4 * PANEL * padded(Dv, MR), TURNED * padded(Dv, TILE))
    part = s + SPAN * ROW
    part_m = part + padded(Dv, TILE) * ROW
    part_l = part_m + padded(ROW, 64)
    end = part_l + padded(ROW, 64)
    return Block(
        base,
        q_rows,
        kv_rows,
        q_idx,
        q_head,
        lo,
        hi,
        diagonal,
        slope,
        ranges,
        bounds,
        next_rows,
        ahead,
        q_t,
        k_panels,
        v_panels,
        s,
        part,
        part_m,
        part_l,
        end,
    )


@compiled
def load_queries(call, block, b, h, row0, n_rows):
    """Find the rows of a block and lay their queries out; the last row fills up its tile."""
    n_tiles = padded(n_rows, LANES) // LANES
    g, q_idx = split_row(call, b, row0)
    for i in range(n_tiles * LANES):
        if 0 < i < n_rows:
            g, q_idx = next_row(call, b, g, q_idx)
        head = h * call.G + g
        lo, hi = visible(call, b, q_idx)
        scalar.store_word(q_idx, block.q_idx + 8 * i)
        scalar.store_word(head, block.q_head + 8 * i)
        row = row_address(call.q, of_sequence(call.q_first, b), b, head, q_idx)
        scalar.store_word(row, block.q_rows + 8 * i)
        scalar.store_int(lo, block.lo + 4 * i)
        scalar.store_int(hi, block.hi + 4 * i)
        if call.alibi_slopes != 0:
            scalar.store_int(diagonal_of(call, b, q_idx), block.diagonal + 4 * i)
            scalar.store(slope_of(call, b, head), block.slope + 4 * i)
        lo, hi = key_range(call, b, q_idx)
        scalar.store_word(lo, block.ranges + 16 * i)
        scalar.store_word(hi, block.ranges + 16 * i + 8)
    for t in range(n_tiles):
        note_bounds(block, t)
        table = block.q_rows + 8 * t * LANES
        if has_tiles(call):
            load_pairs(table, call.D, queries_of(call, block, t), steps(call.D), f32(call.q_factor))
        else:
            gather_columns(call.kind, table, LANES, call.D, queries_of(call, block, t), ROW)
    if not has_tiles(call):
        scale_vectors(block.q_t, n_tiles * LANES * call.D, f32(call.q_factor))
    return n_tiles


@compiled
def note_bounds(block, t):
    """Write down of tile t: the first and last key that a row visits, those of rows without any
    aside; and the last of the first keys, and the first of the last ones."""
    lo_min, hi_max, lo_max, hi_min = NO_LIMIT, 0, 0, NO_LIMIT
    for i in range(t * LANES, (t + 1) * LANES):
        lo = scalar.load_word(block.ranges + 16 * i)
        hi = scalar.load_word(block.ranges + 16 * i + 8)
        lo_max = max(lo_max, lo)
        hi_min = min(hi_min, hi)
        if lo < hi:
            lo_min = min(lo_min, lo)
            hi_max = max(hi_max, hi)
    to = block.bounds + 32 * t
    scalar.store_word(lo_min, to)
    scalar.store_word(hi_max, to + 8)
    scalar.store_word(lo_max, to + 16)
    scalar.store_word(hi_min, to + 24)


@compiled
def queries_of(call, block, t):
    """Where the queries of a tile lie."""
    return block.q_t + t * ROW * (TILE * steps(call.D) if has_tiles(call) else call.D)


@compiled
def steps(n):
    """How many numbers matrix units multiply at once, so many times."""
    return padded(n, DEPTH) // DEPTH


@compiled
def load_span(call, block, b, h, first, n):
    """Lay keys first … first + n out as panels, zeros up to a whole panel. True if v is finite."""
    whole, rows = padded(n, key_step(call)), block.kv_rows
    plan_ahead(call.kind, block.ahead, 0, 0, 0, 1)
    fill_kv_rows(call, call.k, b, h, first, n, whole, block.zero_row, rows)
    if has_tiles(call):
        copy_rows(rows, whole, call.D, block.k_panels, steps(call.D))
    else:
        gather_panels(call.kind, rows, whole, call.D, block.k_panels)
    fill_kv_rows(call, call.v, b, h, first, n, whole, block.zero_row, rows)
    if has_tiles(call):
        finite = turn_rows(rows, whole, call.Dv, block.v_panels, TURNED)
        if not finite:
            clean(block.v_panels, padded(call.Dv, TILE) * (TURNED // 2))
        return finite
    return copy_panels(call.kind, rows, whole, call.Dv, block.v_panels, PANEL)


@compiled
def key_step(call):
    """Keys come in so many, zeros included."""
    return DEPTH if has_tiles(call) else MR


@compiled
def plan_next_span(call, block, b, h, first, n, n_tiles):
    """Have keys first … first + n and their values brought near while n_tiles tiles are at work."""
    table, n = block.next_rows, max(n, 0)
    fill_kv_rows(call, call.k, b, h, first, n, n, block.zero_row, table)
    fill_kv_rows(call, call.v, b, h, first, n, n, block.zero_row, table + 8 * n)
    times = n_tiles
    if not has_tiles(call):
        times *= (SPAN // PIECE) * (padded(call.Dv, MR) // MR)
    plan_ahead(call.kind, block.ahead, table, 2 * n, max(call.D, call.Dv), times)


@compiled
def rows_range(call, b, first, n_rows):
    """First and last key that rows first … first + n_rows of a KV head loop over."""
    lo, hi = NO_LIMIT, 0
    row, length = first, of_sequence(call.q_len, b)
    while row < first + n_rows:
        # Both ends of what a query loops over grow with its position in the head.
        q_idx = split_row(call, b, row)[1]
        n = min(first + n_rows - row, length - q_idx)
        head_lo, head_hi = key_range(call, b, q_idx)[0], key_range(call, b, q_idx + n - 1)[1]
        if head_lo < head_hi:
            lo, hi = min(lo, head_lo), max(hi, head_hi)
        row += n
    return lo, hi
