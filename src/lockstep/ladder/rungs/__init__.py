"""The rungs, from naive to tensor cores: one file each, numbered in climbing order."""

from __future__ import annotations

from lockstep.ladder.rung import Rung

from . import (
    r1_naive,
    r2_row_per_thread,
    r3_large_tile,
    r4_small_tile,
    r5_small_tile_2d,
    r6_warp_mma,
    r7_split_kv,
    r8_block_tile,
    r9_block_tile_mma,
    r10_persistent_mma,
)

# climbing order; a new rung is its file and one line here
RUNGS: tuple[Rung, ...] = (
    r1_naive.RUNG,
    r2_row_per_thread.RUNG,
    r3_large_tile.RUNG,
    r4_small_tile.RUNG,
    r5_small_tile_2d.RUNG,
    r6_warp_mma.RUNG,
    r7_split_kv.RUNG,
    r8_block_tile.RUNG,
    r9_block_tile_mma.RUNG,
    r10_persistent_mma.RUNG,
)


def find(name: str) -> Rung:
    """The rung of that name. Raises ValueError naming those there are."""
    for rung in RUNGS:
        if rung.name == name:
            return rung
    raise ValueError(f"there is no rung '{name}'; there are {', '.join(r.name for r in RUNGS)}")
