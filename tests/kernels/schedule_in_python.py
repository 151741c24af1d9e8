"""The arithmetic of the Hopper forward's schedule, run by Python."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from lockstep.kernels.hopper.forward.scheduling.schedule import (
    BAD,
    LONGEST_FIRST,
    ORDER_HEAD,
    ORDER_NUMBERS,
    Schedule,
)


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


@cache
def in_python(method: str) -> Callable:
    """A method of `Schedule` as Python runs it."""
    return as_python(getattr(Schedule, method))


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
        "Tile": lambda exists, head, _kv_head, _batch, q_idx, q_start, *_: (
            exists,
            head,
            q_idx,
            q_start,
        ),
    }
    exec("from __future__ import annotations\n" + textwrap.dedent(source), space)
    return space[function.fn.__name__]
