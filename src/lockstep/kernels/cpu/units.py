"""How a forward is cut into work for threads: units of query rows, and items of their spans.

A unit is up to ROWS query rows of one KV head, or half as many. It is one item, or several that
have some of its spans each. None of this shows in the bits: see `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.kernels.cpu.arithmetic.narrow import NARROW
from lockstep.kernels.cpu.arithmetic.wide import ROWS, SPAN, padded, rows_range
from lockstep.kernels.cpu.call.arguments import argument, record_at
from lockstep.kernels.cpu.call.record import of_sequence, variants
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled

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
# Threads that have fewer units each wait too long for the last ones.
UNITS_PER_THREAD = 4
# Splitting one unit's spans keeps one part per row and span: stay below this many floats.
WORKSPACE_LIMIT = 16 << 20


def choose_rows(n_rows: Sequence[int], Hkv: int, threads: int) -> tuple[int, int]:
    """How many rows a unit has, and how many units there are, given the rows of a KV head.

    Halves of a block cost less than spans that are split, where they are enough for all threads.
    """
    blocks, halves = (Hkv * sum(-(-n // rows) for n in n_rows) for rows in (ROWS, ROWS // 2))
    if blocks < UNITS_PER_THREAD * threads <= halves:
        return ROWS // 2, halves
    return ROWS, blocks


@compiled
def _list_units(call, units, step):
    """Fill the table of units; long units of a causal call come first. None is split yet."""
    at = 0
    for b in range(call.B):
        rows = call.G * of_sequence(call.q_len, b)
        for first in range(padded(rows, step) - step, -1, -step):
            n_rows = min(step, rows - first)
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
def _split_units(units, n_units, Dv, threads):
    """Decide which units to split among threads; returns how many parts that makes, and the work.

    Narrow units always keep their parts; others are split where there are too few of them. A
    split unit goes into items enough for every thread, and few enough to be worth it.
    """
    total = 0
    for i in range(n_units):
        unit = unit_at(units + i * UNIT_BYTES)
        total += unit.n_rows * unit.n_spans
    few = n_units < UNITS_PER_THREAD * threads and total * Dv <= WORKSPACE_LIMIT
    n_parts = 0
    for i in range(n_units):
        unit = unit_at(units + i * UNIT_BYTES)
        if unit.n_rows <= NARROW or (few and unit.n_spans > 1):
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
        """Arguments: call, threads, how many units, units, items, results, rows of a unit.

        Results: how many parts, how many items, rows × spans.
        """
        call, threads = call_at(argument(arguments, 0)), argument(arguments, 1)
        n_units, units = argument(arguments, 2), argument(arguments, 3)
        items, results = argument(arguments, 4), argument(arguments, 5)
        _list_units(call, units, argument(arguments, 6))
        n_parts, total = _split_units(units, n_units, call.Dv, threads)
        scalar.store_word(n_parts, results)
        scalar.store_word(_list_items(units, n_units, items), results + 8)
        scalar.store_word(total, results + 16)

    return run
