"""Loads, stores, vectors and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .addresses import Ranges, linear, outside
from .control import Control
from .frames import Lanes, Vector
from .hazards import (
    ASYNC,
    MISALIGNED,
    OUT_OF_BOUNDS,
    UNINITIALISED_LOCAL,
    UNINITIALISED_SHARED,
)
from .memory import GlobalArray, LocalArray, Memory, SharedArray
from .records.counters import Site
from .values import NUMPY, Value, i32, maximum, minimum

Index = tuple[Value, ...]


class Accesses(Control):
    """Memory accesses of lanes, with every check and every counter."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.ranges = Ranges()

    def load(self, site: Site, array: Memory, index: Index) -> Value:
        index = self.inside(site, array, index)
        address = linear(index, array.strides)
        self.note_read(site, array, address, self.frame, index)
        self.count(site, array, address, array.item, self.frame)
        return array.gather(address, self.frame)

    def store(self, site: Site, array: Memory, index: Index, value: Value) -> None:
        bad = outside(index, array.shape, self.ranges)
        if bad is not False:
            self.out_of_bounds(site, array, index, bad)
            self.by_lanes(~bad, lambda i, v: self.store(site, array, i, v), index, value)
            return
        address = linear(index, array.strides)
        self.note_write(site, array, address, self.frame, value)
        self.count(site, array, address, array.item, self.frame)
        array.scatter(address, value, self.frame)

    def by_lanes(
        self, condition: Value, action: Callable[..., None], index: Index, value: Value = 0
    ) -> None:
        """`action(index, value)` by the lanes where `condition` holds, with their values."""
        outer = self.frame
        keys = [f"$index{i}" for i in range(len(index))]
        self.v.update(zip(keys, index, strict=True))
        self.v["$value"] = value
        if self.enter(condition):
            action(tuple(self.v[key] for key in keys), self.v["$value"])
            self.leave(outer, ())

    # Checks and counters, one address per lane

    def inside(self, site: Site, array: Memory, index: Index) -> Index:
        """The index, moved inside where a lane would leave the array; that is reported."""
        bad = outside(index, array.shape, self.ranges)
        if bad is False:
            return index
        self.out_of_bounds(site, array, index, bad)
        return tuple(
            np.clip(i, 0, n - 1) if isinstance(i, np.ndarray) else min(max(i, 0), n - 1)
            for i, n in zip(index, array.shape, strict=True)
        )

    def out_of_bounds(self, site: Site, array: Memory, index: Index, bad: Any) -> None:
        first = np.argwhere(bad)[0]
        values = []
        for part in index:
            if isinstance(part, np.ndarray):
                place = tuple(min(p, n - 1) for p, n in zip(first, part.shape, strict=True))
                values.append(int(part[place]))
            else:
                values.append(int(part))
        text = f"{array.name}[{', '.join(map(str, values))}] of shape {tuple(array.shape)}"
        thread, block = self.lane_name(bad)
        self.hazards.report(OUT_OF_BOUNDS, site, text, thread, block, array.name)

    def note_read(
        self, site: Site, array: Memory, address: Value, lanes: Lanes, index: Index = ()
    ) -> None:
        if isinstance(array, SharedArray):
            if array.pending is not None:
                self.check_pending(site, array, address, lanes, "reads")
            bad = array.first_invalid(address, lanes)
            if bad is not None:
                self._uninitialised(UNINITIALISED_SHARED, site, array, bad, lanes)
            array.shadow.read(lanes, address, site, index)
        elif isinstance(array, LocalArray):
            bad = array.first_invalid(address, lanes)
            if bad is not None:
                self._uninitialised(UNINITIALISED_LOCAL, site, array, bad, lanes)
        elif array.shadow is not None:
            element = address + array.shadow_start
            array.shadow.read(lanes, element, site, self.clock, self.block_numbers, array.element)

    def _uninitialised(
        self, kind: str, site: Site, array: Memory, bad: np.ndarray, lanes: Lanes
    ) -> None:
        thread, block = self.lane_name(bad, lanes)
        text = f"reads '{array.name}' where nothing was written"
        self.hazards.report(kind, site, text, thread, block, array.name)

    def note_write(
        self, site: Site, array: Memory, address: Value, lanes: Lanes, values: Value = None
    ) -> None:
        if isinstance(array, SharedArray):
            if array.pending is not None:
                self.check_pending(site, array, address, lanes, "overwrites")
            array.mark_valid(address, lanes)
            array.shadow.write(lanes, address, site, values)
        elif isinstance(array, GlobalArray) and array.shadow is not None:
            element = address + array.shadow_start
            array.shadow.write(
                lanes, element, site, self.clock, self.block_numbers, array.element, values
            )

    def check_pending(
        self, site: Site, array: SharedArray, address: Value, lanes: Lanes, does: str
    ) -> None:
        """Elements an asynchronous copy may still be writing; see `pipeline`."""
        assert array.pending is not None
        column = lanes.column
        marks = array.pending[address, column]
        bad = marks >= 0
        if not np.any(bad):
            return
        bad = np.atleast_2d(bad)
        thread, block = self.lane_name(bad, lanes)
        origin = int(np.atleast_2d(marks)[tuple(np.argwhere(bad)[0])])
        self.hazards.report(
            ASYNC,
            site,
            f"{does} '{array.name}' where an asynchronous copy may still be under way",
            thread,
            block,
            array.name,
            other_site=origin >> 16,
            other_thread=origin & 0xFFFF,
        )

    def count(self, site: Site, array: Memory, address: Value, size: int, lanes: Lanes) -> None:
        """Transactions of one access of `size` bytes per lane."""
        if isinstance(array, SharedArray):
            self.transactions.shared(site, lanes, address, array.item, array.base, size)
        elif isinstance(array, GlobalArray):
            place = address.astype(np.int64) if isinstance(address, np.ndarray) else address
            self.transactions.global_(site, lanes, place * array.item + array.address, size)
        else:
            site.hit(lanes)
            site.bytes += lanes.lanes * size

    # Vectors

    def beyond(self, site: Site, array: Memory, index: Index, width: int) -> Any:
        """The lanes of which one of `width` neighbouring elements is outside the array, a boolean
        array; False if there are none. They are reported as a hazard."""
        last = (*index[:-1], i32(index[-1] + (width - 1)))
        bad = outside(index, array.shape, self.ranges)
        if bad is False:
            index, bad = last, outside(last, array.shape, self.ranges)
        if bad is not False:
            self.out_of_bounds(site, array, index, bad)
        return bad

    def check_vector(self, site: Site, array: Memory, index: Index, width: int) -> Value:
        """The address of a vector inside the array; its alignment is checked."""
        address = linear(index, array.strides)
        self.check_alignment(site, array, address, width * array.item)
        if array.strides[-1] != 1:
            thread, block = self.lane_name(np.ones((1, 1), bool))
            text = f"elements of '{array.name}' are not neighbours along the last axis"
            self.hazards.report(MISALIGNED, site, text, thread, block, array.name)
        return address

    def check_alignment(self, site: Site, array: Memory, address: Value, size: int) -> None:
        base = array.base if isinstance(array, SharedArray) else array.address  # type: ignore
        place = address.astype(np.int64) if isinstance(address, np.ndarray) else address
        bad = np.atleast_2d((place * array.item + base) % size != 0)
        if bad.any():
            thread, block = self.lane_name(bad)
            text = f"{size} bytes of '{array.name}' at an address that is no multiple of {size}"
            self.hazards.report(MISALIGNED, site, text, thread, block, array.name)

    def vload(self, site: Site, array: Memory, index: Index, width: int) -> Vector:
        if self.beyond(site, array, index, width) is not False:
            shape = (*array.shape[:-1], array.shape[-1] - width + 1)
            index = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, shape, strict=True))
        address = self.check_vector(site, array, index, width)
        self.count(site, array, address, width * array.item, self.frame)
        if isinstance(array, SharedArray) and array.all_valid and array.pending is None:
            array.shadow.read_vector(self.frame, address, site, width)
            return Vector(array.gather_vector(address, self.frame, width))
        items = []
        for k in range(width):
            self.note_read(site, array, address + k, self.frame)
            items.append(array.gather(address + k, self.frame))
        return Vector(tuple(items))

    def vstore(self, site: Site, array: Memory, index: Index, vector: Vector) -> None:
        width = len(vector.items)
        bad = self.beyond(site, array, index, width)
        if bad is not False:
            self.by_lanes(~bad, lambda i, v: self.vstore(site, array, i, v), index, vector)
            return
        address = self.check_vector(site, array, index, width)
        self.count(site, array, address, width * array.item, self.frame)
        for k, item in enumerate(vector.items):
            self.note_write(site, array, address + k, self.frame, item)
            array.scatter(address + k, item, self.frame)

    # Atomics

    def atomic(
        self,
        site: Site,
        array: Memory,
        index: Index,
        op: str,
        value: Value,
        compare: Value = None,
    ) -> Value:
        """Lanes take turns in thread order; the value is what each found."""
        index = self.inside(site, array, index)
        address = linear(index, array.strides)
        if isinstance(array, SharedArray):
            bad = array.first_invalid(address, self.frame)
            if bad is not None:
                self._uninitialised(UNINITIALISED_SHARED, site, array, bad, self.frame)
        self.note_write(site, array, address, self.frame)
        self.count(site, array, address, array.item, self.frame)
        if isinstance(array, GlobalArray) and self.hazards.order is not None:
            element = address + array.shadow_start
            where = id(array.shadow)
            self.hazards.order.atomic(self.frame, element, where, self.block_numbers, self.clock)
        frame, dtype = self.frame, NUMPY[array.dtype]
        place = np.broadcast_to(np.asarray(address, np.int64), frame.shape)
        if isinstance(array, SharedArray):
            memory = array.data.reshape(-1)
            place = place * array.data.shape[1] + frame.column
        else:
            memory = array.flat  # type: ignore[union-attr]
        # blocks take turns whole, as a GPU that runs them one after the other would
        turn = (lambda a: np.ascontiguousarray(a.T).reshape(-1)) if not frame.flat else np.ravel
        places = turn(place)
        operands = turn(np.broadcast_to(np.asarray(value, dtype), frame.shape))
        wanted = None
        if compare is not None:
            wanted = turn(np.broadcast_to(np.asarray(compare, dtype), frame.shape))
        old = take_turns(memory, places, operands, op, wanted)
        return old.reshape(frame.shape[::-1]).T if not frame.flat else old.reshape(frame.shape)


