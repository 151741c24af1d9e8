"""The arithmetic of the Hopper forward's schedule, run by Python."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from lockstep.kernels.hopper.forward import grouped_rows
from lockstep.kernels.hopper.forward.scheduling import part_rule, tile_parts
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import (
    BAD,
    ORDER_HEAD,
    ORDER_NUMBERS,
    sorted_sequence,
)
from lockstep.kernels.hopper.forward.scheduling.schedule import LONGEST_FIRST, Schedule
from lockstep.kernels.hopper.forward.scheduling.scheduler import has_slots, n_posted, post_parts

# The program that runs, where nothing else is said.
PROGRAM = 4


class Pointer:
    """Where a kernel loads from."""

    def __init__(self, values: list[int], offset: int = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, step: int) -> Pointer:
        return Pointer(self.values, self.offset + step)

    def load(self, mask: bool = True, other: int = 0) -> Integer:
        return Integer(self.values[self.offset] if mask else other)

    def store(self, value: int, mask: bool) -> None:
        if mask:
            self.values[self.offset] = value


class Integer(int):
    """What a kernel loads."""

    def to(self, dtype: object) -> Integer:
        return self


class Keys(NamedTuple):
    """Which part of its keys a tile has."""

    part: int = 0
    n_parts: int = 1
    slot: int = 0
    first_block: int = 0
    end_block: int = 1 << 30

    @staticmethod
    def every(like: int) -> Keys:
        return EVERY


EVERY = Keys()


class InPython(SimpleNamespace):
    """A `Schedule`, of which Python runs the methods; heads have tiles of their own, unless HEADS
    says something else."""

    HEADS, SPLIT, PARTS = 0, False, False

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Schedule, name):
            raise AttributeError(name)
        return partial(in_python(name), self)


TILE_PARTS = (tile_parts.parts_of_tile, tile_parts.keys_of, tile_parts.has_slot_each)
POSTING = (has_slots, n_posted, post_parts, tile_parts.has_slot_each, tile_parts.part_of)
GROUPED_ROWS = (grouped_rows.n_rows, grouped_rows.place, grouped_rows.queries)


@cache
def in_python(method: str) -> Callable:
    """A method of `Schedule` as Python runs it."""
    return as_python(getattr(Schedule, method))


@cache
def _plain(function: Any) -> Callable:
    return as_python(function)


def _later(function: Any, *arguments: Any) -> Any:
    return _plain(function)(*arguments)


def as_python(function: Any, **more: Any) -> Callable:
    """A Gluon function as Python runs it; `more` is what it finds in `gl` besides arithmetic."""
    source = inspect.getsource(function.fn).partition("\n")[2]  # without its decorator
    functions = {
        "minimum": min,
        "maximum": max,
        "cdiv": lambda a, b: -(-a // b),
        "where": lambda condition, a, b: a if condition else b,
        "load": Pointer.load,
        "store": Pointer.store,
        "int32": None,
        "constexpr": int,
        "program_id": lambda _: PROGRAM,
    }
    space = {
        "gl": SimpleNamespace(**functions | more),
        "LONGEST_FIRST": LONGEST_FIRST.value,
        "ORDER_HEAD": ORDER_HEAD.value,
        "ORDER_NUMBERS": ORDER_NUMBERS.value,
        "BAD": BAD.value,
        "BOX": grouped_rows.BOX.value,
        "divide": lambda a, b: a // b,
        "Keys": Keys,
        "Tile": lambda exists, head, _kv_head, _batch, q_idx, q_start, *rest: (
            (exists, head, q_idx, q_start)
            if rest[-1] is EVERY
            else (exists, head, q_idx, q_start, rest[-1])
        ),
        "parts_of": part_rule.parts_of.fn,
        "WANTED": part_rule.WANTED,
        "MOST_PARTS": part_rule.MOST,
        "LEAST_KEYS": part_rule.LEAST_KEYS,
    }
    if function not in GROUPED_ROWS + TILE_PARTS:
        later = {x.fn.__name__: partial(_later, x) for x in POSTING}
        space |= {name: x for name, x in later.items() if name != function.fn.__name__}
        space["tile_parts"] = SimpleNamespace(**{x.fn.__name__: _plain(x) for x in TILE_PARTS})
        space["grouped_rows"] = SimpleNamespace(**{x.fn.__name__: _plain(x) for x in GROUPED_ROWS})
        # It counts across the lanes of a warp.
        space["unsorted_sequence"] = lambda schedule, slot: schedule.unsorted(slot)
        space["sorted_sequence"] = lambda *a: _plain(sorted_sequence)(*a)
    exec("from __future__ import annotations\n" + textwrap.dedent(source), space)
    return space[function.fn.__name__]
