"""Many query rows against one span of keys: rows ride in SIMD lanes.

Tiles of LANES rows take the keys of a span, one tile after the other, from a `block`.
"""

from __future__ import annotations

from lockstep.kernels.cpu.arithmetic.block import PANEL, TURNED, key_step, padded, queries_of, steps
from lockstep.kernels.cpu.arithmetic.memory import prefetch_some
from lockstep.kernels.cpu.arithmetic.merge import MINUS_INF, fill
from lockstep.kernels.cpu.arithmetic.pairs import (
    add_special,
    exp_and_mark_pairs,
    exp_pairs,
    scale_and_max_rows,
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
from lockstep.kernels.cpu.call.record import bias_address, has_tiles, is_constant_time, of_sequence
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.matrix import DEPTH, TILE, multiply
from lockstep.kernels.cpu.compiler.vectors import LANES, MR, f32
from lockstep.kernels.window import NO_LIMIT

# Head dims that one chain of a score takes before it is added to the others: bits depend on it.
CHAIN = 128


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
            scale_vectors(s, MR * LANES, factor)
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
