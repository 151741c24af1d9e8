"""Forward attention on the CPU: plan the work, run it, merge what was split.

    out = softmax(softcap(scale · q kᵀ) + bias) v        q [.., D], k [.., D], v [.., Dv]

Query rows come in *units* of up to ROWS rows of one KV head. For each span of SPAN keys a unit
gets a part (acc, m, l). Parts are folded together in ascending order: those of GROUP spans, at
absolute positions, then groups, so that a long row rounds its sums a few hundred times rather
than once per span. A unit that is folded on the fly and one whose spans were shared out among
threads go through the same steps, so the choice between them is free: it never shows in the bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lockstep import forks
from lockstep.kernels.cpu.arithmetic.block import (
    SPAN,
    carve_block,
    load_queries,
    load_span,
    padded,
    plan_next_span,
    rows_range,
    zeros_for,
)
from lockstep.kernels.cpu.arithmetic.memory import scatter_columns
from lockstep.kernels.cpu.arithmetic.merge import (
    MINUS_INF,
    close_row,
    fill,
    fold_row,
    fold_zeros_too,
    write_statistics,
)
from lockstep.kernels.cpu.arithmetic.narrow import NARROW, attend_narrow, carve_narrow, load_narrow
from lockstep.kernels.cpu.arithmetic.running import (
    carve_running,
    clear,
    end_of_group,
    fold_sinks,
    fold_tile,
)
from lockstep.kernels.cpu.arithmetic.tiles import ROW, close_rows
from lockstep.kernels.cpu.arithmetic.wide import attend_span
from lockstep.kernels.cpu.call.arguments import argument, enter, take_ticket
from lockstep.kernels.cpu.call.record import (
    is_constant_time,
    next_row,
    of_sequence,
    row_address,
    split_row,
    variants,
    with_tiles,
)
from lockstep.kernels.cpu.call.tensors import Described, address, describe
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import Kernel, compiled, have_ready
from lockstep.kernels.cpu.compiler.vectors import F32, LANES, MR, f32
from lockstep.kernels.cpu.units import (
    DONE,
    ITEM_BYTES,
    UNIT_BYTES,
    choose_cut,
    has_narrow,
    item_at,
    max_pieces,
    plan,
    unit_at,
)
from lockstep.memory_order import strides_like

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Prepared, Result, Tensors
    from lockstep.problem import AttentionProblem

# Words of the longest plan that is kept for calls to come.
LONGEST_PLAN = 1 << 13


@compiled
def _write_row_statistics(call, b, head, q_idx, m, l):
    first = of_sequence(call.q_first, b)
    lse = row_address(call.lse, first, b, head, q_idx)
    wanted = call.statistics.address != 0
    statistics = row_address(call.statistics, first, b, head, q_idx) if wanted else 0
    write_statistics(m, l, lse, statistics)


@compiled
def write_rows(call, unit, rows, acc, m, l):
    """Scatter finished tiles acc [tiles, Dv, LANES]; m and l [tiles, LANES] of each row."""
    b, h, row0, n_rows = unit.b, unit.h, unit.first_row, unit.n_rows
    q_first = of_sequence(call.q_first, b)
    Dv = padded(call.Dv, MR)
    g, q_idx = split_row(call, b, row0)
    for i in range(padded(n_rows, LANES)):
        if 0 < i < n_rows:
            g, q_idx = next_row(call, b, g, q_idx)
        # Lanes that repeat the last row repeat its result too.
        row = row_address(call.out, q_first, b, h * call.G + g, q_idx)
        scalar.store_word(row, rows + 8 * i)
        row_m, row_l = scalar.load(m + 4 * i), scalar.load(l + 4 * i)
        _write_row_statistics(call, b, h * call.G + g, q_idx, row_m, row_l)
    for t in range(padded(n_rows, LANES) // LANES):
        table = rows + 8 * t * LANES
        scatter_columns(call.kind, table, LANES, call.Dv, acc + t * Dv * ROW, ROW)


@compiled
def _fold_unit(call, unit, scratch):
    """All spans of one unit, folded as they come."""
    b, h, n_rows = unit.b, unit.h, unit.n_rows
    block = carve_block(scratch, call.D, call.Dv)
    fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
    Dv = padded(call.Dv, MR)
    begin, last = unit.first_span, unit.first_span + unit.n_spans
    state = carve_running(block.end, call.Dv)
    # The first group would be folded into nothing, which changes no bit.
    alone = end_of_group(begin, last) == last
    group = state if alone else carve_running(state.end, call.Dv)
    n_tiles = load_queries(call, block, b, h, unit.first_row, n_rows)
    # A group that is alone clears it.
    if not alone or begin == last:
        clear(state, n_tiles, Dv)
    hi = rows_range(call, b, unit.first_row, n_rows)[1]
    while begin < last:
        clear(group, n_tiles, Dv)
        end = end_of_group(begin, last)
        for span in range(begin, end):
            first = span * SPAN
            n = min(SPAN, hi - first)
            finite = load_span(call, block, b, h, first, n)
            ahead = first + SPAN
            plan_next_span(call, block, b, h, ahead, min(SPAN, hi - ahead), n_tiles)
            for t in range(n_tiles):
                if attend_span(call, block, b, t, first, n, finite):
                    fold_tile(group, t, Dv, block.part, block.part_m, block.part_l)
        for t in range(0 if alone else n_tiles):
            at = group.acc + t * Dv * ROW
            fold_tile(state, t, Dv, at, group.m + t * ROW, group.l + t * ROW)
        begin = end
    if call.sinks != 0:
        fold_sinks(call, block, state, n_tiles, Dv)
    for t in range(n_tiles):
        close_rows(state.acc + t * Dv * ROW, Dv, state.l + t * ROW)
    write_rows(call, unit, block.q_rows, state.acc, state.m, state.l)


@compiled
def _split_unit(call, unit, span0, span1, scratch, parts, statistics):
    """Some spans of one unit; each row's part goes to the workspace [row, span]."""
    b, h, n_rows = unit.b, unit.h, unit.n_rows
    block = carve_block(scratch, call.D, call.Dv)
    fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
    n_tiles = load_queries(call, block, b, h, unit.first_row, n_rows)
    hi = rows_range(call, b, unit.first_row, n_rows)[1]
    for span in range(span0, span1):
        first = span * SPAN
        n = min(SPAN, hi - first)
        finite = load_span(call, block, b, h, first, n)
        column = unit.workspace + span - unit.first_span
        for t in range(n_tiles):
            seen = attend_span(call, block, b, t, first, n, finite)
            for lane in range(LANES):
                part = column + min(t * LANES + lane, n_rows - 1) * unit.n_spans
                m = scalar.load(block.part_m + 4 * lane) if seen else MINUS_INF
                l = scalar.load(block.part_l + 4 * lane) if seen else f32(0.0)
                scalar.store(m, statistics + 8 * part)
                scalar.store(l, statistics + 8 * part + 4)
                row = block.q_rows + 8 * (t * LANES + lane)
                scalar.store_word(parts + 4 * part * call.Dv, row)
                if is_constant_time(call) and not seen:
                    fill(parts + 4 * part * call.Dv, call.Dv, f32(0.0))
            if seen:
                table = block.q_rows + 8 * t * LANES
                scatter_columns(F32, table, LANES, call.Dv, block.part, ROW)


