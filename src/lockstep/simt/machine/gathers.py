"""Loops that only add up: `for k in range(n): total += a[i, k] * b[k, j]`, all rounds at once.

A round of such a loop asks shared memory for little and computes little, so that driving it takes
longer than doing it. Here the loads of many rounds are one gather each. The rounds are then added
in their order, and everything is counted as many times as there are rounds: results, counts and
hazards are those of the loop. Where a round could do something else (leave an array, find it not
written, race) the loop runs as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lockstep.simt import ir
from lockstep.simt.types import Scalar, float32

from . import values
from .addresses import Ranges, outside
from .control import Control, ForLoop
from .frames import Frame
from .memory import SharedArray
from .records.counters import WORD, Site, StraightLine

STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "max": values.maximum,
    "min": values.minimum,
}
FEWEST = 4  # rounds that are worth it
CHUNK = 1 << 17  # elements of a gather, about what a cache holds


class Load(NamedTuple):
    """One load of the body. The loop's counter stands as None in `index`."""

    site: Site
    array: Any
    index: tuple[Any, ...]


def sum_of(loop: ir.For) -> tuple[str, str, ir.Expr] | None:
    """Target, step and summand of a loop that only adds up; None for any other."""
    if len(loop.body) != 1 or not isinstance(loop.body[0], ir.Assign):
        return None
    (stmt,) = loop.body
    value = stmt.value
    if isinstance(value, ir.Binary) and value.op == "+":
        step, first, summand = "+", value.left, value.right
    elif isinstance(value, ir.Math) and value.name in ("max", "min"):
        step, (first, summand) = value.name, value.args
    else:
        return None
    adds = isinstance(first, ir.Var) and first.name == stmt.target and value.type == float32
    return (stmt.target, step, summand) if adds and _simple(summand, loop.var, stmt) else None


def _simple(summand: ir.Expr, counter: str, stmt: ir.Assign) -> bool:
    """Whether it is made of shared loads and arithmetic, the counter being an index alone."""
    indices: set[int] = set()
    loads = 0
    for expr in ir.walk_expr(summand):
        if isinstance(expr, ir.Load):
            loads += 1
            dtype = expr.array.dtype
            if expr.array.space is not ir.Space.SHARED or not isinstance(dtype, Scalar):
                return False
            if not dtype.is_float:
                return False
            for part in expr.index:
                whole = isinstance(part, ir.Var) and part.name == counter
                if not whole and any(_reads(e, counter) for e in ir.walk_expr(part)):
                    return False
                indices |= {id(e) for e in ir.walk_expr(part)}
    for expr in ir.expressions(stmt):
        if isinstance(expr, ir.Var) and expr.maybe_unassigned:
            return False
    for expr in ir.walk_expr(summand):
        if id(expr) in indices or isinstance(expr, ir.Load) or expr.const is not None:
            continue
        if isinstance(expr, ir.Var) and expr.name not in (counter, stmt.target):
            continue
        arithmetic = isinstance(expr, ir.Binary) and expr.op in ("+", "-", "*")
        widens = isinstance(expr, ir.Cast) and expr.operand.type.is_storage_only  # type: ignore[union-attr]
        if not (arithmetic or widens) or expr.type != float32:
            return False
    return loads > 0


def _reads(expr: ir.Expr, name: str) -> bool:
    return isinstance(expr, ir.Var) and expr.name == name


