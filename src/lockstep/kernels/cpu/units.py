"""How a forward is cut into work for threads: units of query rows, and items of their spans.

A unit is up to ROWS query rows of one KV head, and those of a head are about equal. It is one item,
or several that have some of its spans each. None of this shows in the bits: see `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep import forks
from lockstep.kernels.cpu.arithmetic.block import ROWS, SPAN, padded, rows_range
from lockstep.kernels.cpu.arithmetic.narrow import NARROW
from lockstep.kernels.cpu.call.arguments import argument, record_at
from lockstep.kernels.cpu.call.record import of_sequence, variants
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.vectors import LANES

UNIT = np.dtype(
    [
        ("b", np.int64),
        ("h", np.int64),
        ("first_row", np.int64),
        ("n_rows", np.int64),
        ("first_span", np.int64),
        ("n_spans", np.int64),
        ("workspace", np.int64),  # its first part there; −1: folded on the fly
        ("pieces", np.int64),  # items it goes into, and how many of them are done
        ("done", np.int64),
    ]
)
ITEM = np.dtype([("unit", np.int64), ("first_span", np.int64), ("last_span", np.int64)])
UNIT_BYTES, ITEM_BYTES = UNIT.itemsize, ITEM.itemsize
DONE = UNIT.fields["done"][1]  # type: ignore[index]
unit_at, item_at = record_at(UNIT), record_at(ITEM)
# With more units than this for each thread, it does not matter how long the last ones take.
UNITS_PER_THREAD = 8
# Units have this many rows, or a multiple of it: all LANES divide it.
STEP = 48
# What it costs to lay a span out for a unit, and what it costs in addition to keep parts of spans
# for a merge: as many rows, about, could be multiplied with it, and a share of them.
LAYOUT_ROWS = 16
MERGE = 0.2
# Splitting one unit's spans keeps one part per row and span: stay below this many floats.
WORKSPACE_LIMIT = 16 << 20


class Cut(NamedTuple):
    """How query rows are cut into units: up to ``step`` rows each, ``n_units`` of them, and
    whether their spans are shared out as well."""

    step: int
    n_units: int
    split: bool


def choose_cut(n_rows: Sequence[int], n_keys: Sequence[int], heads: int, Dv: int) -> Cut:
    """The cut that keeps threads busy, given rows and keys of each sequence's KV heads.

    Every unit lays out its keys for itself, so few large units cost less than many small ones, if
    they are enough for all threads. Where there are not rows enough, spans are shared out.
    """
    threads = forks.threads()
    whole = heads * sum(_n_units(n, ROWS) for n in n_rows)
    if whole >= UNITS_PER_THREAD * threads or max(n_rows, default=0) <= NARROW:
        return Cut(ROWS, whole, split=False)
    rows, best, cut = heads * sum(n_rows), float("inf"), Cut(ROWS, whole, split=False)
    for step in range(ROWS, 0, -STEP):
        n_units = heads * sum(_n_units(n, step) for n in n_rows)
        cost = -(-n_units // threads) * (rows / n_units + LAYOUT_ROWS)
        if cost < best:
            best, cut = cost, Cut(step, n_units, split=False)
    n_spans = -(-max(n_keys) // SPAN)
    parts = heads * sum(n * -(-keys // SPAN) for n, keys in zip(n_rows, n_keys, strict=True))
    if n_spans <= 1 or parts * Dv > WORKSPACE_LIMIT:
        return cut
    # Each thread has its share, and waits for one span at the end.
    shared = rows / threads * (1 + MERGE) + (rows / whole + LAYOUT_ROWS) / n_spans
    return Cut(ROWS, whole, split=True) if shared < best else cut


def _n_units(rows: int, step: int) -> int:
    return -(-rows // step)


def has_narrow(rows: int, step: int) -> bool:
    """Whether one of the units of a KV head with so many rows is narrow."""
    first = _first_row.py_func(rows, _n_units(rows, step) - 1, step) if rows else 0
    return 0 < rows - first <= NARROW


@compiled
def _first_row(rows, i, step):
    """Where unit i of a KV head with so many rows begins: units have whole tiles, about as many."""
    tiles, n_units = (rows + LANES - 1) // LANES, (rows + step - 1) // step
    return tiles * i // n_units * LANES


@compiled
def _list_units(call, units, step):
    """Fill the table of units; long units of a causal call come first. None is split yet."""
    at = 0
    for b in range(call.B):
        rows = call.G * of_sequence(call.q_len, b)
        for i in range(padded(rows, step) // step - 1, -1, -1):
            first = _first_row(rows, i, step)
            n_rows = min(_first_row(rows, i + 1, step), rows) - first
            lo, hi = rows_range(call, b, first, n_rows)
            first_span = lo // SPAN if lo < hi else 0
            n_spans = padded(hi, SPAN) // SPAN - first_span if lo < hi else 0
            for h in range(call.Hkv):
                unit = unit_at(units + at * UNIT_BYTES)
                unit.b, unit.h = b, h
                unit.first_row, unit.n_rows = first, n_rows
                unit.first_span, unit.n_spans = first_span, n_spans
                unit.workspace = -1
                unit.pieces, unit.done = 1, 0
                at += 1


@compiled
def max_pieces(threads, n_units):
    return -(-16 * threads // n_units)


@compiled
def _split_units(units, n_units, split, threads):
    """Give units their parts in the workspace; returns how many there are, and the work.

    Narrow units always keep their parts; others where spans are to be shared out. A split unit
    goes into items enough for every thread, and few enough to be worth it.
    """
    n_parts = total = 0
    for i in range(n_units):
        unit = unit_at(units + i * UNIT_BYTES)
        total += unit.n_rows * unit.n_spans
        if unit.n_rows <= NARROW or (split and unit.n_spans > 1):
            unit.workspace = n_parts
            n_parts += unit.n_rows * unit.n_spans
            unit.pieces = max(1, min(unit.n_spans, max_pieces(threads, n_units)))
    return n_parts, total


@compiled
def _list_items(units, n_units, items):
    """Fill the table of items; returns how many there are."""
    at = 0
    for i in range(n_units):
        unit = unit_at(units + i * UNIT_BYTES)
        for piece in range(unit.pieces):
            item = item_at(items + at * ITEM_BYTES)
            item.unit = i
            item.first_span = unit.first_span + unit.n_spans * piece // unit.pieces
            item.last_span = unit.first_span + unit.n_spans * (piece + 1) // unit.pieces
            at += 1
    return at


@variants
def plan(call_at):
    def run(arguments):
        """Arguments: call, threads, how many units, units, items, results, rows of a unit, and
        whether spans are shared out.

        Results: how many parts, how many items, rows × spans.
        """
        call, threads = call_at(argument(arguments, 0)), argument(arguments, 1)
        n_units, units = argument(arguments, 2), argument(arguments, 3)
        items, results = argument(arguments, 4), argument(arguments, 5)
        _list_units(call, units, argument(arguments, 6))
        n_parts, total = _split_units(units, n_units, argument(arguments, 7), threads)
        scalar.store_word(n_parts, results)
        scalar.store_word(_list_items(units, n_units, items), results + 8)
        scalar.store_word(total, results + 16)

    return run
