"""Which tiles the programs of the Hopper forward work on, where lengths are known: its own
arithmetic, run by Python for every program."""

from __future__ import annotations

import inspect
import random
import textwrap
from itertools import chain
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.forward.scheduling import schedule
from lockstep.kernels.hopper.forward.scheduling.schedule import (
    BY_HEAD,
    LONGEST_FIRST,
    PAIRED,
    Schedule,
)

FUNCTIONS = ("next", "tile", "_dense_tile", "pair_rounds", "_paired", "_left_by_pairs")
PROGRAM = SimpleNamespace(id=0, number=1)  # that runs, and of how many


class Dense(SimpleNamespace):
    """The `Schedule` of a dense launch, run by Python."""

    def places(self) -> list[tuple[int, int]]:
        """Head and tile of all that PROGRAM works on, in order."""
        found = []
        step, tile = self.next(0)
        while tile.exists:
            found.append(tile.place)
            step, tile = self.next(step + 1)
        return found


def add_functions() -> None:
    space = {name: getattr(schedule, name).value for name in ("PAIRED", "BY_HEAD")}
    space["SINGLE_ROUNDS"] = schedule.SINGLE_ROUNDS.value
    space["Tile"] = lambda exists, head, _kv, _batch, q_idx, *_: SimpleNamespace(
        exists=bool(exists), place=(head, q_idx)
    )
    space["gl"] = SimpleNamespace(
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        where=lambda condition, a, b: a if condition else b,
        program_id=lambda _: PROGRAM.id,
        num_programs=lambda _: PROGRAM.number,
    )
    for name in FUNCTIONS:
        source = inspect.getsource(getattr(Schedule, name).fn).partition("\n")[2]
        exec("from __future__ import annotations\n" + textwrap.dedent(source), space)
        setattr(Dense, name, space[name])


add_functions()


def all_places(order, programs: int, heads: int, n_q_tiles: int) -> list[list[tuple[int, int]]]:
    """Head and tile of all that each program works on."""
    sizes = {"heads": heads, "Hq": heads, "n_q_tiles": n_q_tiles, "Sq": n_q_tiles, "BLOCK_Q": 1}
    dense = Dense(order=order.value, heads_per_kv=1, Skv=n_q_tiles, LAYOUT="dense", **sizes)
    PROGRAM.number = programs
    found = []
    for PROGRAM.id in range(programs):
        found.append(dense.places())
    return found


@pytest.mark.parametrize("order", [BY_HEAD, PAIRED, LONGEST_FIRST])
def test_every_tile_has_one_program(order):
    draws = random.Random(0)
    for _ in range(60):
        programs, heads = draws.choice((1, 2, 3, 13, 132)), draws.randint(1, 20)
        n = draws.randint(1, 40)
        found = sorted(chain(*all_places(order, programs, heads, n)))
        assert found == [(head, tile) for head in range(heads) for tile in range(n)]


@pytest.mark.parametrize(("heads", "n"), [(16, 128), (64, 32), (32, 86), (512, 8)])
def test_pairs_keep_all_programs_busy(heads, n):
    """In blocks of keys, and as much as one for every tile: pairs alone would leave the programs
    without work for 3 to 5 % of the time."""
    work = [sum(tile + 2 for _, tile in mine) for mine in all_places(PAIRED, 132, heads, n)]
    assert sum(work) / 132 > 0.975 * max(work)
