"""Barriers, shuffles and votes."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt.types import WARP_SIZE

from .accesses import Accesses
from .frames import MAX_WARPS, source_lanes
from .hazards import DIVERGENT_BARRIER, INACTIVE_LANE
from .memory import SharedArray
from .records.counters import Site
from .values import Value

FULL = 0xFFFFFFFF


class Warps(Accesses):
    """Operations of all lanes of a warp, or of all threads of a block."""

    shared_arrays: dict[Any, SharedArray]

    def syncthreads(self, site: Site) -> None:
        frame = self.frame
        site.hit(frame)
        self.charge_all()
        if frame.all_threads and frame.all_blocks and not frame.flat:
            self._all_met()
            return
        arrived = self.lanes_mask()
        self.mark(arrived)
        if self.exited is not None:
            arrived |= self.exited  # threads that returned do not hold up a barrier
        count = arrived.sum(axis=0)
        here = np.unique(frame.blocks)
        short = here[count[here] < self.threads]
        if short.size:
            column = int(short[0])
            missing = int(np.flatnonzero(~arrived[:, column])[0])
            present = int(np.flatnonzero(arrived[:, column])[0])
            self.hazards.report(
                DIVERGENT_BARRIER,
                site,
                f"syncthreads reached by {count[column]} of {self.threads} threads, "
                f"thread {missing} is not among them",
                present,
                int(self.block_numbers[column]),
            )
        finished = 0 if self.exited is None else int(self.exited.all(axis=0).sum())
        if here.size + finished == self.block_numbers.size and not short.size:
            self._all_met()
        else:
            self.clock.blocks_met(here)
            self.depth.join(here)

    def _all_met(self) -> None:
        self.clock.all_met()
        self.depth.join()
        for array in self.shared_arrays.values():
            array.all_met()

    def syncwarp(self, site: Site, mask: Value) -> None:
        site.hit(self.frame)
        self._check_mask(site, mask, "syncwarp", DIVERGENT_BARRIER)
        self.clock.warps_met(self.frame)

    def threadfence(self, site: Site) -> None:
        site.hit(self.frame)
        assert self.hazards.order is not None
        self.hazards.order.fence(self.frame, self.block_numbers, self.clock)

    def _check_mask(self, site: Site, mask: Value, what: str, kind: str) -> None:
        """Every lane the mask names and that has not returned must be here, the caller included."""
        frame = self.frame
        names_all = type(mask) is int and mask == FULL
        if names_all and frame.whole_warps:
            return
        if not names_all:
            lane = frame.threads[:, None] % WARP_SIZE
            own = (np.asarray(mask, np.uint32) >> lane.astype(np.uint32)) & np.uint32(1)
            if not own.all():
                thread, block = self.lane_name(np.atleast_2d(own == 0))
                text = f"{what} by a lane that its own mask leaves out"
                self.hazards.report(kind, site, text, thread, block)
        absent = frame.row_at < 0  # [warps, 32]
        if not absent.any():
            return
        bits = np.asarray(mask, np.uint32)
        bits = bits if bits.ndim == 0 else np.broadcast_to(bits, frame.shape)[frame.first_row, 0]
        named = (bits[..., None] >> np.arange(WARP_SIZE, dtype=np.uint32)) & np.uint32(1)
        warp, lane = np.nonzero(absent & (named == 1))
        keys = frame.warp_keys[warp]
        number = (keys % MAX_WARPS if frame.flat else keys) * WARP_SIZE + lane
        exists = number < self.threads
        warp, number, keys = warp[exists], number[exists], keys[exists]
        if number.size == 0:
            return
        columns = keys[:, None] // MAX_WARPS if frame.flat else frame.blocks[None, :]
        alive = np.ones((number.size, columns.shape[1]), bool)
        if self.exited is not None:
            alive = ~self.exited[number[:, None], columns]
        if alive.any():
            first, column = np.argwhere(alive)[0]
            block = columns[first if frame.flat else 0, column]
            text = f"{what} names lane {number[first] % WARP_SIZE}, which is not here"
            caller = int(frame.threads[frame.first_row[warp[first]]])
            self.hazards.report(kind, site, text, caller, int(self.block_numbers[block]))

    def shuffle(self, site: Site, mode: str, mask: Value, value: Value, operand: Value) -> Value:
        frame = self.frame
        site.hit(frame)
        self._check_mask(site, mask, f"shuffle {mode}", INACTIVE_LANE)
        rows = frame.by_warp.sources(mode, operand)
        missing = rows < 0
        if missing.any():
            thread, block = self.lane_name(missing)
            lane = source_lanes(frame.threads, mode, operand)[tuple(np.argwhere(missing)[0])]
            text = f"shuffle {mode} reads lane {int(lane)}, which is not active"
            self.hazards.report(INACTIVE_LANE, site, text, thread, block, "source")
            rows = np.where(missing, np.arange(frame.threads.size)[:, None], rows)
        if not isinstance(value, np.ndarray) or (value.shape[0] == 1 and frame.threads.size > 1):
            return value
        if rows.shape[1] == 1:
            return value.take(rows[:, 0], axis=0)
        columns = np.arange(rows.shape[1])[None, :] if value.shape[1] != 1 else 0
        return value[rows, columns]

    def vote(self, site: Site, mode: str, mask: Value, predicate: Value) -> Value:
        frame = self.frame
        site.hit(frame)
        self._check_mask(site, mask, f"vote {mode}", INACTIVE_LANE)
        lanes = predicate if isinstance(predicate, np.ndarray) else np.full((1, 1), bool(predicate))
        lanes = np.broadcast_to(lanes, (frame.threads.size, lanes.shape[1]))
        by_warp = lanes[frame.filled_row]  # [warps, 32, columns]
        if mode == "all":
            result = by_warp.all(axis=1)
        elif mode == "any":
            result = by_warp.any(axis=1)
        else:
            bit = np.left_shift(np.uint32(1), np.arange(WARP_SIZE, dtype=np.uint32))
            bit = np.where(frame.row_at >= 0, bit, np.uint32(0))[:, :, None]
            result = np.bitwise_or.reduce(np.where(by_warp, bit, np.uint32(0)), axis=1)
        return result[frame.warp_of_row]
