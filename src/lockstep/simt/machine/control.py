"""Control flow: branches, loops and jumps as frames that come and go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.simt.errors import SimtError

from .frames import MAX_WARPS, Frame, Lanes
from .hazards import UNINITIALISED_REGISTER, Hazards
from .hazards.clock import Clock
from .records.counters import Depth, Site, StraightLine, Transactions
from .values import Value, i32

MAX_TRIPS = 1 << 26


class Control:
    """The machine's state for one batch of blocks, and everything that moves control."""

    gathers = True  # whether loops that only add up may run all rounds at once

    def __init__(
        self,
        block: tuple[int, int, int],
        grid: tuple[int, int, int],
        block_numbers: np.ndarray,
        hazards: Hazards,
        dtypes: dict[str, np.dtype],
    ):
        bx, by, bz = block
        gx, gy, _ = grid
        self.threads = bx * by * bz
        self.block_numbers = block_numbers
        self.hazards, self.dtypes = hazards, dtypes
        threads = np.arange(self.threads)
        columns = np.arange(block_numbers.size)
        warps = -(-self.threads // 32)
        self.clock = Clock(warps, columns.size)
        self.depth = Depth(warps, columns.size)
        self.transactions = Transactions()
        self.exited: np.ndarray | None = None  # [threads, blocks] lanes that returned
        self.exits = 0  # how often lanes returned
        self.phase = ""
        self.root = Frame(None, threads, columns, all_threads=True, all_blocks=True)
        self.activate(self.root)
        number = block_numbers.astype(np.int32)[None, :]
        t = threads.astype(np.int32)[:, None]
        self.v.update(
            {
                "threadIdx.x": t % bx,
                "threadIdx.y": t // bx % by,
                "threadIdx.z": t // (bx * by),
                "blockIdx.x": number % gx,
                "blockIdx.y": number // gx % gy,
                "blockIdx.z": number // (gx * gy),
                "laneid": t % 32,
                "warpid": t // 32,
            }
        )
        for axis, b, g in zip("xyz", block, grid, strict=True):
            self.v[f"blockDim.{axis}"], self.v[f"gridDim.{axis}"] = b, g

    def activate(self, frame: Frame) -> None:
        self.frame = frame
        self.v = frame.variables

    def lane_name(self, bad: np.ndarray, lanes: Lanes | None = None) -> tuple[int, int]:
        """Thread and block number of the first lane in `bad`."""
        thread, column = (lanes or self.frame).position(bad)
        return thread, int(self.block_numbers[column])

    # Counting

    def tick(self, line: StraightLine) -> None:
        """A run of statements executes."""
        frame = self.frame
        line.executions += 1
        line.warps += frame.warps
        line.lanes += frame.lanes
        frame.issued += line.cost

    def charge_all(self) -> None:
        """Bring the depth up to date for all frames on the way to the root."""
        frame: Frame | None = self.frame
        while frame is not None:
            self.depth.charge(frame, self.phase)
            frame = frame.parent

    def enter_phase(self, name: str) -> str:
        """Switch phases; returns the one before."""
        self.charge_all()
        before, self.phase = self.phase, name
        return before

    # Branches

    def enter(self, condition: Value, site: Site | None = None) -> bool:
        """Go on with the lanes where `condition` holds; False if there are none."""
        frame = self.frame
        if site is not None:
            site.hit(frame)
        if not isinstance(condition, np.ndarray):
            return bool(condition)
        taken = np.count_nonzero(condition)
        if taken == condition.size or taken == 0:
            return taken > 0
        inside = frame.narrow(condition)
        if site is not None:
            site.divergent += _split_warps(frame, inside)
        self.activate(inside)
        return True

    def leave(self, outer: Frame, names: tuple[str, ...]) -> None:
        """Back to `outer`; what was assigned to `names` becomes visible there."""
        while self.frame is not outer:
            frame = self.frame
            for name in names:
                if name in frame.variables:
                    frame.merge_into_parent(name, self.dtypes.get(name))
            self.depth.charge(frame, self.phase)
            assert frame.parent is not None
            self.activate(frame.parent)

    def where(self, condition: Value, value: Callable[[], Value], otherwise: Value) -> Value:
        """`value()` evaluated by the lanes where `condition` holds alone, `otherwise` elsewhere."""
        outer = self.frame
        self.v["$where"] = otherwise
        if self.enter(condition):
            self.v["$where"] = value()
            if self.frame is outer:
                return self.v.pop("$where")
            self.leave(outer, ("$where",))
        return self.v.pop("$where")

    def read(self, name: str, site: Site) -> Value:
        """A variable that some path may have left unassigned; `name?` says where it was."""
        assigned = self._lookup(f"{name}?", False)
        if assigned is not True and not np.all(assigned):
            bad = ~np.atleast_2d(np.asarray(assigned, bool))
            thread, block = self.lane_name(bad)
            self.hazards.report(
                UNINITIALISED_REGISTER, site, f"'{name}' has no value here", thread, block, name
            )
        dtype = self.dtypes.get(name)
        return self._lookup(name, np.float32(np.nan) if dtype == np.float32 else 0)

    def _lookup(self, name: str, default: Value) -> Value:
        try:
            return self.v[name]
        except KeyError:
            return default

    # Jumps

    def lanes_mask(self) -> np.ndarray:
        return np.zeros((self.threads, self.block_numbers.size), bool)

    def mark(self, mask: np.ndarray) -> None:
        frame = self.frame
        if frame.flat:
            mask[frame.threads, frame.blocks] = True
        else:
            mask[np.ix_(frame.threads, frame.blocks)] = True

    def marked(self, mask: np.ndarray) -> np.ndarray:
        frame = self.frame
        if frame.flat:
            return mask[frame.threads, frame.blocks][:, None]
        return mask[np.ix_(frame.threads, frame.blocks)]

    def return_(self) -> None:
        if self.exited is None:
            self.exited = self.lanes_mask()
        self.mark(self.exited)
        self.exits += 1

    def survivors(self, *masks: np.ndarray | None) -> bool:
        """Go on without the lanes in `masks` or that returned; False if none is left."""
        gone = [self.marked(m) for m in (*masks, self.exited) if m is not None]
        return not gone or self.enter(~np.logical_or.reduce(gone))


class Loop:
    """A loop in progress. `names` are the variables it assigns that live on outside."""

    def __init__(self, machine: Control, names: tuple[str, ...], site: Site):
        self.machine, self.names, self.site = machine, names, site
        self.outer = self.current = machine.frame
        self.broke: np.ndarray | None = None
        self.continued: np.ndarray | None = None
        self.trips = 0
        self.jumped = False  # some lane left the body early in this trip
        self.exits = machine.exits

    def break_(self) -> None:
        if self.broke is None:
            self.broke = self.machine.lanes_mask()
        self.machine.mark(self.broke)
        self.jumped = True

    def continue_(self) -> None:
        if self.continued is None:
            self.continued = self.machine.lanes_mask()
        self.machine.mark(self.continued)
        self.jumped = True

    def survivors(self) -> bool:
        """Go on in this trip without the lanes that jumped; False if none is left."""
        if not self.jumped and self.exits == self.machine.exits:
            return True
        return self.machine.survivors(self.broke, self.continued)

    def next(self) -> bool:
        """Start another trip with the lanes that are still in the loop."""
        machine = self.machine
        left = self.jumped or self.exits != machine.exits
        self.continued, self.jumped, self.exits = None, False, machine.exits
        self.trips += 1
        if self.trips > MAX_TRIPS:
            raise SimtError(
                f"{self.site.loc.file}:{self.site.loc.line}: {MAX_TRIPS} trips and no end in sight"
            )
        if machine.frame is not self.current:
            machine.leave(self.current, self.names)
        if not left:
            return True
        gone = [machine.marked(m) for m in (self.broke, machine.exited) if m is not None]
        return not gone or self.keep(~np.logical_or.reduce(gone))

    def test(self, condition: Value) -> bool:
        """The loop condition: lanes where it fails are done."""
        machine = self.machine
        self.site.hit(machine.frame)
        before = machine.frame
        going_on = self.keep(condition)
        if going_on and machine.frame is not before:
            self.site.divergent += _split_warps(before, machine.frame)
        return going_on

    def keep(self, condition: Value) -> bool:
        """Restrict the loop to lanes where `condition` holds, in a frame right below `outer`."""
        machine = self.machine
        if not isinstance(condition, np.ndarray):
            alive = bool(condition)
        else:
            taken = np.count_nonzero(condition)
            alive = taken > 0
            if alive and taken < condition.size:
                if machine.frame is not self.outer:
                    machine.v["$keep"] = condition
                    self.outer.variables["$keep"] = False
                    machine.leave(self.outer, (*self.names, "$keep"))
                    condition = self.outer.variables.pop("$keep")
                machine.enter(condition)
                self.current = machine.frame
        if not alive:
            machine.leave(self.outer, self.names)
        return alive


class ForLoop(Loop):
    """`for name in range(start, stop, step)`."""

    def __init__(
        self,
        machine: Control,
        name: str,
        bounds: tuple[Value, Value, Value],
        descending: bool,
        names: tuple[str, ...],
        site: Site,
    ):
        super().__init__(machine, (*names, name), site)
        self.name, self.descending = name, descending
        self.over = False  # all rounds were run at once: see `gathers`
        self.uniform = not any(isinstance(b, np.ndarray) for b in bounds)
        self.value, self.stop, self.step = bounds
        self.keys = f"${site.number}.stop", f"${site.number}.step"
        if not self.uniform:
            machine.v[self.keys[0]], machine.v[self.keys[1]] = self.stop, self.step
        if self.uniform and self.step == 0:
            raise SimtError(f"{site.loc.file}:{site.loc.line}: range() with step zero")

    def advance(self) -> bool:
        """Start another trip; False, back in the outer frame, when the loop is over."""
        if self.over:
            return False
        machine, first = self.machine, self.trips == 0
        if not self.next():
            return False
        if self.uniform:
            value, stop, step = self.value, self.stop, self.step
            self.site.hit(machine.frame)
            if not (value > stop if self.descending else value < stop):
                machine.leave(self.outer, self.names)
                return False
            self.value = value + step
            machine.v[self.name] = value
            return True
        stop, step = (machine.v[key] for key in self.keys)
        value = self.value if first else i32(machine.v[self.name] + step)
        machine.v[self.name] = value
        return self.test(value > stop if self.descending else value < stop)


def _split_warps(outer: Lanes, inner: Lanes) -> int:
    """Warps of `outer` of which some lanes, but not all, are in `inner`."""
    if not inner.flat:
        if inner.threads.size == outer.threads.size:
            return 0
        here = np.searchsorted(outer.warp_keys, inner.warp_keys)
        split = inner.lanes_per_warp() < outer.lanes_per_warp()[here]
        return int(np.count_nonzero(split)) * inner.blocks.size
    keys = inner.warp_keys if outer.flat else inner.warp_keys % MAX_WARPS
    before = outer.lanes_per_warp()[np.searchsorted(outer.warp_keys, keys)]
    return int(np.count_nonzero(inner.lanes_per_warp() < before))
