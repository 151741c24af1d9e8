"""Which tiles the programs of the Hopper forward work on, where lengths are known: its own
arithmetic, run by Python for every program."""

from __future__ import annotations

import inspect
import random
import textwrap
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
from problems import unwritten

from lockstep.problem import Options, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from schedule_in_python import Keys, as_python

from lockstep.kernels.hopper.common.sizes import ROWS
from lockstep.kernels.hopper.forward import grouped_rows, groups
from lockstep.kernels.hopper.forward.plan import plan_of
from lockstep.kernels.hopper.forward.scheduling import pairs, schedule
from lockstep.kernels.hopper.forward.scheduling.schedule import (
    BY_HEAD,
    LONGEST_FIRST,
    PAIRED,
    Schedule,
)
from lockstep.kernels.hopper.forward.scheduling.tiling import Tiling, turn_of

FUNCTIONS = ("next", "tile", "_part", "_dense_tile", "_heads_of", "n_rows")
OF_PAIRS = (pairs.pair_rounds, pairs.paired, pairs.left_by_pairs)
PROGRAM = SimpleNamespace(id=0, number=1)  # that runs, and of how many


class Dense(SimpleNamespace):
    """The `Schedule` of a dense launch, run by Python."""

    PARTS = False

    def places(self) -> list[tuple[int, int, int]]:
        """Head, first row and the row behind the last of all that PROGRAM works on, in order."""
        found = []
        step, tile = self.next(0)
        while tile.exists:
            found.append(tile.place)
            step, tile = self.next(step + 1)
        return found