def gather(
    loop: ForLoop,
    lines: tuple[StraightLine, ...],
    target: str,
    step: str,
    loads: tuple[Load, ...],
    summand: Callable[[tuple[np.ndarray, ...]], Any],
) -> None:
    """Run all rounds of `loop`, if they are sure to do nothing but add; then it is over."""
    machine, frame = loop.machine, loop.machine.frame
    if not loop.uniform or not machine.gathers or frame.flat or not frame.all_blocks:
        return
    rounds = range(loop.value, loop.stop, loop.step)
    ranges = Ranges()
    if len(rounds) < FEWEST or not all(_is_sure(load, rounds, frame, ranges) for load in loads):
        return
    addresses = [_addresses(load, rounds) for load in loads]
    if not all(_written(load.array, at) for load, at in zip(loads, addresses, strict=True)):
        return
    for load, address in zip(loads, addresses, strict=True):
        _count(load, address, rounds, machine)
    add, total = STEPS[step], machine.v[target]
    chunk = max(1, CHUNK // (frame.threads.size * frame.blocks.size))
    wholes = [_view(load.array.data, at) for load, at in zip(loads, addresses, strict=True)]
    for first in range(0, len(rounds), chunk):
        now = slice(first, first + chunk)
        found = tuple(
            load.array.data.take(address[now], axis=0) if whole is None else whole[now]
            for load, address, whole in zip(loads, addresses, wholes, strict=True)
        )
        for part in summand(found):
            total = add(total, part)
    machine.v[target] = total
    machine.v[loop.name] = rounds[-1]
    for line in lines:
        line.executions += len(rounds)
        line.warps += frame.warps * len(rounds)
        line.lanes += frame.lanes * len(rounds)
        frame.issued += line.cost * len(rounds)
    loop.site.hit(frame, len(rounds) + 1)
    loop.over = True


def _is_sure(load: Load, rounds: range, frame: Frame, ranges: Ranges) -> bool:
    """Whether every round reads inside the array, in order with all writers."""
    array = load.array
    if not isinstance(array, SharedArray) or array.pending is not None:
        return False
    if not array.shadow.only_queues:
        return False
    if any(isinstance(p, np.ndarray) and p.shape != (frame.threads.size, 1) for p in load.index):
        return False
    ends = (rounds[0], rounds[-1])
    return all(
        outside(tuple(end if p is None else p for p in load.index), array.shape, ranges) is False
        for end in ends
    )


def _written(array: SharedArray, address: np.ndarray) -> bool:
    """Whether all of this was written, in all blocks alike."""
    return array.all_valid or (array.valid.shape[1] == 1 and bool(array.valid[address, 0].all()))


def _addresses(load: Load, rounds: range) -> np.ndarray:
    """Elements [rounds, threads or 1]."""
    total = np.zeros((len(rounds), 1), np.int64)
    counter = np.arange(rounds.start, rounds.stop, rounds.step)[:, None]
    for part, stride in zip(load.index, load.array.strides, strict=True):
        if part is None:
            total = total + counter * stride
        elif isinstance(part, np.ndarray):
            total = total + part[:, 0].astype(np.int64)[None, :] * stride
        else:
            total = total + part * stride
    return total


def _view(data: np.ndarray, address: np.ndarray) -> np.ndarray | None:
    """Elements [rounds, threads or 1, blocks] of `data` [elements, blocks] without a copy; None
    where threads are not evenly spaced, or either would go backwards. Rounds always are."""
    rounds, threads = address.shape
    by_round = int(address[1, 0] - address[0, 0]) if rounds > 1 else 0
    by_thread = int(address[0, 1] - address[0, 0]) if threads > 1 else 0
    if by_round < 0 or by_thread < 0:
        return None
    if not np.array_equal(address[0] - address[0, 0], np.arange(threads) * by_thread):
        return None
    row, column = data.strides
    return np.lib.stride_tricks.as_strided(
        data[address[0, 0] :],
        (rounds, threads, data.shape[1]),
        (by_round * row, by_thread * row, column),
        writeable=False,
    )


def _count(load: Load, address: np.ndarray, rounds: range, machine: Control) -> None:
    """Transactions and reads of all rounds. Addresses of a round move together with it, so its
    wavefronts depend on where its first byte lies in a word."""
    site, array, frame = load.site, load.array, machine.frame
    for first, times in _alike(address[:, 0] * array.item + array.base):
        one = address[first][:, None]
        element = int(one[0, 0]) if one.shape[0] == 1 else one
        before = (site.wavefronts, site.ideal_wavefronts)
        machine.transactions.shared(site, frame, element, array.item, array.base, array.item)
        more = times - 1
        site.wavefronts += more * (site.wavefronts - before[0])
        site.ideal_wavefronts += more * (site.ideal_wavefronts - before[1])
        site.hit(frame, more)
        site.bytes += more * frame.lanes * array.item
    array.shadow.read_rounds(frame, load.index, site, rounds)


def _alike(places: np.ndarray) -> list[tuple[int, int]]:
    """The first of evenly spaced bytes that lie at the same place of their words, and how many
    do."""
    if places.size == 1 or (places[1] - places[0]) % WORD == 0:
        return [(0, places.size)]
    _, firsts, times = np.unique(places % WORD, return_index=True, return_counts=True)
    return list(zip(firsts.tolist(), times.tolist(), strict=True))
