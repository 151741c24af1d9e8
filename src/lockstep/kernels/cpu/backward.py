"""Gradients on the CPU, without atomics: every sum has one owner and one order.

With p = e^(s − m) / l recomputed tile by tile, dP = dO vᵀ and delta = Σ_d dO·O − dlse:

    dS = p (dP − delta)        dQ = scale Σ_kv dS k        dK = scale Σ_q dS q        dV = Σ_q p dO

dQ of a row adds up spans of SPAN keys in ascending order; dK and dV of a key add up blocks of
ROWS rows (heads of the group, then queries) in ascending order, and in a block 48 rows at a time,
so that no chain of additions is long. A thread takes a span and makes all three (five products): it
goes over the rows, and adds to their dQ behind the thread that has the span before. For one kind
alone, threads take spans, or row blocks, and do not wait for each other.
"""

from __future__ import annotations

from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING

import numpy as np
import torch

from lockstep.kernels.cpu.arithmetic.block import (
    ROWS,
    SPAN,
    carve_block,
    padded,
    rows_range,
    zeros_for,
)
from lockstep.kernels.cpu.arithmetic.gradients import add_keys, query_part
from lockstep.kernels.cpu.arithmetic.memory import plan_ahead, scatter_columns, write_scaled
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
from lockstep.kernels.cpu.arithmetic.tiles import PIECE, ROW, add_vectors
from lockstep.kernels.cpu.arithmetic.wide import is_whole, tile_bounds
from lockstep.kernels.cpu.call.arguments import argument, enter, take_ticket
from lockstep.kernels.cpu.call.record import next_row, of_sequence, row_address, split_row, variants
from lockstep.kernels.cpu.call.tensors import (
    Described,
    address,
    describe,
    kv_dims,
    query_dims,
    strided,
)
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import Kernel, compiled, have_ready
from lockstep.kernels.cpu.compiler.vectors import F32, LANES, MR, WIDTH, f32
from lockstep.kernels.cpu.extras import bias_gradient, row_deltas, run_deltas, sink_gradient
from lockstep.kernels.cpu.items import ITEM_BYTES, item_at, list_items, part_of_span
from lockstep.memory_order import empty_like, zeros_like

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs
    from lockstep.problem import AttentionProblem, Tensors


@compiled
def dq_tile(call, grad, b, h, row):
    """Address of the dQ sums of the tile that starts at ``row``."""
    tiles = padded(call.G * of_sequence(call.q_len, b), LANES) // LANES
    tile = of_sequence(grad.first_tile, b) + h * tiles + row // LANES
    return grad.dq_tiles + tile * padded(call.D, MR) * ROW


@compiled
def _hide_keys(work, t, begin, end):
    """Marks keys that a tile does not see, for tiles of its group may."""
    n = (end - begin) * LANES
    fill(work.p + t * TILE + begin * ROW, n, f32(-0.0))
    fill(work.dp + t * TILE + begin * ROW, n, f32(0.0))


@compiled
def _all_keys(one, other):
    """The keys that one of two tiles sees, and 1 if some may be hidden from a row."""
    begin, end, hides = one
    if begin != other[0] or end != other[1]:
        hides = 1
    return min(begin, other[0]), max(end, other[1]), hides | other[2]


@compiled
def _progress_of(call, grad, item):
    """Where the item's thread notes how many rows of the head have got their dQ from its span."""
    return grad.progress + 8 * ((item.b * call.Hkv + item.h) * grad.spans + item.first_span)


@compiled
def _await_turn(call, grad, item, n_rows):
    """Wait until all spans before the item's have added to dQ of the head's first n_rows rows.

    Threads take the items of a head in ascending order of spans. So an item that is waited for has
    a thread, and the first item does not wait.
    """
    if grad.progress != 0 and item.first_span > 0:
        before = _progress_of(call, grad, item) - 8
        while scalar.load_acquire(before) < n_rows:
            scalar.give_way()


@compiled
def _pass_turn(call, grad, item, n_rows):
    if grad.progress != 0:
        scalar.store_release(n_rows, _progress_of(call, grad, item))