def add_functions() -> None:
    space = {name: getattr(schedule, name).value for name in ("PAIRED", "BY_HEAD", "LONGEST_FIRST")}
    space["SINGLE_ROUNDS"] = pairs.SINGLE_ROUNDS.value
    space["ROWS"] = ROWS
    space["grouped_rows"] = SimpleNamespace(n_rows=as_python(grouped_rows.n_rows))
    space["Tile"] = lambda exists, head, _kv, _batch, q_idx, _q_start, _kv_start, len_q, *_: (
        SimpleNamespace(exists=bool(exists), place=(head, q_idx, len_q))
    )
    space["Keys"] = Keys
    space["gl"] = SimpleNamespace(
        maximum=max,
        minimum=min,
        cdiv=lambda a, b: -(-a // b),
        where=lambda condition, a, b: a if condition else b,
        program_id=lambda _: PROGRAM.id,
        num_programs=lambda _: PROGRAM.number,
    )
    for function in OF_PAIRS:
        source = inspect.getsource(function.fn).partition("\n")[2]
        exec("from __future__ import annotations\n" + source, space)
    space["pairs"] = SimpleNamespace(**{x.fn.__name__: space[x.fn.__name__] for x in OF_PAIRS})
    for name in FUNCTIONS:
        source = inspect.getsource(getattr(Schedule, name).fn).partition("\n")[2]
        exec("from __future__ import annotations\n" + textwrap.dedent(source), space)
        setattr(Dense, name, space[name])


add_functions()


def all_places(
    order, programs: int, heads: int, Sq: int, block_q: int = ROWS, split: bool = True,
    group: int = 1, turn: int = 0,
) -> list[list[tuple[int, int, int]]]:  # fmt: skip
    """Head, first row and the row behind the last of all that each program works on. A group of
    heads shares its tiles."""
    n_q_tiles = groups.n_tiles(Sq, group, block_q)
    sizes = {"heads": heads, "Hq": heads, "n_q_tiles": n_q_tiles, "Sq": Sq}
    sizes |= {"heads_per_kv": group, "Skv": Sq, "BLOCK_Q": block_q, "HEADS": int(group > 1)}
    sizes["turn"] = turn
    dense = Dense(order=order.value, LAYOUT="dense", SPLIT=split, **sizes)
    PROGRAM.number = programs
    found = []
    for PROGRAM.id in range(programs):
        # Tiles that are never split know the end of their sequence, in queries, not their own.
        places = dense.places()
        if not split:
            places = [
                (head, begin, min(dense.n_rows(end), begin + block_q))
                for head, begin, end in places
            ]
        found.append(places)
    return found


@pytest.mark.parametrize("order", [BY_HEAD, PAIRED, LONGEST_FIRST])
def test_every_row_has_one_program(order):
    draws = random.Random(0)
    for _ in range(60):
        programs, heads = draws.choice((1, 2, 3, 13, 132)), draws.randint(1, 20)
        Sq, block_q = draws.randint(1, 5000), draws.choice((2, 3)) * ROWS
        split, group = draws.random() < 0.5, draws.choice((1, 1, 3, 8))
        turn = draws.choice((0, 1, 2))
        found = sorted(chain(*all_places(order, programs, heads, Sq, block_q, split, group, turn)))
        rows = Sq if group == 1 else -(-Sq // groups.BOX) * groups.BOX * group
        for head in range(heads):
            mine = [(begin, end) for h, begin, end in found if h == head * group]
            assert mine[0][0] == 0
            assert mine[-1][1] == rows
            assert all(begin % ROWS == 0 and end - begin <= block_q for begin, end in mine)
            assert all(end == begin for (_, end), (begin, _) in pairwise(mine))


@pytest.mark.parametrize("order", [BY_HEAD, LONGEST_FIRST])
@pytest.mark.parametrize(
    ("heads", "tiles", "block_q", "rows"),
    [
        (8, 8, 128, {64}),
        (11, 30, 128, {64}),
        (9, 8, 128, {128}),
        (4, 11, 192, {64}),
        (5, 9, 192, {192}),
        (67, 1, 192, {192}),
    ],
)
def test_a_last_round_has_as_many_parts_of_tiles_as_there_are_programs(
    order, heads, tiles, block_q, rows
):
    found = all_places(order, 132, heads, tiles * block_q, block_q)
    last = [mine[-1] for mine in found if len(mine) == max(map(len, found))]
    assert {end - begin for _, begin, end in last} == rows


def test_programs_take_turns_at_last_tiles():
    """With 2 tiles of a head, the one with few rows would always be the same programs'."""
    for mine in all_places(BY_HEAD, 132, 660, 134, 128):
        assert [begin for _, begin, _ in mine] in ([0, 128] * 5, [128, 0] * 5)


@pytest.mark.parametrize(("heads", "n"), [(16, 128), (64, 32), (32, 86), (512, 8)])
def test_pairs_keep_all_programs_busy(heads, n):
    """In blocks of keys, and as much as one for every tile: pairs alone would leave the programs
    without work for 3 to 5 % of the time."""
    found = all_places(PAIRED, 132, heads, n * ROWS)
    work = [sum(end // ROWS + 1 for _, _, end in mine) for mine in found]
    assert sum(work) / 132 > 0.975 * max(work)


@pytest.mark.parametrize(("heads", "n"), [(2120, 7), (1280, 5), (1792, 7), (640, 21)])
def test_programs_take_turns_at_tiles_in_the_middle(heads, n):
    """An odd number of tiles leaves one that is its own pair, and half as long as others. Without
    turns, always the same programs would have it."""
    turn = turn_of(n, 132)
    found = all_places(PAIRED, 132, heads, n * ROWS, turn=turn)
    work = [sum(end // ROWS + 1 for _, _, end in mine) for mine in found]
    assert sum(work) / 132 > 0.97 * max(work)


@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "D"), [(46, 32, 8, 64), (61, 12, 4, 128), (31, 12, 4, 256)]
)
def test_programs_take_turns_at_low_tiles(B, Hq, Hkv, D):
    """Of 400 queries the last tile has 16, which one consumer has alone. Pairs with it would always
    be the same programs'."""
    problem = describe(unwritten(400, 400, B=B, Hq=Hq, Hkv=Hkv, D=D), Options(causal=True))
    tiling = Tiling.of(problem, 132)
    assert tiling.order == PAIRED.value
    found = all_places(PAIRED, 132, tiling.heads, 400, 128, turn=tiling.turn)
    work = [sum(row // 64 + (2 if end - row > 64 else 1) for _, row, end in mine) for mine in found]
    assert sum(work) / 132 > 0.93 * max(work)


@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "S", "D", "window", "share"),
    [
        (1, 32, 16, 8192, 128, 4096, 0.99),
        (1, 16, 8, 8192, 256, 4096, 0.99),
        (2, 8, 4, 8192, 256, 1024, 0.96),
        (2, 24, 8, 2506, 128, 304, 0.97),
        (8, 4, 2, 2714, 128, 2668, 0.97),
        # Keys do not fit into L2, and each program would have the same one or two tiles of heads.
        (44, 32, 32, 944, 40, 1105, 0.97),
        (256, 24, 8, 217, 64, 235, 0.97),
        (256, 14, 2, 737, 72, 246, 0.97),
        (185, 12, 3, 372, 160, 75, 0.97),
        (37, 8, 8, 1055, 256, 3062, 0.97),
    ],
)
def test_windows_keep_all_programs_busy(B, Hq, Hkv, S, D, window, share):
    """In blocks of keys, and as much as one for every tile."""
    tensors = unwritten(S, S, B=B, Hq=Hq, Hkv=Hkv, D=D)
    problem = describe(tensors, Options(window_left=window - 1, window_right=0))
    shape, tiling = plan_of(problem), Tiling.of(problem, 132)
    order, group = SimpleNamespace(value=tiling.order), groups.rows_of_group(problem)
    found = all_places(order, 132, tiling.heads, S, shape.block_q, False, group, tiling.turn)

    def blocks(begin: int, end: int) -> int:
        return groups.blocks_of_tile(problem, S, S, begin, group, end - begin, shape.block_kv)

    work = [sum(blocks(begin, end) + 1 for _, begin, end in mine) for mine in found]
    assert sum(work) / 132 > share * max(work)
