"""The ladder: attention kernels from naive to tensor cores, one file each, in climbing order."""

from __future__ import annotations

from . import (
    block_tile,
    block_tile_mma,
    large_tile,
    naive,
    row_per_thread,
    small_tile,
    small_tile_2d,
    split_kv,
    warp_mma,
)
from .rung import (
    Launch,
    LaunchPlan,
    PhasePlan,
    Problem,
    Rung,
    Tensors,
    launches_of,
    plans_of,
    run_on_gpu,
    run_on_machine,
    shared_layout,
)

# climbing order; a new rung is its file and one line here
RUNGS: tuple[Rung, ...] = (
    naive.RUNG,
    row_per_thread.RUNG,
    large_tile.RUNG,
    small_tile.RUNG,
    small_tile_2d.RUNG,
    warp_mma.RUNG,
    split_kv.RUNG,
    block_tile.RUNG,
    block_tile_mma.RUNG,
)

__all__ = [
    "RUNGS",
    "Launch",
    "LaunchPlan",
    "PhasePlan",
    "Problem",
    "Rung",
    "Tensors",
    "find",
    "launches_of",
    "plans_of",
    "run_on_gpu",
    "run_on_machine",
    "shared_layout",
]


def find(name: str) -> Rung:
    """The rung of that name. Raises ValueError naming those there are."""
    for rung in RUNGS:
        if rung.name == name:
            return rung
    raise ValueError(f"there is no rung '{name}'; there are {', '.join(r.name for r in RUNGS)}")
