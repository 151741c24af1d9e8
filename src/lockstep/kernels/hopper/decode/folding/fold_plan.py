"""Sizes of the second kernel, which folds parts: they change no bit."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.kernels.hopper.decode.plan import (
    NARROW_ROWS,
    columns_of,
    most_spans,
    rows_of,
    tile_rows_of,
)
from lockstep.problem import AttentionProblem

# Parts of a head from which on several warps share a row, if programs to an SM are so few.
DEEP_PARTS, DEEP_PROGRAMS = 64, 2
# Units to an SM up to which there is a program for each, and programs to an SM that share more of
# them; the most slots. Units of tall tiles up to which they are small, unless parts are many.
FOLD_UNITS, FOLD_PROGRAMS, MOST_SLOTS = 8, 6, 512
TALL_UNITS, TALL_PARTS = 3, 32
# Columns of a unit at most, and numbers of all its rows, where threads have four numbers each; and
# parts that they load at once.
FOLD_COLUMNS, FOLD_NUMBERS, FOLD_PARTS = 128, 512, 8


@dataclass(frozen=True)
class FoldPlan:
    """Sizes of the second kernel."""

    rows: int  # of a unit
    columns: int
    warps: int
    batch: int  # parts that are loaded at once
    batches: int  # of these that are under way or at work; 0 for parts in registers


# A warp for each row; and four, where parts are many and rows few.
FOLD_PLAN = FoldPlan(rows=4, columns=32, warps=4, batch=32, batches=2)
DEEP_FOLD_PLAN = FoldPlan(rows=1, columns=32, warps=4, batch=128, batches=1)


def fold_plan(problem: AttentionProblem, n_slots: int, n_processors: int) -> FoldPlan:
    """Sizes of the second kernel, which change no bit: four warps for a row were faster with many
    parts of query-invariant calls, and as fast with others. Of other calls, those whose units would
    be many have larger ones."""
    if problem.query_invariant:
        n_units = _fold_units(problem, n_slots, DEEP_FOLD_PLAN)
        is_deep = most_spans(problem) >= DEEP_PARTS and n_units <= DEEP_PROGRAMS * n_processors
        return DEEP_FOLD_PLAN if is_deep else FOLD_PLAN
    is_tall = rows_of(problem) > NARROW_ROWS and most_spans(problem) <= TALL_PARTS
    most = TALL_UNITS if is_tall else FOLD_UNITS
    if _fold_units(problem, n_slots, FOLD_PLAN) <= most * n_processors:
        return FOLD_PLAN
    columns = min(columns_of(problem.Dv), FOLD_COLUMNS)
    return FoldPlan(FOLD_NUMBERS // columns, columns, warps=4, batch=FOLD_PARTS, batches=0)


def _fold_units(problem: AttentionProblem, n_slots: int, sizes: FoldPlan) -> int:
    blocks = -(-problem.Dv // sizes.columns)
    return n_slots * -(-tile_rows_of(problem) // sizes.rows) * blocks


def fold_programs(
    problem: AttentionProblem, sizes: FoldPlan, n_slots: int, n_processors: int
) -> int:
    """How many programs the second kernel has with these sizes: `units.py`."""
    n_units = _fold_units(problem, n_slots, sizes)
    return n_units if n_units <= FOLD_UNITS * n_processors else FOLD_PROGRAMS * n_processors
