"""Gradients on the CPU, without atomics: every sum has one owner and one order.

With p = e^(s − m) / l recomputed tile by tile, dP = dO vᵀ and delta = Σ_d dO·O − dlse:

    dS = p (dP − delta)        dQ = scale Σ_kv dS k        dK = scale Σ_q dS q        dV = Σ_q p dO

dQ of a row adds up spans of SPAN keys in ascending order; dK and dV of a key add up blocks of
ROWS rows (heads of the group, then queries) in ascending order, and in a block 48 rows at a time,
so that no chain of additions is long. One thread can take a whole KV head and make all three (five
products), or threads take spans for dK and dV and then row blocks for dQ (seven products, more
parallel). Both add the same numbers in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING

import numpy as np
import torch

from lockstep.kernels.cpu.arithmetic.memory import scatter_columns
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.arithmetic.rescore import (
    GRADIENT,
    GROUP,
    TILE,
    carve_gradient,
    gradient_at,
    load_keys,
    load_rows,
    score_gradients,
)
from lockstep.kernels.cpu.arithmetic.tiles import (
    PIECE,
    ROW,
    VECTOR,
    add_vectors,
    outer_masked_1,
    outer_masked_2,
    outer_masked_3,
    outer_tile_1,
    outer_tile_2,
    outer_tile_3,
)
from lockstep.kernels.cpu.arithmetic.wide import (
    ROWS,
    SPAN,
    accumulate,
    accumulate_masked,
    carve_block,
    is_whole,
    padded,
    piece_of,
    rows_range,
    tile_bounds,
    zeros_for,
)
from lockstep.kernels.cpu.call.arguments import argument, enter, record_at, take_ticket
from lockstep.kernels.cpu.call.record import (
    is_constant_time,
    of_sequence,
    row_address,
    split_row,
    variants,
)
from lockstep.kernels.cpu.call.tensors import (
    Described,
    address,
    describe,
    kv_dims,
    query_dims,
    strided,
)
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler import processes, scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.simd import F32, LANES, MR, WIDTH, f32
from lockstep.kernels.cpu.extras import bias_gradient, row_deltas, sink_gradient
from lockstep.memory_order import zeros_like

if TYPE_CHECKING:
    from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs
    from lockstep.problem import AttentionProblem

ITEM = np.dtype(
    [(name, np.int64) for name in ("b", "h", "first_row", "last_row", "first_span", "last_span")]
)
ITEM_BYTES = ITEM.itemsize
item_at = record_at(ITEM)


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
def _query_part(call, work, p, dp, begin, end, finite, masked):
    """work.dq [D, LANES] = Σ_kv k [kv, d] · dS [kv, lane] over one span."""
    D = padded(call.D, MR)
    selects = masked if is_constant_time(call) else not finite
    for at in range(begin // PIECE * PIECE, end, PIECE):
        kv, n = piece_of(at, begin, end)
        fresh = 1 if kv == begin else 0
        if selects:
            accumulate_masked(work.k_cols, dp, p, work.dq, D, kv, n, fresh)
        else:
            accumulate(work.k_cols, dp, work.dq, D, kv, n, fresh)


@compiled
def _add_keys(call, p, weights, begin, end, rows, out, n, pitch, finite, masked):
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


@compiled
def dq_tile(call, grad, b, h, row):
    """Address of the dQ sums of the tile that starts at ``row``."""
    tiles = padded(call.G * of_sequence(call.q_len, b), LANES) // LANES
    tile = of_sequence(grad.first_tile, b) + h * tiles + row // LANES
    return grad.dq_tiles + tile * padded(call.D, MR) * ROW


@compiled
def _hide_keys(work, g, begin, end):
    """Marks keys that a tile does not see, for tiles of its group may."""
    n = (end - begin) * LANES
    fill(work.p + g * TILE + begin * ROW, n, f32(-0.0))
    fill(work.dp + g * TILE + begin * ROW, n, f32(0.0))


@compiled
def _all_keys(one, other):
    """The keys that one of two tiles sees, and 1 if some may be hidden from a row."""
    begin, end, hides = one
    if begin != other[0] or end != other[1]:
        hides = 1
    return min(begin, other[0]), max(end, other[1]), hides | other[2]


@compiled
def _tile_gradients(call, grad, block, work, item, row0, t, first, n, k_finite):
    """p, dS and dQ of one tile; returns its keys, and 1 if some may be hidden from a row, else 0:
    words, as all that steers is."""
    begin, end, bounds = tile_bounds(call, block, t, first, n)
    g = t % GROUP
    if GROUP > 1:
        _hide_keys(work, g, 0, min(begin, end))
        _hide_keys(work, g, end if begin < end else 0, padded(n, MR))
    if begin >= end:
        return SPAN, 0, 0
    slopes = work.slopes if call.capped != 0 else 0
    score_gradients(call, block, work, item.b, t, first, begin, end, bounds, slopes, g)
    masked = not is_whole(call, first + begin, end - begin, bounds)
    if grad.want_q:
        p, dp = work.p + g * TILE, work.dp + g * TILE
        _query_part(call, work, p, dp, begin, end, k_finite, masked)
        sums = dq_tile(call, grad, item.b, item.h, row0 + t * LANES)
        add_vectors(sums, work.dq, padded(call.D, MR) * LANES)
    return begin, end, 1 if masked else 0


@compiled
def _key_parts(call, work, t, n, keys, q_finite, d_finite):
    """Add the n rows of a group of tiles, from tile t on, to dk_part and dv_part: a chain each."""
    begin, end, hides = keys
    masked = hides != 0
    g, k_row, v_row = t % GROUP, 4 * padded(call.D, WIDTH), 4 * padded(call.Dv, WIDTH)
    p, dp = work.p + g * TILE, work.dp + g * TILE
    q, dout = work.q + t * LANES * k_row, work.dout + t * LANES * v_row
    _add_keys(call, p, dp, begin, end, q, work.dk_part, n, k_row, q_finite, masked)
    _add_keys(call, p, p, begin, end, dout, work.dv_part, n, v_row, d_finite, masked)


@compiled
def block_gradients(call, grad, block, work, item, row0, first, n, k_finite):
    """One row block against one loaded span: adds to dQ sums and to work.dk, work.dv."""
    b, h = item.b, item.h
    n_rows = min(ROWS, item.last_row - row0)
    lo, hi = rows_range(call, b, row0, n_rows)
    if lo >= first + n or hi <= first:
        return
    n_tiles, q_finite, d_finite = load_rows(call, grad, block, work, b, h, row0, n_rows)
    k_row, v_row = 4 * padded(call.D, WIDTH), 4 * padded(call.Dv, WIDTH)
    if grad.want_kv:
        fill(work.dk_part, SPAN * k_row // 4, f32(0.0))
        fill(work.dv_part, SPAN * v_row // 4, f32(0.0))
    start, keys = 0, (SPAN, 0, 0)
    for t in range(n_tiles):
        own = _tile_gradients(call, grad, block, work, item, row0, t, first, n, k_finite)
        keys = own if t == start else _all_keys(keys, own)
        if t + 1 == n_tiles or (t + 1) % GROUP == 0:
            if grad.want_kv and keys[0] < keys[1]:
                rows = min((t + 1) * LANES, n_rows) - start * LANES
                _key_parts(call, work, start, rows, keys, q_finite, d_finite)
            start = t + 1
    if grad.want_kv:
        add_vectors(work.dk, work.dk_part, SPAN * k_row // 4)
        add_vectors(work.dv, work.dv_part, SPAN * v_row // 4)


@compiled
def write_keys(call, tensor, b, h, first, n, sums, D, factor):
    """Store n rows of gradient sums; + 0 leaves one kind of zero."""
    pitch = 4 * padded(D, WIDTH)
    size = 4 if call.kind == F32 else 2
    for i in range(n):
        to = row_address(tensor, of_sequence(call.kv_first, b), b, h, first + i)
        for d in range(D):
            value = scalar.load(sums + i * pitch + 4 * d) * factor + f32(0.0)
            scalar.store_element(call.kind, value, to + size * d)


@compiled
def write_queries(call, grad, block, item):
    """Scale the dQ sums of the item's rows and store them."""
    D = padded(call.D, MR)
    first = of_sequence(call.q_first, item.b)
    for row in range(item.first_row, item.last_row, LANES):
        sums = dq_tile(call, grad, item.b, item.h, row)
        for i in range(D * LANES):
            value = scalar.load(sums + 4 * i) * f32(call.scale) + f32(0.0)
            scalar.store(value, sums + 4 * i)
        for lane in range(LANES):
            g, q_idx = split_row(call, item.b, min(row + lane, item.last_row - 1))
            head = item.h * call.G + g
            # Lanes beyond the last row are written to scratch.
            to = row_address(grad.dq, first, item.b, head, q_idx)
            to = to if row + lane < item.last_row else block.s
            scalar.store_word(to, block.q_rows + 8 * lane)
        scatter_columns(call.kind, block.q_rows, LANES, call.D, sums, ROW)