@compiled
def _fold(call, acc, m, l, part, part_m, part_l):
    """Fold a part of the workspace, or a sink at address 0."""
    if is_constant_time(call):
        return fold_zeros_too(acc, m, l, call.Dv, F32, part, part_m, part_l)
    return fold_row(acc, m, l, call.Dv, F32, part, part_m, part_l)


@compiled
def _merge_unit(call, unit, scratch, parts, statistics):
    """Fold the workspace parts of a split unit, group after group, then the sink."""
    b, h, Dv = unit.b, unit.h, call.Dv
    acc, group = scratch, scratch + 4 * Dv
    for i in range(unit.n_rows):
        g, q_idx = split_row(call, b, unit.first_row + i)
        head = h * call.G + g
        first_part = unit.workspace + i * unit.n_spans - unit.first_span
        fill(acc, Dv, f32(0.0))
        m, l = MINUS_INF, f32(0.0)
        span, last = unit.first_span, unit.first_span + unit.n_spans
        while span < last:
            end = end_of_group(span, last)
            fill(group, Dv, f32(0.0))
            group_m, group_l = MINUS_INF, f32(0.0)
            for part in range(first_part + span, first_part + end):
                at, part_m = parts + 4 * part * Dv, scalar.load(statistics + 8 * part)
                part_l = scalar.load(statistics + 8 * part + 4)
                group_m, group_l = _fold(call, group, group_m, group_l, at, part_m, part_l)
            m, l = _fold(call, acc, m, l, group, group_m, group_l)
            span = end
        if call.sinks != 0:
            sink = scalar.load(call.sinks + 4 * head)
            m, l = _fold(call, acc, m, l, 0, sink, f32(1.0))
        out = row_address(call.out, of_sequence(call.q_first, b), b, head, q_idx)
        close_row(acc, l, Dv, call.kind, out)
        _write_row_statistics(call, b, head, q_idx, m, l)


