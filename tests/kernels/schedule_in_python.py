"""The arithmetic of the Hopper forward's schedule, run by Python."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from lockstep.kernels.hopper.forward import grouped_rows
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import (
    BAD,
    ORDER_HEAD,
    ORDER_NUMBERS,
    sorted_sequence,
)
from lockstep.kernels.hopper.forward.scheduling.schedule import LONGEST_FIRST, Schedule


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


class InPython(SimpleNamespace):
    """A `Schedule`, of which Python runs the methods; heads have tiles of their own, unless HEADS
    says something else."""

    HEADS, SPLIT = 0, False

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Schedule, name):
            raise AttributeError(name)
        return partial(in_python(name), self)


GROUPED_ROWS = (grouped_rows.n_rows, grouped_rows.place, grouped_rows.queries)


@cache
def in_python(method: str) -> Callable:
    """A method of `Schedule` as Python runs it."""
    return as_python(getattr(Schedule, method))


@cache
def _plain(function: Any) -> Callable:
    return as_python(function)


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
    }
    space = {
        "gl": SimpleNamespace(**functions, **more),
        "LONGEST_FIRST": LONGEST_FIRST.value,
        "ORDER_HEAD": ORDER_HEAD.value,
        "ORDER_NUMBERS": ORDER_NUMBERS.value,
        "BAD": BAD.value,
        "BOX": grouped_rows.BOX.value,
        "divide": lambda a, b: a // b,
        "Tile": lambda exists, head, _kv_head, _batch, q_idx, q_start, *_: (
            exists,
            head,
            q_idx,
            q_start,
        ),
    }
    if function not in GROUPED_ROWS:
        space["grouped_rows"] = SimpleNamespace(**{x.fn.__name__: _plain(x) for x in GROUPED_ROWS})
        # It counts across the lanes of a warp.
        space["unsorted_sequence"] = lambda schedule, slot: schedule.unsorted(slot)
        space["sorted_sequence"] = lambda *a: _plain(sorted_sequence)(*a)
    exec("from __future__ import annotations\n" + textwrap.dedent(source), space)
    return space[function.fn.__name__]
