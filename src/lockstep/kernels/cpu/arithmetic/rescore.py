"""Recompute the weights of a tile and their gradients: what every backward pass starts from.

p = e^(s − m) / l,   dS = p (dP − delta),   dP = dO vᵀ,   delta = Σ_d dO·O − dlse

Scores come from the operations of the forward, so s − m is what the forward found, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.kernels.cpu.arithmetic.block import (
    PANEL,
    ROWS,
    SPAN,
    load_queries,
    note_bounds,
    padded,
)
from lockstep.kernels.cpu.arithmetic.memory import (
    copy_panels,
    copy_rows,
    gather_columns,
    gather_panels,
)
from lockstep.kernels.cpu.arithmetic.tiles import ROW, score_gradient_rows
from lockstep.kernels.cpu.arithmetic.wide import multiply_tile, tile_scores
from lockstep.kernels.cpu.call.arguments import record_at
from lockstep.kernels.cpu.call.record import STRIDED, fill_kv_rows, of_sequence, row_address
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.vectors import LANES, MR, WIDTH, f32

GRADIENT = np.dtype(
    [
        ("dout", STRIDED),
        ("dlse", STRIDED),  # address 0: none
        ("delta", STRIDED),
        ("dq", STRIDED),
        ("dk", STRIDED),
        ("dv", STRIDED),
        ("dbias", STRIDED),
        ("dbias_col", np.int64),
        ("dbias_wide", np.int64),  # 1: dbias is float64
        ("dq_tiles", np.int64),  # address of [tiles, D, LANES] fp32 sums
        ("first_tile", np.int64),  # address of [B] int64: tiles before sequence b
        ("want_q", np.int64),
        ("want_kv", np.int64),
        ("progress", np.int64),  # address of [B, Hkv, spans] int64: see backward; 0: none
        ("spans", np.int64),
        ("part", np.int64),  # keys of an item's part of the only span; 0: items have whole spans
    ]
)
gradient_at = record_at(GRADIENT)
# Tiles whose weights are kept: 48 rows, one chain of the sums of keys. Bits depend on it.
GROUP = 48 // LANES
TILE = SPAN * ROW  # bytes


class Gradient(NamedTuple):
    """Where a thread keeps its tiles, by address, after those of the Block."""

    dout_t: int  # [TILES, Dv, LANES]
    q: int  # [ROWS, D] whole vectors
    dout: int  # [ROWS, Dv] whole vectors
    m: int  # [ROWS]
    inverse: int  # [ROWS] 1 / l
    delta: int  # [ROWS]
    k_cols: int  # [D / MR, PANEL, MR]
    p: int  # [GROUP, SPAN, LANES]
    dp: int  # [GROUP, SPAN, LANES]
    slopes: int  # [SPAN, LANES]
    dq: int  # [D, LANES]
    dk: int  # [SPAN, D] whole vectors, and so the next three
    dv: int
    dk_part: int
    dv_part: int
    end: int


@compiled
def carve_gradient(base, D, Dv):
    k_row, v_row = 4 * padded(D, WIDTH), 4 * padded(Dv, WIDTH)
    q = base + 4 * ROWS * padded(Dv, WIDTH)
    dout = q + ROWS * k_row
    m = dout + ROWS * v_row
    inverse = m + 4 * ROWS
    delta = inverse + 4 * ROWS
    k_cols = delta + 4 * ROWS
    p = k_cols + 4 * PANEL * padded(D, MR)
    dp = p + GROUP * TILE
    slopes = dp + GROUP * TILE
    dq = slopes + SPAN * ROW
    dk = dq + padded(D, MR) * ROW
    dv = dk + SPAN * k_row
    dk_part = dv + SPAN * v_row
    dv_part = dk_part + SPAN * k_row
    end = dv_part + SPAN * v_row
    return Gradient(
        base, q, dout, m, inverse, delta, k_cols, p, dp, slopes, dq, dk, dv, dk_part, dv_part, end
    )


@compiled
def load_rows(call, grad, block, work, b, h, row0, n_rows):
    """Rows of a block, and what belongs to them; returns its tiles and whether q, dO are finite."""
    n_tiles = load_queries(call, block, b, h, row0, n_rows)
    first = of_sequence(call.q_first, b)
    # Lanes that only fill up the last tile see nothing.
    for i in range(n_rows, n_tiles * LANES):
        scalar.store_int(0, block.lo + 4 * i)
        scalar.store_int(0, block.hi + 4 * i)
        scalar.store_word(0, block.ranges + 16 * i)
        scalar.store_word(0, block.ranges + 16 * i + 8)
    note_bounds(block, n_tiles - 1)
    pitch = 4 * padded(call.D, WIDTH)
    q_finite = copy_rows(call.kind, block.q_rows, n_tiles * LANES, call.D, work.q, pitch)
    for i in range(n_tiles * LANES):
        head = scalar.load_word(block.q_head + 8 * i)
        q_idx = scalar.load_word(block.q_idx + 8 * i)
        statistics = row_address(call.statistics, first, b, head, q_idx)
        scalar.store(scalar.load(statistics), work.m + 4 * i)
        scalar.store(f32(1.0) / scalar.load(statistics + 4), work.inverse + 4 * i)
        delta = scalar.load(row_address(grad.delta, first, b, head, q_idx))
        scalar.store(delta, work.delta + 4 * i)
        dout = row_address(grad.dout, first, b, head, q_idx)
        scalar.store_word(dout, block.q_rows + 8 * i)
    for t in range(n_tiles):
        table, to = block.q_rows + 8 * t * LANES, work.dout_t + t * call.Dv * ROW
        gather_columns(call.kind, table, LANES, call.Dv, to, ROW)
    pitch = 4 * padded(call.Dv, WIDTH)
    d_finite = copy_rows(call.kind, block.q_rows, n_tiles * LANES, call.Dv, work.dout, pitch)
    return n_tiles, q_finite, d_finite


@compiled
def load_keys(call, block, work, b, h, first, n):
    """Keys and values as panels to multiply queries with, keys as columns for dQ."""
    whole = padded(n, MR)
    fill_kv_rows(call, call.v, b, h, first, n, whole, block.zero_row, block.kv_rows)
    gather_panels(call.kind, block.kv_rows, whole, call.Dv, block.v_panels)
    fill_kv_rows(call, call.k, b, h, first, n, whole, block.zero_row, block.kv_rows)
    gather_panels(call.kind, block.kv_rows, whole, call.D, block.k_panels)
    return copy_panels(call.kind, block.kv_rows, whole, call.D, work.k_cols, PANEL)


@compiled
def score_gradients(call, block, work, b, t, first, begin, end, bounds, slopes, g):
    """p and dS of tile t for keys begin … end of the span, into tile g of work.p and work.dp."""
    p, ds = work.p + g * TILE, work.dp + g * TILE
    tile_scores(call, block, b, t, first, begin, end, bounds, p, slopes)
    dout_t = work.dout_t + t * call.Dv * ROW
    for kv in range(begin, end, MR):
        v_panel = block.v_panels + 4 * kv * call.Dv
        multiply_tile(v_panel, dout_t, ds + kv * ROW, call.Dv, f32(1.0), block.part)
    at, row = begin * ROW, 4 * t * LANES
    slopes = slopes + at if slopes != 0 else 0
    m, inverse, delta = work.m + row, work.inverse + row, work.delta + row
    score_gradient_rows(p + at, ds + at, end - begin, m, inverse, delta, slopes)
