"""Lanes and frames: which threads of which blocks are active, and what they see.

A value is a scalar or a two-dimensional array that broadcasts to (threads, blocks); its shape says
what it depends on, so uniform work is done once:

    scalar   the same everywhere          loop counters, arguments
    [T, 1]   the same in every block      thread indices, most shared-memory addresses
    [1, B]   the same within a block      block indices
    [T, B]   everything

Divergence uses no masks. Entering a branch makes a frame that holds only the lanes inside; it is a
grid again if the condition depends on the thread alone or on the block alone, and a flat list of
lanes (values [n, 1]) otherwise. A frame compacts a variable of its parent when it first reads it,
and what it assigned is merged back when it is left.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from lockstep.simt.types import WARP_SIZE, Scalar

from .values import Value, select

MAX_WARPS = 32  # per block


class Vector:
    """A vector value: one array per item."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[Any, ...]):
        self.items = items


def select_vector(test: Value, x: Vector, y: Vector, dtype: Scalar) -> Vector:
    """Item by item."""
    pairs = zip(x.items, y.items, strict=True)
    return Vector(tuple(select(test, a, b, dtype) for a, b in pairs))


class Fragment:
    """A matrix of every active warp: [warps, 16, 16, blocks]."""

    __slots__ = ("data",)

    def __init__(self, data: np.ndarray):
        self.data = data


class ByWarp:
    """Rows of lanes, in the order of `threads`, by the warps that `key` names."""

    def __init__(self, threads: np.ndarray, key: np.ndarray):
        self.threads = threads
        keys, position = np.unique(key, return_inverse=True)
        self.keys, self.of_row = keys, position.reshape(-1)
        self.known_sources: dict[tuple[str, int], np.ndarray] = {}

    @cached_property
    def slot(self) -> np.ndarray:
        """The place of each row in an array [warps * 32]."""
        return self.of_row * WARP_SIZE + self.threads % WARP_SIZE

    @cached_property
    def row_at(self) -> np.ndarray:
        table = np.full(self.keys.size * WARP_SIZE, -1)
        table[self.slot] = np.arange(self.threads.size)
        return table.reshape(-1, WARP_SIZE)

    @cached_property
    def whole(self) -> bool:
        return self.threads.size % WARP_SIZE == 0 and bool(
            np.array_equal(self.slot, np.arange(self.threads.size))
        )

    @cached_property
    def first_row(self) -> np.ndarray:
        lane = (self.row_at >= 0).argmax(axis=1)
        return self.row_at[np.arange(lane.size), lane]

    @cached_property
    def filled_row(self) -> np.ndarray:
        return np.where(self.row_at >= 0, self.row_at, self.first_row[:, None])

    @cached_property
    def lanes(self) -> np.ndarray:
        """Lanes of each warp."""
        return np.bincount(self.of_row, minlength=self.keys.size)

    def sources(self, mode: str, operand: Value) -> np.ndarray:
        """The rows that a shuffle reads, [rows, 1 or columns]; -1 where a lane is not here."""
        key = (mode, operand) if type(operand) is int and 0 <= operand < WARP_SIZE else None
        found = self.known_sources.get(key) if key else None
        if found is None:
            found = self.row_at[self.of_row[:, None], source_lanes(self.threads, mode, operand)]
            if key:
                self.known_sources[key] = found
        return found


def source_lanes(threads: np.ndarray, mode: str, operand: Value) -> np.ndarray:
    """The lane that each thread reads in a shuffle, [threads, 1 or columns]."""
    lane = threads[:, None] % WARP_SIZE
    if mode == "idx":
        shape = np.broadcast_shapes(np.shape(operand), lane.shape)
        return np.broadcast_to(np.asarray(operand) % WARP_SIZE, shape)
    moved = {"down": lane + operand, "up": lane - operand, "xor": lane ^ operand}[mode]
    return np.where((moved >= 0) & (moved < WARP_SIZE), moved, lane)


