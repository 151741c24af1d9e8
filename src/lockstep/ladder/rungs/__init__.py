"""The rungs, from naive to tensor cores: one file each, numbered in climbing order."""

from __future__ import annotations

from lockstep.ladder.rung import Rung

from . import (
    r01_naive,
    r02_row_per_thread,
    r03_large_tile,
    r04_small_tile,
    r05_small_tile_2d,
    r06_warp_mma,
    r07_split_kv,
    r08_block_tile,
    r09_block_tile_mma,
    r10_persistent_mma,
)

# climbing order; a new rung is its file and one line here
RUNGS: tuple[Rung, ...] = (
    r01_naive.RUNG,
    r02_row_per_thread.RUNG,
    r03_large_tile.RUNG,
    r04_small_tile.RUNG,
    r05_small_tile_2d.RUNG,
    r06_warp_mma.RUNG,
    r07_split_kv.RUNG,
    r08_block_tile.RUNG,
    r09_block_tile_mma.RUNG,
    r10_persistent_mma.RUNG,
)


def find(name: str) -> Rung:
    """The rung of that name. Raises ValueError naming those there are."""
    for rung in RUNGS:
        if rung.name == name:
            return rung
    raise ValueError(f"there is no rung '{name}'; there are {', '.join(r.name for r in RUNGS)}")