@compiled
def _run_wide(call, unit, item, scratch, parts, statistics):
    if unit.workspace < 0:
        _fold_unit(call, unit, scratch)
    else:
        _split_unit(call, unit, item.first_span, item.last_span, scratch, parts, statistics)


@compiled
def _run_narrow(call, unit, item, scratch, parts, statistics):
    block = carve_narrow(scratch, call.D, call.Dv)
    load_narrow(call, block, unit)
    for span in range(item.first_span, item.last_span):
        attend_narrow(call, block, unit, span, parts, statistics)


def _items_runner(wide: bool, narrow: bool) -> Callable[[Any], Callable[[int], None]]:
    """What runs the items of wide units, of narrow ones, or of both. Few calls need both, and each
    of the three takes seconds to compile."""

    def run_items(call_at):
        return _run_items(call_at, wide, narrow)

    run_items.__name__ = f"run_items_{wide:d}{narrow:d}"
    return run_items


def _run_items(call_at, wide: bool, narrow: bool):
    def run_items(arguments):
        """Every item, folded or into the workspace; the thread that ends a unit merges it.

        Arguments: call, units, items, how many items, parts, statistics.
        """
        scratch = enter(arguments)
        call, units = call_at(argument(arguments, 0)), argument(arguments, 1)
        items, n_items = argument(arguments, 2), argument(arguments, 3)
        parts, statistics = argument(arguments, 4), argument(arguments, 5)
        while True:
            ticket = take_ticket(arguments)
            if ticket >= n_items:
                return
            item = item_at(items + ticket * ITEM_BYTES)
            unit = unit_at(units + item.unit * UNIT_BYTES)
            # numba leaves out the branches that these constants close, but not parts of conditions.
            if wide:  # noqa: SIM102
                if unit.n_rows > NARROW:
                    _run_wide(call, unit, item, scratch, parts, statistics)
            if narrow:  # noqa: SIM102
                if unit.n_rows <= NARROW:
                    _run_narrow(call, unit, item, scratch, parts, statistics)
            if unit.workspace >= 0:
                done = units + item.unit * UNIT_BYTES + DONE
                if scalar.fetch_add_one(done) == unit.pieces - 1:
                    _merge_unit(call, unit, scratch, parts, statistics)

    return run_items


KINDS = (True, False), (False, True), (True, True)
RUNNERS = {kinds: variants(_items_runner(*kinds)) for kinds in KINDS}
RUNNERS_WITH_TILES = {kinds: with_tiles(_items_runner(*kinds)) for kinds in KINDS}


def _kinds(n_rows: Iterable[int], step: int) -> tuple[bool, bool]:
    """Whether units are wide, and whether some are narrow, given the rows per KV head and unit."""
    wide = narrow = False
    for rows in n_rows:
        wide = wide or rows > NARROW
        narrow = narrow or has_narrow(rows, step)
    return wide, narrow