@compiled
def _tile_gradients(call, grad, block, work, item, row0, t, first, n, k_finite):
    """p, dS and dQ of one tile; returns its keys, and 1 if some may be hidden from a row, else 0:
    words, as all that steers is."""
    begin, end, bounds = tile_bounds(call, block, t, first, n)
    if GROUP > 1:
        _hide_keys(work, t, 0, min(begin, end))
        _hide_keys(work, t, end if begin < end else 0, padded(n, MR))
    if begin >= end:
        return SPAN, 0, 0
    slopes = work.slopes if call.capped != 0 else 0
    score_gradients(call, block, work, item.b, t, first, begin, end, bounds, slopes, t)
    masked = not is_whole(call, first + begin, end - begin, bounds)
    if grad.want_q:
        p, dp, row = work.p + t * TILE, work.dp + t * TILE, row0 + t * LANES
        sums, is_part = dq_tile(call, grad, item.b, item.h, row), grad.part != 0
        if is_part:
            _await_turn(call, grad, item, row + LANES)
        to = sums if is_part else work.dq
        query_part(call, work, p, dp, begin, end, k_finite, masked, block.ahead, to, is_part)
        if not is_part:
            _await_turn(call, grad, item, row + LANES)
            add_vectors(sums, work.dq, padded(call.D, MR) * LANES)
        _pass_turn(call, grad, item, row + LANES)
    return begin, end, 1 if masked else 0


@compiled
def _key_parts(call, work, n, keys, q_finite, d_finite):
    """Add the n rows of a group of tiles to dk_part and dv_part: a chain each."""
    begin, end, hides = keys
    masked = hides != 0
    k_row, v_row = 4 * padded(call.D, WIDTH), 4 * padded(call.Dv, WIDTH)
    p, dp, q, dout = work.p, work.dp, work.q, work.dout
    add_keys(call, p, dp, begin, end, q, work.dk_part, n, k_row, q_finite, masked)
    add_keys(call, p, p, begin, end, dout, work.dv_part, n, v_row, d_finite, masked)


