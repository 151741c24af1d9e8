"""Many query rows against one span of keys: rows ride in SIMD lanes.

A *block* is up to ROWS query rows of one KV head; a *span* is SPAN keys, aligned to absolute
key positions. Keys and values of a span are laid out once per block and serve all its tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.kernels.cpu.arithmetic.memory import (
    copy_panels,
    gather_columns,
    gather_panels,
    plan_ahead,
    prefetch_some,
)
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.arithmetic.pairs import (
    add_special,
    clean,
    copy_rows,
    exp_and_mark_pairs,
    exp_pairs,
    load_pairs,
    scale_and_max_rows,
    scale_rows,
    turn_rows,
)
from lockstep.kernels.cpu.arithmetic.tiles import (
    BUNCH,
    PIECE,
    ROW,
    accumulate_tile,
    accumulate_tile_masked,
    add_scaled,
    alibi_rows,
    exp_and_mark_rows,
    exp_rows,
    mask_rows,
    max_rows,
    scale_vectors,
    score_tile,
    score_tiles_max,
    softcap_rows,
)
from lockstep.kernels.cpu.call.record import (
    bias_address,
    diagonal_of,
    fill_kv_rows,
    has_tiles,
    is_constant_time,
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
from lockstep.kernels.cpu.compiler.matrix import DEPTH, TILE, multiply
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
# Head dims that one chain of a score takes before it is added to the others: bits depend on it.
CHAIN = 128
MINUS_INF = f32(-np.inf)


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
def biased(score, bias):
    """A bias of −inf hides the key, whatever its score is: NaN too."""
    return scalar.pick(bias, MINUS_INF, MINUS_INF, score + bias)


@compiled
def add_bias(call, block, b, t, first, n, s):
    """s [n, LANES] += bias, for the keys first … first + n that exist."""
    n = min(n, of_sequence(call.kv_len, b) - first)
    for lane in range(LANES):
        i = t * LANES + lane
        head = scalar.load_word(block.q_head + 8 * i)
        q_idx = scalar.load_word(block.q_idx + 8 * i)
        row = bias_address(call, b, head, q_idx, first)
        for kv in range(n):
            bias = scalar.load_element(call.bias_kind, row + kv * call.bias_col)
            at = s + kv * ROW + 4 * lane
            scalar.store(biased(scalar.load(at), bias), at)


@compiled
def multiply_tile(panel, columns, s, D, c, spare):
    """s [MR, LANES] = c · panel [D, MR]ᵀ · columns [D, LANES], by chains of CHAIN head dims."""
    score_tile(panel, columns, s, min(D, CHAIN), c if D <= CHAIN else f32(1.0))
    for d in range(CHAIN, D, CHAIN):
        score_tile(panel + 4 * MR * d, columns + d * ROW, spare, min(CHAIN, D - d), f32(1.0))
        add_scaled(s, spare, MR * LANES, c if d + CHAIN >= D else f32(1.0))


@compiled
def tile_scores(call, block, b, t, first, begin, end, bounds, scores, slopes):
    """scores [SPAN, LANES] of keys begin … end of the span for tile t, masked, in natural units.

    The max of the fully visible part goes into part_m on the way; returns nothing else.
    """
    lo_max, hi_min = bounds
    capped = call.capped != 0
    has_bias, has_slopes = call.bias.address != 0, call.alibi_slopes != 0
    is_plain = not capped and not has_bias and not has_slopes
    factor = f32(call.score_factor)
    q_t = queries_of(call, block, t)
    lo = block.lo + 4 * t * LANES
    hi = block.hi + 4 * t * LANES
    next_kv = begin
    while next_kv < end:
        kv = next_kv
        k_panel = block.k_panels + 4 * kv * call.D
        s, stop = scores + kv * ROW, end
        if has_tiles(call):
            # While they are near, products of a piece become scores.
            stop = min(kv // PIECE * PIECE + PIECE, end)
            if kv == begin or kv % PIECE == 0:
                pitch = 2 * padded(call.D, DEPTH)
                rows = block.k_panels + kv * pitch
                multiply(rows, pitch, q_t, s, (stop - kv) // TILE, steps(call.D))
        whole = first + kv >= lo_max and first + kv + MR <= hi_min
        if whole and is_plain and (has_tiles(call) or call.D <= CHAIN):
            n = (min(stop, hi_min - first) - kv) // MR
            if has_tiles(call):
                scale_and_max_rows(s, n * MR, factor, block.part_m)
            else:
                score_tiles_max(k_panel, q_t, s, call.D, factor, block.part_m, n)
            next_kv += n * MR
            continue
        next_kv += MR
        if has_tiles(call):
            scale_rows(s, MR, factor)
        else:
            multiply_tile(k_panel, q_t, s, call.D, factor, block.part)
        if capped:
            slope = slopes + kv * ROW if slopes != 0 else 0
            softcap_rows(s, MR, f32(call.softcap), slope)
        if has_bias:
            add_bias(call, block, b, t, first + kv, MR, s)
        if has_slopes:
            row = 4 * t * LANES
            alibi_rows(s, first + kv, MR, block.diagonal + row, block.slope + row)
        if not whole:
            mask_rows(s, first + kv, MR, lo, hi)
        max_rows(s, MR, block.part_m)


@compiled
def tile_bounds(call, block, t, first, n):
    """The keys that tile t visits in the span (offsets, from a multiple of BUNCH on, whole panels,
    or whole steps of matrix units), and (lo_max, hi_min): all rows see those between these two."""
    at = block.bounds + 32 * t
    lo_min = min(scalar.load_word(at), first + n)
    hi_max = max(scalar.load_word(at + 8), first)
    lo_max = scalar.load_word(at + 16)
    hi_min = min(scalar.load_word(at + 24), first + n)
    down = DEPTH if has_tiles(call) else BUNCH
    begin = max(lo_min - first, 0) // down * down
    end = padded(min(hi_max - first, n), key_step(call))
    if call.secret_lengths:
        return begin, end, (NO_LIMIT, 0)
    return begin, end, (lo_max, hi_min)


@compiled
def is_whole(call, first, n, bounds):
    """Whether all rows of a tile see the keys first … first + n; a bias may hide any."""
    lo_max, hi_min = bounds
    return call.bias.address == 0 and first >= lo_max and first + n <= hi_min


@compiled
def accumulate(panels, p, acc, D, kv, n, fresh, ahead):
    """acc [D, LANES] = or += panels [D / MR, kv … kv + n, MR]ᵀ · p [kv … kv + n, LANES]."""
    for d in range(0, D, MR):
        prefetch_some(ahead)
        panel = panels + 4 * (d * PANEL + kv * MR)
        accumulate_tile(panel, p + kv * ROW, acc + d * ROW, n, fresh)


@compiled
def accumulate_masked(panels, p, marks, acc, D, kv, n, fresh):
    """The same without the terms that marks [kv … kv + n, LANES] hide."""
    for d in range(0, D, MR):
        panel = panels + 4 * (d * PANEL + kv * MR)
        accumulate_tile_masked(panel, p + kv * ROW, acc + d * ROW, n, fresh, marks + kv * ROW)


@compiled
def piece_of(at, begin, end):
    """The keys of begin … end within the piece that begins at ``at``: the first, and how many."""
    kv = max(at, begin)
    return kv, min(at + PIECE, end) - kv


@compiled
def _weigh_pairs(call, block, begin, end, finite):
    """Scores begin … end to weights, and the values times them to block.part, by matrix units."""
    for at in range(begin // PIECE * PIECE, end, PIECE):
        kv, n = piece_of(at, begin, end)
        s, to = block.s + kv * ROW, block.s + kv // 2 * ROW
        if finite:
            exp_pairs(s, n, block.part_m, block.part_l, to)
        else:
            exp_and_mark_pairs(s, n, block.part_m, block.part_l, to)
    prefetch_some(block.ahead)
    pairs = block.s + begin // 2 * ROW
    blocks, n = padded(call.Dv, TILE) // TILE, (end - begin) // DEPTH
    multiply(block.v_panels + 2 * begin, TURNED, pairs, block.part, blocks, n)
    if not finite:
        add_special(block.kv_rows + 8 * begin, end - begin, call.Dv, pairs, block.part)


@compiled
def attend_span(call, block, b, t, first, n, finite):
    """Tile t against the loaded span: its part, part_m and part_l. False if it sees nothing.

    Where values are not finite, keys that a row does not see are left out by selection: their
    weights are 0, which does not hide a NaN. A constant-time build does so wherever there may be
    some.
    """
    begin, end, bounds = tile_bounds(call, block, t, first, n)
    if begin >= end:
        return False
    fill(block.part_m, LANES, MINUS_INF)
    fill(block.part_l, LANES, f32(0.0))
    tile_scores(call, block, b, t, first, begin, end, bounds, block.s, 0)
    if has_tiles(call):
        _weigh_pairs(call, block, begin, end, finite)
        return True
    s, Dv = block.s, padded(call.Dv, MR)
    for at in range(begin // PIECE * PIECE, end, PIECE):
        kv, n_keys = piece_of(at, begin, end)
        fresh = 1 if kv == begin else 0
        whole = is_whole(call, first + kv, n_keys, bounds)
        if whole if is_constant_time(call) else finite:
            exp_rows(s + kv * ROW, n_keys, block.part_m, block.part_l)
            accumulate(block.v_panels, s, block.part, Dv, kv, n_keys, fresh, block.ahead)
        else:
            exp_and_mark_rows(s + kv * ROW, n_keys, block.part_m, block.part_l)
            accumulate_masked(block.v_panels, s, s, block.part, Dv, kv, n_keys, fresh)
    return True
