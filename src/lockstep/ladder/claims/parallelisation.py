"""Claims of the document on how batch, heads, sequence and head dim are spread over a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from lockstep.ladder import PhasePlan
from lockstep.ladder.rungs import r03_large_tile as large_tile
from lockstep.ladder.rungs import r04_small_tile as small_tile

from .claim import Claim, Readings, about, at_least, at_most, exactly
from .evidence import (
    SMALL,
    TRACED,
    launch_plan,
    planned,
    planned_phase,
    traced,
    traced_phase,
)

_claim = partial(Claim, "parallelisation strategy")
VECTOR = 8  # elements of a 16-byte access
KILO = 1024


def _elements(rung: str, name: str, **options: str) -> float:
    """Elements of q, k or v per thread, in a phase that moves 16 bytes at a time."""
    phase = planned_phase(rung, SMALL, name, **options)
    return phase.items * VECTOR / phase.threads


def _occupancy(rung: str, **options: str) -> float:
    return 100 * planned(rung, SMALL, "A100", **options).steps[0].occupancy.share


def _times_blocks(**change: int) -> float:
    larger = launch_plan("small_tile", replace(SMALL, **change))
    return larger.blocks / launch_plan("small_tile", SMALL).blocks


def _outputs_of_busiest() -> Readings:
    by_column = planned_phase("small_tile", SMALL, "output")
    outputs = small_tile.BLOCK_Q * SMALL.D
    return {
        "small_tile": outputs / by_column.items,
        "small_tile_2d": outputs / small_tile.THREADS,
    }


def scores_per(rung: str, workers: int) -> float:
    """Scores of a tile for each of so many workers."""
    phase = planned_phase(rung, SMALL, "scores")
    return phase.items * phase.steps / SMALL.D / workers


def _conflicts(rung: str) -> float:
    totals = traced(rung, TRACED).totals
    return 100 * totals.bank_conflicts / totals.shared_wavefronts


def _places_in_the_launch() -> float:
    """Blocks that a grid (tiles, H, B) starts at another place than a grid (tiles, B · H) does."""
    tiles, H, B = launch_plan("small_tile", SMALL).grid

    def place(x: int, y: int, z: int, grid: tuple[int, int]) -> int:
        """The number of a block in the order of the hardware: x runs fastest, then y, then z."""
        return x + grid[0] * (y + grid[1] * z)

    return sum(
        place(tile, h, b, (tiles, H)) != place(tile, b * H + h, 0, (tiles, B * H))
        for tile, h, b in product(range(tiles), range(H), range(B))
    )


GRID = (
    _claim(
        "grid, large tiles",
        "120-row tiles cut 1,024 queries into 9",
        exactly(9),
        "tiles",
        "plan",
        lambda: launch_plan("large_tile", SMALL).grid[0],
    ),
    _claim(
        "grid, large tiles",
        "batch 2 and 16 heads then make 288 blocks",
        exactly(288),
        "blocks",
        "plan",
        lambda: launch_plan("large_tile", SMALL).blocks,
    ),
    _claim(
        "grid, small tiles",
        "45-row tiles cut 1,024 queries into 23",
        exactly(23),
        "tiles",
        "plan",
        lambda: launch_plan("small_tile", SMALL).grid[0],
    ),
    _claim(
        "grid, small tiles",
        "which makes 736 blocks",
        exactly(736),
        "blocks",
        "plan",
        lambda: launch_plan("small_tile", SMALL).blocks,
    ),
    _claim(
        "sequence length, query tiles",
        "the last block has queries 990 to 1,023, 34 rows",
        exactly(34),
        "rows",
        "plan",
        lambda: SMALL.S - (launch_plan("small_tile", SMALL).grid[0] - 1) * small_tile.BLOCK_Q,
    ),
    _claim(
        "comparison table",
        "a block of small tiles walks over 12 key tiles",
        exactly(12),
        "tiles",
        "plan",
        lambda: launch_plan("small_tile", SMALL).iterations,
    ),
    _claim(
        "comparison table",
        "a block of large tiles over 9",
        exactly(9),
        "tiles",
        "plan",
        lambda: launch_plan("large_tile", SMALL).iterations,
    ),
    _claim(
        "batch size",
        "twice the batch gives twice the blocks",
        exactly(2),
        "×",
        "plan",
        lambda: _times_blocks(B=2 * SMALL.B),
    ),
    _claim(
        "number of heads",
        "twice the heads give twice the blocks",
        exactly(2),
        "×",
        "plan",
        lambda: _times_blocks(H=2 * SMALL.H),
    ),
    _claim(
        "grid, small tiles",
        "a grid of three dimensions balances the load better than one of two",
        at_least(1),
        "blocks that start elsewhere",
        "plan",
        _places_in_the_launch,
        "batch and head as two dimensions or as one: the blocks start in the same order",
    ),
    _claim(
        "why the first version was slow",
        "one head of 1,024 queries gives 23 blocks to 108 multiprocessors",
        exactly(23),
        "blocks",
        "plan",
        lambda: launch_plan("small_tile", replace(SMALL, B=1, H=1)).blocks,
    ),
)

THREADS = (
    _claim(
        "work per thread",
        "loading Q is 5.6 elements per thread",
        about(5.6),
        "elements",
        "plan",
        lambda: _elements("small_tile", "load q"),
    ),
    _claim(
        "work per thread",
        "loading K or V is 11.3 elements per thread",
        about(11.3),
        "elements",
        "plan",
        lambda: _elements("small_tile", "load kv") / 2,
    ),
    _claim(
        "work per thread",
        "the scores of a tile are 15.8 per thread",
        about(15.8),
        "scores",
        "plan",
        lambda: scores_per("small_tile", small_tile.THREADS),
    ),
    _claim(
        "work per thread",
        "P·V is 5.6 outputs per thread",
        about(5.6),
        "outputs",
        "plan",
        _outputs_of_busiest,
        "with a thread per column, 32 threads do all of it; spread over both dimensions it is so",
    ),
    _claim(
        "work per thread",
        "setting up the softmax state of small tiles is 0.18 rows per thread",
        about(0.18, 0.05),
        "rows",
        "plan",
        lambda: small_tile.BLOCK_Q / small_tile.THREADS,
    ),
    _claim(
        "work per thread",
        "and 0.7 rows per thread for large tiles",
        about(0.7),
        "rows",
        "plan",
        lambda: large_tile.BLOCK_Q / large_tile.THREADS,
        "the 45 rows of the small tile were divided by the 64 threads of the large one",
    ),
    _claim(
        "thread utilisation, small head dim",
        "with head dim 32 and 256 threads, P·V leaves 87.5 % of the threads idle",
        about(87.5),
        "%",
        "trace",
        lambda: 100 * (1 - traced_phase("small_tile", TRACED, "output").thread_utilisation),
    ),
    _claim(
        "thread utilisation, small tiles",
        "30 rows handed to 256 threads leave 88 % idle",
        about(88),
        "%",
        "plan",
        lambda: 100 * (1 - PhasePlan("rows", 30, 256).utilisation(256)),
    ),
    _claim(
        "better head dimension handling",
        "handing out P·V in two dimensions keeps all threads active",
        about(100, 0.1),
        "%",
        "trace",
        lambda: 100 * traced_phase("small_tile_2d", TRACED, "output").thread_utilisation,
    ),
)

MEMORY = (
    _claim(
        "performance impact",
        "a block of small tiles has 51.7 KB of shared memory",
        about(51.7),
        "KB",
        "plan",
        lambda: launch_plan("small_tile", SMALL, softmax="sequential").shared_bytes / KILO,
    ),
    _claim(
        "performance impact",
        "a block of large tiles has 150.9 KB",
        about(150.9),
        "KB",
        "plan",
        lambda: launch_plan("large_tile", SMALL).shared_bytes / KILO,
    ),
    _claim(
        "performance impact",
        "small tiles occupy 37.5 % of an A100",
        about(37.5),
        "%",
        "plan",
        lambda: _occupancy("small_tile", softmax="sequential"),
    ),
    _claim(
        "performance impact",
        "large tiles occupy 3.1 %",
        about(3.1),
        "%",
        "plan",
        lambda: _occupancy("large_tile"),
    ),
    _claim(
        "memory access, global to shared",
        "neighbouring threads read neighbouring addresses: no sector is moved in vain",
        about(100),
        "% of sectors needed",
        "trace",
        lambda: _coalesced("small_tile"),
    ),
    _claim(
        "memory access, shared",
        "bank conflicts are mostly avoided, say in nine accesses of ten",
        at_most(10),
        "% of wavefronts",
        "trace",
        lambda: {name: _conflicts(name) for name in ("small_tile", "small_tile_2d")},
        "rows of 64 bytes put the keys that neighbouring lanes read into few banks; padding helps",
    ),
)


def _coalesced(rung: str) -> float:
    totals = traced(rung, TRACED).totals
    return 100 * totals.ideal_sectors / totals.global_sectors


CLAIMS = (*GRID, *THREADS, *MEMORY)