@variants
def run_gradients(call_at):
    def run(arguments):
        """Take items until none is left; each owns the sums it writes.

        Arguments: call, gradient, items, how many.
        """
        call, grad = call_at(argument(arguments, 0)), gradient_at(argument(arguments, 1))
        items, n_items = argument(arguments, 2), argument(arguments, 3)
        block = carve_block(enter(arguments), call.D, call.Dv)
        work = carve_gradient(block.end, call.D, call.Dv)
        fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
        while True:
            ticket = take_ticket(arguments)
            if ticket >= n_items:
                return
            item = item_at(items + ticket * ITEM_BYTES)
            length = of_sequence(call.kv_len, item.b)
            for span in range(item.first_span, item.last_span):
                first = span * SPAN
                n = min(SPAN, length - first)
                k_finite = load_keys(call, block, work, item.b, item.h, first, n)
                fill(work.dk, SPAN * padded(call.D, WIDTH), f32(0.0))
                fill(work.dv, SPAN * padded(call.Dv, WIDTH), f32(0.0))
                for row0 in range(item.first_row, item.last_row, ROWS):
                    block_gradients(call, grad, block, work, item, row0, first, n, k_finite)
                if grad.want_kv:
                    b, h, scale = item.b, item.h, f32(call.scale)
                    write_keys(call, grad.dk, b, h, first, n, work.dk, call.D, scale)
                    write_keys(call, grad.dv, b, h, first, n, work.dv, call.Dv, f32(1.0))
            if grad.want_q:
                write_queries(call, grad, block, item)

    return run