def take_turns(
    memory: np.ndarray, places: np.ndarray, operands: np.ndarray, op: str, wanted: Any
) -> np.ndarray:
    """Apply `memory[place] = memory[place] op operand` in order; returns the values found."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    fresh = np.r_[True, sorted_places[1:] != sorted_places[:-1]]
    starts = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    old = np.empty(places.size, memory.dtype)
    if op in ("add", "sub"):
        signed = operands[order] if op == "add" else (0 - operands[order]).astype(memory.dtype)
        running = np.cumsum(signed, dtype=memory.dtype)
        before = running - signed
        found = memory[sorted_places] + (before - before[starts][group])
        old[order] = found
        ends = np.r_[starts[1:] - 1, places.size - 1]
        memory[sorted_places[ends]] = found[ends] + signed[ends]
        return old
    rank = np.arange(places.size) - starts[group]
    for turn in range(int(rank.max()) + 1):
        now = order[rank == turn]
        current = memory[places[now]]
        old[now] = current
        memory[places[now]] = _apply(op, current, operands[now], wanted, now)
    return old


def _apply(op: str, current: np.ndarray, operand: np.ndarray, wanted: Any, now: Any) -> np.ndarray:
    if op == "cas":
        return np.where(current == wanted[now], operand, current)
    return {
        "min": minimum,
        "max": maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda _, new: new,
    }[op](current, operand)