@lru_cache(maxsize=512)
def _of_threads(threads: bytes) -> ByWarp:
    """Frames come and go with every trip of a loop, but with few sets of threads."""
    numbers = np.frombuffer(threads, np.int64)
    return ByWarp(numbers, numbers // WARP_SIZE)


class Lanes:
    """A set of lanes: all pairs of `threads` and `blocks`, or, flat, both in step.

    `blocks` are columns of the machine's batch, not block numbers.
    """

    def __init__(self, threads: np.ndarray, blocks: np.ndarray, flat: bool, all_blocks: bool):
        self.threads, self.blocks, self.flat = threads, blocks, flat
        self.all_blocks = all_blocks
        self.lanes = threads.size if flat else threads.size * blocks.size

    @property
    def shape(self) -> tuple[int, int]:
        return self.threads.size, 1 if self.flat else self.blocks.size

    @cached_property
    def column(self) -> np.ndarray:
        """Block column of every lane, broadcastable to `shape`."""
        return self.blocks[:, None] if self.flat else self.blocks[None, :]

    @cached_property
    def by_warp(self) -> ByWarp:
        """How the rows fall into warps."""
        if self.flat:
            return ByWarp(self.threads, self.threads // WARP_SIZE + self.blocks * MAX_WARPS)
        return _of_threads(self.threads.tobytes())

    @property
    def warp_keys(self) -> np.ndarray:
        """Sorted warps: numbers in a grid, block column * MAX_WARPS + number in a flat frame."""
        return self.by_warp.keys

    @property
    def warp_of_row(self) -> np.ndarray:
        """Position in `warp_keys` of each row."""
        return self.by_warp.of_row

    @cached_property
    def warps(self) -> int:
        return self.warp_keys.size * (1 if self.flat else self.blocks.size)

    @property
    def row_at(self) -> np.ndarray:
        """The row at each slot, [warps, 32]; -1 where the lane is not here."""
        return self.by_warp.row_at

    @property
    def whole_warps(self) -> bool:
        """Whether the rows are whole warps, lane by lane."""
        return self.by_warp.whole

    @property
    def first_row(self) -> np.ndarray:
        """Row of the first lane of every warp."""
        return self.by_warp.first_row

    @property
    def filled_row(self) -> np.ndarray:
        """`row_at` with the row of the warp's first lane in place of missing ones."""
        return self.by_warp.filled_row

    @cached_property
    def layout(self) -> bytes:
        """Identifies which threads are here."""
        return self.threads.tobytes()

    def lanes_per_warp(self) -> np.ndarray:
        return self.by_warp.lanes

    def position(self, where: np.ndarray) -> tuple[int, int]:
        """Thread and block column of the first lane in a boolean array of any broadcast shape."""
        row, col = np.argwhere(where)[0] if where.ndim == 2 else (0, 0)
        if self.flat:
            return int(self.threads[row]), int(self.blocks[row])
        return int(self.threads[row]), int(self.blocks[col])


class Variables(dict):
    """Variables of a frame. A miss compacts the parent's value."""

    __slots__ = ("frame",)

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame

    def __missing__(self, name: str) -> Any:
        frame = self.frame
        if frame.parent is None:
            raise KeyError(name)
        value = self[name] = frame.compact(frame.parent.variables[name])
        return value


class Frame(Lanes):
    """Lanes with variables. `rows` and `columns` select them from the parent; flat frames made
    from grids use both, in step."""

    def __init__(
        self,
        parent: Frame | None,
        threads: np.ndarray,
        blocks: np.ndarray,
        flat: bool = False,
        all_threads: bool = False,
        all_blocks: bool = False,
        rows: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ):
        super().__init__(threads, blocks, flat, all_blocks)
        self.parent = parent
        self.all_threads = all_threads
        self.rows, self.columns = rows, columns
        self.variables = Variables(self)
        self.issued = 0  # warp instructions since the depth was last brought up to date

    def narrow(self, condition: np.ndarray) -> Frame:
        """The frame of the lanes where `condition` (some true, some false) holds."""
        r, c = condition.shape
        if self.flat:
            rows = np.flatnonzero(condition[:, 0])
            return Frame(self, self.threads[rows], self.blocks[rows], flat=True, rows=rows)
        if c > 1 and r > 1:
            by_row, by_column = condition.any(axis=1), condition.any(axis=0)
            if np.array_equal(by_column, condition.all(axis=0)):
                condition = by_column[None, :]
            elif np.array_equal(by_row, condition.all(axis=1)):
                condition = by_row[:, None]
        r, c = condition.shape
        if c == 1:
            rows = np.flatnonzero(condition[:, 0])
            all_blocks = self.all_blocks
            return Frame(self, self.threads[rows], self.blocks, all_blocks=all_blocks, rows=rows)
        if r == 1:
            columns = np.flatnonzero(condition[0])
            all_threads = self.all_threads
            blocks = self.blocks[columns]
            return Frame(self, self.threads, blocks, all_threads=all_threads, columns=columns)
        rows, columns = np.nonzero(condition)
        threads, blocks = self.threads[rows], self.blocks[columns]
        return Frame(self, threads, blocks, flat=True, rows=rows, columns=columns)

    def compact(self, value: Any) -> Any:
        """A value of the parent as this frame's lanes see it."""
        if isinstance(value, np.ndarray):
            return self._select(value)
        if isinstance(value, Vector):
            return Vector(tuple(self.compact(item) for item in value.items))
        if isinstance(value, Fragment):
            warps, columns = self._fragment_selection()
            data = value.data
            if columns is None:
                return Fragment(data[warps])
            if data.shape[3] == 1:
                return Fragment(data if warps is None else data[warps])
            if warps is None:
                return Fragment(data[..., columns])
            return Fragment(data[warps, :, :, columns][..., None])
        return value

    def _select(self, value: np.ndarray) -> np.ndarray:
        if not self.flat:
            if self.rows is not None:
                return value[self.rows] if value.shape[0] != 1 else value
            return value[:, self.columns] if value.shape[1] != 1 else value
        rows = self.rows if value.shape[0] != 1 else None
        columns = self.columns if value.shape[1] != 1 else None
        if rows is None and columns is None:
            return value
        if rows is None:
            return value[0, columns][:, None]
        return value[rows, 0 if columns is None else columns][:, None]

    def _fragment_selection(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Indices of this frame's warps, and of its columns where those are selected too."""
        assert self.parent is not None
        if not self.flat:
            if self.rows is None:
                return None, self.columns
            return np.searchsorted(self.parent.warp_keys, self.warp_keys), None
        if self.parent.flat:
            return np.searchsorted(self.parent.warp_keys, self.warp_keys), None
        warps = np.searchsorted(self.parent.warp_keys, self.warp_keys % MAX_WARPS)
        columns = np.searchsorted(self.parent.blocks, self.warp_keys // MAX_WARPS)
        return warps, columns

    def merge_into_parent(self, name: str, dtype: np.dtype | None) -> None:
        """Give the parent this frame's value of `name`; lanes without one become NaN or zero."""
        parent = self.parent
        assert parent is not None
        new = self.variables[name]
        try:
            old = parent.variables[name]
        except KeyError:
            old = None
        parent.variables[name] = self._merged(old, new, dtype)

    def _merged(self, old: Any, new: Any, dtype: np.dtype | None) -> Any:
        if isinstance(new, Fragment):
            return Fragment(self._merge_fragment(old, new.data))
        if isinstance(new, Vector):
            before = old.items if old is not None else (None,) * len(new.items)
            items = zip(before, new.items, strict=True)
            return Vector(tuple(self._merged(o, n, dtype) for o, n in items))
        if old is new or (old is not None and np.isscalar(old) and np.isscalar(new) and old == new):
            return old
        if old is None:
            old = np.nan if dtype is not None and dtype.kind == "f" else 0
        if dtype is None:
            dtype = _narrow(np.result_type(old, new))
        old, new = (np.asarray(v, dtype) for v in (old, new))
        assert self.parent is not None
        height, width = self.parent.shape
        if not self.flat:
            if self.rows is not None:
                width = max(v.shape[1] if v.ndim else 1 for v in (old, new))
            else:
                height = max(v.shape[0] if v.ndim else 1 for v in (old, new))
        out = np.empty((height, width), dtype)
        out[...] = old
        if self.flat:
            flat = new[:, 0] if new.ndim else new
            out[self.rows, 0 if self.columns is None else self.columns] = flat
        elif self.rows is not None:
            out[self.rows] = new
        else:
            out[:, self.columns] = new
        return out

    def _merge_fragment(self, old: Fragment | None, new: np.ndarray) -> np.ndarray:
        assert self.parent is not None
        warps, columns = self._fragment_selection()
        before = np.full((1, 16, 16, 1), np.nan, np.float32) if old is None else old.data
        count = self.parent.warp_keys.size
        width = max(before.shape[3], new.shape[3])
        if columns is not None:
            width = self.parent.blocks.size
        out = np.empty((count, 16, 16, width), new.dtype)
        out[...] = before
        if columns is None:
            out[warps] = new
        elif warps is None:
            out[..., columns] = new
        else:
            out[warps, :, :, columns] = new[..., 0]
        return out


def _narrow(dtype: np.dtype) -> np.dtype:
    """Python scalars count as 64 bits to NumPy; nothing in a kernel is."""
    return {"i8": np.dtype(np.int32), "f8": np.dtype(np.float32)}.get(dtype.str[1:], dtype)
