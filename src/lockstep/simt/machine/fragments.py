"""Warp matrix fragments: one 16x16 matrix per warp, handled whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lockstep.simt.types import FRAGMENT, WARP_SIZE

from .addresses import linear
from .frames import Fragment, Lanes
from .hazards import (
    MISALIGNED,
    NOT_WARP_UNIFORM,
    OUT_OF_BOUNDS,
    PARTIAL_WARP,
    UNINITIALISED_REGISTER,
)
from .memory import Memory, SharedArray
from .pipeline import Pipeline
from .records.counters import SECTOR, WORD, Site, distinct_sectors, wavefronts
from .values import Value

ELEMENTS = FRAGMENT * FRAGMENT
POINTER_ALIGNMENT = 32  # bytes, what wmma asks of a pointer
STRIDE_ALIGNMENT = 16  # bytes, what wmma asks of a leading dimension

# Where the registers of an accumulator lie: a lane holds two neighbours in each 8x8 quarter.
QUARTERS = [(r, c) for r in (0, 8) for c in (0, 8)]
LANE_ROW = np.arange(WARP_SIZE) // 4
LANE_COLUMN = np.arange(WARP_SIZE) % 4 * 2


class Fragments(Pipeline):
    """Fill, load, multiply, map and store."""

    def per_warp(self, value: Value, site: Site, what: str) -> np.ndarray:
        """A value that all lanes of a warp share, [warps, columns]."""
        frame = self.frame
        if (frame.row_at < 0).any():
            bad = np.zeros((frame.threads.size, 1), bool)
            short = (frame.row_at < 0).any(axis=1)
            bad[frame.first_row[np.argmax(short)]] = True
            thread, block = self.lane_name(bad)
            self.hazards.report(
                PARTIAL_WARP, site, "some lanes of the warp are not here", thread, block
            )
        if not isinstance(value, np.ndarray):
            return np.full((frame.warp_keys.size, 1), value)
        if value.shape[0] == 1:
            return np.broadcast_to(value, (frame.warp_keys.size, value.shape[1]))
        first = value[frame.first_row]
        bad = value != first[frame.warp_of_row]
        if bad.any():
            thread, block = self.lane_name(bad)
            text = f"{what} is not the same in all lanes of the warp"
            self.hazards.report(NOT_WARP_UNIFORM, site, text, thread, block)
        return first

    def owners(self) -> Lanes:
        """256 accesses per warp, all in the name of its first lane."""
        frame = self.frame
        threads = np.repeat(frame.threads[frame.first_row], ELEMENTS)
        blocks = frame.blocks
        if frame.flat:
            blocks = np.repeat(frame.blocks[frame.first_row], ELEMENTS)
        return Lanes(threads, blocks, frame.flat, frame.all_blocks)

    def fragment_address(
        self, site: Site, array: Memory, index: tuple[Value, ...], ld: Value, layout: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Origin [warps, columns] and elements [warps * 256, columns] of a matrix in memory."""
        origin = self.per_warp(linear(index, array.strides), site, "the address").astype(np.int64)
        stride = int(self.per_warp(ld, site, "the leading dimension").flat[0])
        base = array.base if isinstance(array, SharedArray) else array.address  # type: ignore
        self._check_fragment_alignment(site, array, origin, stride, base)
        major, minor = np.divmod(np.arange(ELEMENTS), FRAGMENT)
        if layout == "col":
            major, minor = minor, major
        offsets = major * stride + minor  # by matrix element, row major
        element = origin[:, None, :] + offsets[None, :, None]
        element = element.reshape(-1, origin.shape[1])
        if element.size and (element.min() < 0 or element.max() >= array.size):
            bad = ((element < 0) | (element >= array.size)).reshape(len(origin), ELEMENTS, -1)
            where = np.zeros((self.frame.threads.size, origin.shape[1]), bool)
            where[self.frame.first_row] = bad.any(axis=1)
            thread, block = self.lane_name(where)
            text = f"a 16x16 matrix at element {int(origin[bad.any(axis=1)][0])} of '{array.name}'"
            text += f" with leading dimension {stride}, shape {tuple(array.shape)}"
            self.hazards.report(OUT_OF_BOUNDS, site, text, thread, block, array.name)
            element = np.clip(element, 0, array.size - 1)
        self.count_fragment(site, array, origin, stride, base)
        return origin, element

    def _check_fragment_alignment(
        self, site: Site, array: Memory, origin: np.ndarray, stride: int, base: int
    ) -> None:
        bad = (origin * array.item + base) % POINTER_ALIGNMENT != 0
        text = f"a matrix in '{array.name}' must start at a multiple of {POINTER_ALIGNMENT} bytes"
        if (stride * array.item) % STRIDE_ALIGNMENT:
            bad = np.ones_like(bad)
            text = f"leading dimension {stride} of '{array.name}' is no multiple of "
            text += f"{STRIDE_ALIGNMENT // array.item} elements"
        if bad.any():
            where = np.zeros((self.frame.threads.size, bad.shape[1]), bool)
            where[self.frame.first_row] = bad
            thread, block = self.lane_name(where)
            self.hazards.report(MISALIGNED, site, text, thread, block, array.name)

    def count_fragment(
        self, site: Site, array: Memory, origin: np.ndarray, stride: int, base: int
    ) -> None:
        """Transactions of one matrix per warp."""
        frame = self.frame
        site.hit(frame)
        site.bytes += frame.warps * ELEMENTS * array.item
        repeat = frame.blocks.size if not frame.flat and origin.shape[1] == 1 else 1
        for place, parts in self.fragment_places(array, origin, stride, base):
            if isinstance(array, SharedArray):
                counts, fewest = wavefronts(place // WORD, parts)
                site.wavefronts += int(counts.sum()) * repeat
                site.ideal_wavefronts += int(fewest.sum()) * repeat
                site.worst_wavefronts = max(site.worst_wavefronts, int(counts.max()))
            else:
                site.requests += frame.warps
                sectors = int(distinct_sectors(place // SECTOR).sum()) * repeat
                site.sectors += sectors
                ideal = -(-WARP_SIZE * 2 * array.item // SECTOR) * frame.warps
                site.ideal_sectors += min(sectors, ideal)

    @staticmethod
    def fragment_places(
        array: Memory, origin: np.ndarray, stride: int, base: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """The accesses that make up a matrix: bytes [warps, 32, columns], and words of a lane.

        16-bit operands come from shared memory as four 8x8 matrices of 16-byte rows; everything
        else as one access per pair of neighbours and quarter.
        """
        corner = (origin * array.item + base)[:, None, :]  # [warps, 1, columns] bytes
        if isinstance(array, SharedArray) and array.item == 2:
            rows = np.arange(8)[:, None] * stride * 2 + np.arange(4)[None, :] * WORD
            pattern, parts = rows.reshape(-1), 1
        else:
            pattern = (LANE_ROW * stride + LANE_COLUMN) * array.item
            parts = 2 if array.item == 4 else 1
        for row, column in QUARTERS:
            offset = pattern + (row * stride + column) * array.item
            yield corner + offset[:, None], parts

    def fragment_fill(self, site: Site, value: Value) -> Fragment:
        site.hit(self.frame)
        by_warp = self.per_warp(value, site, "the value").astype(np.float32)
        shape = (len(by_warp), FRAGMENT, FRAGMENT, by_warp.shape[1])
        return Fragment(np.broadcast_to(by_warp[:, None, None, :], shape).copy())

    def fragment_load(
        self, site: Site, array: Memory, index: tuple[Value, ...], ld: Value, layout: str
    ) -> Fragment:
        origin, element = self.fragment_address(site, array, index, ld, layout)
        owners = self.owners()
        self.note_read(site, array, element, owners)
        data = array.gather(element, owners)
        return Fragment(data.reshape(len(origin), FRAGMENT, FRAGMENT, -1))

    def fragment_store(
        self,
        site: Site,
        array: Memory,
        index: tuple[Value, ...],
        fragment: Fragment,
        ld: Value,
        layout: str,
    ) -> None:
        _, element = self.fragment_address(site, array, index, ld, layout)
        owners = self.owners()
        values = fragment.data.reshape(len(element), -1)
        self.note_write(site, array, element, owners, values)
        array.scatter(element, values, owners)

    def _fragment_variable(self, site: Site, name: str, shape: tuple, index: tuple) -> str:
        """Elements of a fragment array are variables of their own."""
        if any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            thread, block = self.lane_name(np.ones((1, 1), bool))
            text = f"{name}[{', '.join(map(str, index))}] of shape {shape}"
            self.hazards.report(OUT_OF_BOUNDS, site, text, thread, block, name)
            index = tuple(min(max(i, 0), n - 1) for i, n in zip(index, shape, strict=True))
        return f"{name}[{int(np.ravel_multi_index(index, shape))}]"

    def load_fragment(self, site: Site, name: str, shape: tuple, index: tuple) -> Fragment:
        site.hit(self.frame)
        try:
            return self.v[self._fragment_variable(site, name, shape, index)]
        except KeyError:
            thread, block = self.lane_name(np.ones((1, 1), bool))
            text = f"'{name}' has no value here"
            self.hazards.report(UNINITIALISED_REGISTER, site, text, thread, block, name)
            nothing = np.full((self.frame.warp_keys.size, FRAGMENT, FRAGMENT, 1), np.nan)
            return Fragment(nothing.astype(np.float32))

    def store_fragment(
        self, site: Site, name: str, shape: tuple, index: tuple, value: Fragment
    ) -> None:
        site.hit(self.frame)
        self.v[self._fragment_variable(site, name, shape, index)] = value

    def fragment_mma(self, site: Site, a: Fragment, b: Fragment, c: Fragment) -> Fragment:
        site.hit(self.frame)
        return Fragment(multiply(a.data, b.data, c.data))

    def fragment_map(self, site: Site, function: Callable[..., Any], *operands: Any) -> Fragment:
        """Element by element, scalars being the same for the whole warp."""
        site.hit(self.frame)
        arrays = []
        for operand in operands:
            if isinstance(operand, Fragment):
                arrays.append(operand.data)
            else:
                by_warp = self.per_warp(operand, site, "the scalar").astype(np.float32)
                arrays.append(by_warp[:, None, None, :])
        return Fragment(function(*arrays))


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a @ b + c for [warps, 16, 16, blocks]: float32 products, summed in order, then added to c."""
    total = None
    for k in range(FRAGMENT):
        product = a[:, :, k, None] * b[:, k][:, None]
        total = product if total is None else np.add(total, product, out=total)
    return total + c