@compiled
def _plan_next_rows(call, grad, block, item, row):
    """Have queries and dO of the item's group of rows from ``row`` on brought near while the one
    before is at work."""
    b, n, table = item.b, max(min(GROUP * LANES, item.last_row - row), 0), block.next_rows
    first = of_sequence(call.q_first, b)
    g, q_idx = split_row(call, b, row)
    for i in range(n):
        head = item.h * call.G + g
        scalar.store_word(row_address(call.q, first, b, head, q_idx), table + 16 * i)
        scalar.store_word(row_address(grad.dout, first, b, head, q_idx), table + 16 * i + 8)
        g, q_idx = next_row(call, b, g, q_idx)
    steps = GROUP * (SPAN // PIECE) * (padded(call.D, MR) // MR)
    plan_ahead(call.kind, block.ahead, table, 2 * n, max(call.D, call.Dv), steps)


@compiled
def _group_gradients(call, grad, block, work, item, row0, n_rows, first, n, k_finite):
    """A group of tiles, from row0 on, against one loaded span: adds to dQ sums and to the parts."""
    lo, hi = rows_range(call, item.b, row0, n_rows)
    if lo >= first + n or hi <= first:
        return
    n_tiles, q_finite, d_finite = load_rows(call, grad, block, work, item.b, item.h, row0, n_rows)
    _plan_next_rows(call, grad, block, item, row0 + GROUP * LANES)
    keys = SPAN, 0, 0
    for t in range(n_tiles):
        own = _tile_gradients(call, grad, block, work, item, row0, t, first, n, k_finite)
        keys = own if t == 0 else _all_keys(keys, own)
    if grad.want_kv and keys[0] < keys[1]:
        _key_parts(call, work, n_rows, keys, q_finite, d_finite)


@compiled
def block_gradients(call, grad, block, work, item, row0, first, n, k_finite):
    """One row block against one loaded span: adds to dQ sums and to work.dk, work.dv.

    Rows are laid out by groups, which stay in the second-level cache beside the span.
    """
    last = min(row0 + ROWS, item.last_row)
    lo, hi = rows_range(call, item.b, row0, last - row0)
    if lo >= first + n or hi <= first:
        return
    n_k, n_v = padded(n, MR) * padded(call.D, WIDTH), padded(n, MR) * padded(call.Dv, WIDTH)
    if grad.want_kv:
        fill(work.dk_part, n_k, f32(0.0))
        fill(work.dv_part, n_v, f32(0.0))
    for row in range(row0, last, GROUP * LANES):
        n_rows = min(GROUP * LANES, last - row)
        _group_gradients(call, grad, block, work, item, row, n_rows, first, n, k_finite)
    if grad.want_kv:
        add_vectors(work.dk, work.dk_part, n_k)
        add_vectors(work.dv, work.dv_part, n_v)


@compiled
def write_keys(call, tensor, b, h, first, n, sums, D, factor):
    """Store n rows of gradient sums."""
    pitch = 4 * padded(D, WIDTH)
    for i in range(n):
        to = row_address(tensor, of_sequence(call.kv_first, b), b, h, first + i)
        write_scaled(call.kind, sums + i * pitch, D, to, factor)


@compiled
def write_queries(call, grad, block, item):
    """Scale the dQ sums of the item's rows and store them."""
    D = padded(call.D, MR)
    first = of_sequence(call.q_first, item.b)
    for row in range(item.first_row, item.last_row, LANES):
        sums = dq_tile(call, grad, item.b, item.h, row)
        write_scaled(F32, sums, D * LANES, sums, f32(call.scale))
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
            width = grad.part if grad.part != 0 else SPAN
            for span in range(item.first_span, item.last_span):
                first = span * width
                n = min(width, length - first)
                k_finite = load_keys(call, block, work, item.b, item.h, first, n)
                fill(work.dk, padded(n, MR) * padded(call.D, WIDTH), f32(0.0))
                fill(work.dv, padded(n, MR) * padded(call.Dv, WIDTH), f32(0.0))
                for row0 in range(item.first_row, item.last_row, ROWS):
                    block_gradients(call, grad, block, work, item, row0, first, n, k_finite)
                n_rows = padded(item.last_row, LANES)
                _await_turn(call, grad, item, n_rows)
                _pass_turn(call, grad, item, n_rows)
                if grad.want_kv:
                    b, h, scale = item.b, item.h, f32(call.scale)
                    write_keys(call, grad.dk, b, h, first, n, work.dk, call.D, scale)
                    write_keys(call, grad.dv, b, h, first, n, work.dv, call.Dv, f32(1.0))
            if grad.want_q and (grad.progress == 0 or item.last_span * width >= length):
                write_queries(call, grad, block, item)

    return run


def kernels(constant_time: bool) -> tuple[Kernel, ...]:
    """What gradients of q, k and v need."""
    return run_gradients[constant_time], run_deltas[constant_time]


@lru_cache(maxsize=64)
def scratch_bytes(D: int, Dv: int) -> int:
    """What a thread needs."""
    return carve_gradient(carve_block(0, D, Dv).end, D, Dv).end


def _allocate(problem: AttentionProblem, tensors: Tensors, described: Described) -> list[Tensor]:
    """dq, dk and dv: zeros where not all of their rows will be written, as of keys beyond a length.

    In constant time always zeros: audits take what lies in memory for what a call was given.
    """
    is_whole = problem.layout == "dense" and set(described.kv_len) == {problem.Skv}
    if is_whole and min(problem.Sq, problem.Skv) > 0 and not problem.constant_time:
        return [empty_like(x, tuple(x.shape)) for x in tensors[:3]]
    return [zeros_like(x) for x in tensors[:3]]


def backward(problem: AttentionProblem, saved: BackwardTensors, needs: Needs) -> Gradients:
    """The gradients asked for, each in the shape and dtype of its tensor."""
    from lockstep.kernels.kernel import Gradients

    have_ready(kernels(problem.constant_time))
    tensors = saved.inputs
    D, Dv = problem.D, problem.Dv
    described = describe(problem, tensors, saved.out, None, saved.statistics)
    q_dims, k_dims = query_dims(problem), kv_dims(problem)
    dq, dk, dv = _allocate(problem, tensors, described)
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

    def run(want_q: bool, want_kv: bool) -> None:
        record["want_q"], record["want_kv"] = want_q, want_kv
        longest = max(described.kv_len, default=0)
        part = part_of_span(problem, longest) if want_kv else 0
        width = part or SPAN
        items = list_items(problem, described, want_kv, not want_kv, width)
        n_spans = -(-longest // width)
        record["part"] = part
        progress = np.zeros(problem.B * problem.Hkv * n_spans, np.int64)
        if want_q and want_kv:
            record["progress"], record["spans"] = address(progress), n_spans
        pairs = sum(map(mul, described.q_len, described.kv_len)) * problem.Hq
        arguments = (described.address, address(record), address(items), len(items))
        parallel(
            run_gradients[problem.constant_time], arguments, scratch, 5 * pairs * (D + Dv) // 2
        )

    if needs.q or needs.k or needs.v:
        run(needs.q, needs.k or needs.v)
    return Gradients(
        q=dq if needs.q else None,
        k=dk if needs.k else None,
        v=dv if needs.v else None,
        bias=bias_gradient(problem, tensors, described, record, scratch) if needs.bias else None,
        sinks=sink_gradient(problem, tensors, described, record) if needs.sinks else None,
    )