@lru_cache(maxsize=64)
def scratch_bytes(D: int, Dv: int) -> int:
    """What a thread needs."""
    return carve_gradient(carve_block(0, D, Dv).end, D, Dv).end


def list_items(
    problem: AttentionProblem, described: Described, by_span: bool, by_block: bool
) -> np.ndarray:
    """Whole KV heads, cut by span of keys or by block of rows where asked."""
    rows = []
    for b in range(problem.B):
        n_rows = described.q_len[b] * problem.Hq // problem.Hkv
        n_spans = -(-described.kv_len[b] // SPAN)
        for h in range(problem.Hkv):
            blocks = range(0, n_rows, ROWS) if by_block else (0,)
            spans = range(n_spans) if by_span else (0,)
            rows += [
                (
                    b,
                    h,
                    block,
                    min(block + ROWS, n_rows) if by_block else n_rows,
                    span,
                    span + 1 if by_span else n_spans,
                )
                for block in blocks
                for span in spans
            ]
    return np.array(rows, ITEM)


def backward(problem: AttentionProblem, saved: BackwardTensors, needs: Needs) -> Gradients:
    """The gradients asked for, each in the shape and dtype of its tensor."""
    from lockstep.kernels.kernel import Gradients

    tensors = saved.inputs
    D, Dv = problem.D, problem.Dv
    described = describe(problem, tensors, saved.out, None, saved.statistics)
    q_dims, k_dims = query_dims(problem), kv_dims(problem)
    # Keys and queries that no one sees keep these zeros.
    dq, dk, dv = map(zeros_like, (tensors.q, tensors.k, tensors.v))
    delta = torch.zeros(problem.lse_shape, dtype=torch.float32)
    group = problem.Hq // problem.Hkv
    tiles = -(-np.array(described.q_len) * group // LANES) * problem.Hkv
    first_tile = np.cumsum(tiles) - tiles
    n_sums = int(tiles.sum()) * LANES * (-(-D // MR) * MR) if needs.q else 0
    dq_tiles = np.zeros(n_sums, np.float32)
    record = np.zeros(1, GRADIENT)
    for name, tensor in (("dout", saved.dout), ("delta", delta), ("dq", dq)):
        record[name] = strided(tensor, q_dims)
    for name, tensor in (("dk", dk), ("dv", dv)):
        record[name] = strided(tensor, k_dims)
    if saved.dlse is not None:
        record["dlse"] = strided(saved.dlse, q_dims)
    record["dq_tiles"], record["first_tile"] = address(dq_tiles), address(first_tile)
    scratch = scratch_bytes(D, Dv)
    row_deltas(problem, described, record, scratch)

    def run(want_q: bool, want_kv: bool, by_span: bool, by_block: bool) -> None:
        record["want_q"], record["want_kv"] = want_q, want_kv
        items = list_items(problem, described, by_span, by_block)
        pairs = sum(map(mul, described.q_len, described.kv_len)) * problem.Hq
        arguments = (described.address, address(record), address(items), len(items))
        parallel(
            run_gradients[problem.constant_time], arguments, scratch, 5 * pairs * (D + Dv) // 2
        )

    want_kv = needs.k or needs.v
    heads, threads = problem.B * problem.Hkv, processes.threads()
    if needs.q and want_kv and -(-heads // threads) * 5 * threads <= 7 * heads:
        run(True, True, False, False)
    else:
        if want_kv:
            run(False, True, True, False)
        if needs.q:
            run(True, False, False, True)
    return Gradients(
        q=dq if needs.q else None,
        k=dk if needs.k else None,
        v=dv if needs.v else None,
        bias=bias_gradient(problem, tensors, described, record, scratch) if needs.bias else None,
        sinks=sink_gradient(problem, tensors, described, record) if needs.sinks else None,
    )