@lru_cache(maxsize=64)
def _scratch_bytes(D: int, Dv: int) -> int:
    """What a thread needs for either kind of unit."""
    state = carve_running(carve_block(0, D, Dv).end, Dv)
    group = carve_running(state.end, Dv)
    return max(group.end, carve_narrow(0, D, Dv).end)


def _kernels(problem: AttentionProblem, run_items: Kernel) -> tuple[Kernel, ...]:
    """What a call needs, and its gradients will."""
    here = run_items, plan[problem.constant_time]
    if not problem.has_gradient:
        return here
    from lockstep.kernels.cpu.backward import kernels

    return *kernels(problem.constant_time), *here


class Plan(NamedTuple):
    """How a call is cut into work for a number of threads."""

    table: array[int]  # units, then items
    n_units: int
    n_items: int
    n_parts: int
    row_spans: int
    run_items: Kernel


def _make_plan(
    problem: AttentionProblem, described: Described, threads: int, tiles: bool
) -> Plan | None:
    """None if there is nothing to do."""
    n_rows = [problem.Hq // problem.Hkv * length for length in described.q_len]
    step, n_units, split = choose_cut(n_rows, described.kv_len, problem.Hkv, problem.Dv)
    if n_units == 0:
        return None
    kinds = _kinds(n_rows, step)
    run_items = RUNNERS_WITH_TILES[kinds] if tiles else RUNNERS[kinds][problem.constant_time]
    if not run_items.is_ready:
        have_ready(_kernels(problem, run_items))
    most_items = n_units * max_pieces.py_func(threads, n_units)
    table = array("q", bytes(n_units * UNIT_BYTES + most_items * ITEM_BYTES))
    results = array("q", bytes(24))
    units, _ = table.buffer_info()
    items, found = units + n_units * UNIT_BYTES, results.buffer_info()[0]
    arguments = (described.address, threads, n_units, units, items, found, step, int(split))
    parallel(plan[problem.constant_time], arguments)
    n_parts, n_items, row_spans = results
    return Plan(table, n_units, n_items, n_parts, row_spans, run_items)


def prepare(problem: AttentionProblem, tensors: Tensors, *, tiles: bool = False) -> Prepared:
    """Runs this call and all others like it: out, lse and statistics. With `tiles`, products are
    those of matrix units.

    Those that have no tensors but q, k and v share a description and a plan. In constant time none
    do: audits compare whole calls.
    """
    D, Dv = problem.D, problem.Dv
    shapes = [problem.out_shape, problem.lse_shape]
    if problem.has_gradient:
        shapes.append(problem.statistics_shape)
    strides = [strides_like(tensors.q, shape) for shape in shapes]
    is_plain = all(x is None for x in tensors[3:]) and not problem.constant_time
    known: list[Described] = []
    plans: dict[int, Plan] = {}  # by threads

    def run(tensors: Tensors, addresses: list[int]) -> Result:
        out = torch.empty_strided(shapes[0], strides[0], dtype=problem.dtype, device="cpu")
        rows = zip(shapes[1:], strides[1:], strict=True)
        floats = partial(torch.empty_strided, dtype=torch.float32, device="cpu")
        lse, *more = (floats(*each) for each in rows)
        statistics = more[0] if more else None
        if known:
            described = known[0].again(*tensors[:3], out, lse, statistics)
        else:
            described = describe(problem, tensors, out, lse, statistics)
        threads = forks.threads()
        planned = plans.get(threads) or _make_plan(problem, described, threads, tiles)
        if planned is None:
            return out, lse, statistics
        if is_plain and len(planned.table) <= LONGEST_PLAN:
            known[:], plans[threads] = [described], planned
        # Threads count units off in it.
        table = array("q", planned.table)
        units, _ = table.buffer_info()
        items = units + planned.n_units * UNIT_BYTES
        workspace = np.empty(planned.n_parts * (Dv + 2), np.float32)
        parts = address(workspace)
        statistics_at = parts + 4 * planned.n_parts * Dv
        arguments = (described.address, units, items, planned.n_items, parts, statistics_at)
        work = planned.row_spans * SPAN * (D + Dv)
        parallel(planned.run_items, arguments, _scratch_bytes(D, Dv), work)
        return out, lse, statistics

    return run
