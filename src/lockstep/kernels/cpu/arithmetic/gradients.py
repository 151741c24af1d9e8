"""What the weights of a tile and their gradients add to dQ of its rows, dK and dV of its keys."""

from __future__ import annotations

from lockstep.kernels.cpu.arithmetic.block import padded
from lockstep.kernels.cpu.arithmetic.rescore import TILE
from lockstep.kernels.cpu.arithmetic.tiles import (
    PIECE,
    ROW,
    VECTOR,
    outer_masked_1,
    outer_masked_2,
    outer_masked_3,
    outer_tile_1,
    outer_tile_2,
    outer_tile_3,
)
from lockstep.kernels.cpu.arithmetic.wide import accumulate, accumulate_masked, piece_of
from lockstep.kernels.cpu.call.record import is_constant_time
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.vectors import LANES, MR, f32


@compiled
def _add_outer(weights, begin, end, rows, out, n, pitch):
    """out [kv, d] += Σ_row weights [kv, row] · rows [row, d] for keys begin … end and n rows, whose
    weights are in tiles [SPAN, LANES]."""
    for kv in range(begin, end, MR):
        at = 0
        while at < pitch:
            left = (pitch - at) // VECTOR
            vectors = 3 if left == 3 or left > 4 else min(left, 2)
            w, to = weights + kv * ROW, out + kv * pitch + at
            if vectors == 3:
                outer_tile_3(w, rows + at, to, n, pitch, 0, TILE)
            elif vectors == 2:
                outer_tile_2(w, rows + at, to, n, pitch, 0, TILE)
            else:
                outer_tile_1(w, rows + at, to, n, pitch, 0, TILE)
            at += vectors * VECTOR


@compiled
def _add_outer_masked(p, weights, begin, end, rows, out, n, pitch):
    """The same with the same steps for all values: a row adds nothing to keys it does not see."""
    at = 0
    while at < pitch:
        left = (pitch - at) // VECTOR
        vectors = 3 if left == 3 or left > 4 else min(left, 2)
        for kv in range(begin, end, MR):
            w, to, marks = weights + kv * ROW, out + kv * pitch + at, p + kv * ROW
            if vectors == 3:
                outer_masked_3(w, rows + at, to, n, pitch, marks, TILE)
            elif vectors == 2:
                outer_masked_2(w, rows + at, to, n, pitch, marks, TILE)
            else:
                outer_masked_1(w, rows + at, to, n, pitch, marks, TILE)
        at += vectors * VECTOR


@compiled
def _add_outer_carefully(p, weights, begin, end, rows, out, n, pitch):
    """The same where rows are not finite: a row adds nothing to keys it does not see."""
    for kv in range(begin, end):
        for at in range(0, pitch, 4):
            total = f32(0.0)
            for row in range(n):
                where = row // LANES * TILE + kv * ROW + 4 * (row % LANES)
                if not scalar.is_minus_zero(scalar.load(p + where)):
                    value = scalar.load(rows + row * pitch + at)
                    total = scalar.fma(scalar.load(weights + where), value, total)
            scalar.store(scalar.load(out + kv * pitch + at) + total, out + kv * pitch + at)


@compiled
def query_part(call, work, p, dp, begin, end, finite, masked, ahead, dq, goes_on):
    """dq [D, LANES] = Σ_kv k [kv, d] · dS [kv, lane] over one span, or += over a part that goes on
    where the one before has stopped."""
    D = padded(call.D, MR)
    selects = masked if is_constant_time(call) else not finite
    for at in range(begin // PIECE * PIECE, end, PIECE):
        kv, n = piece_of(at, begin, end)
        fresh = 1 if kv == begin and not goes_on else 0
        if selects:
            accumulate_masked(work.k_cols, dp, p, dq, D, kv, n, fresh)
        else:
            accumulate(work.k_cols, dp, dq, D, kv, n, fresh, ahead)


@compiled
def add_keys(call, p, weights, begin, end, rows, out, n, pitch, finite, masked):
    """out [kv, d] += Σ_row weights [kv, row] · rows [row, d], for the keys that rows see."""
    if is_constant_time(call):
        if masked:
            _add_outer_masked(p, weights, begin, end, rows, out, n, pitch)
        else:
            _add_outer(weights, begin, end, rows, out, n, pitch)
    elif finite:
        _add_outer(weights, begin, end, rows, out, n, pitch)
    else:
        _add_outer_carefully(p, weights, begin, end, rows, out, n, pitch)
