"""Markdown tables of single studies of the Triton kernels, as `study_tables` of the Hopper ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep import results
from lockstep.bench.study_tables import Row, by_design, by_problem

# How many programs of the Triton forward share a multiprocessor, by tile of keys and registers.
PROGRAMS_RUN = 1
PROGRAMS = {
    "two programs": (128, 3, None),
    "three": (128, 2, 168),
    "three, 64 keys to a tile": (64, 3, 168),
    "four, 64 keys to a tile": (64, 2, 128),
}


def triton_programs(directory: Path) -> str:
    """The Triton forward at D 64 with more or fewer programs to a multiprocessor."""
    heads = {cut: head for head, cut in PROGRAMS.items()}

    def column(row: Row) -> str | None:
        cut = row["BLOCK_KV"], row["stages"], row["registers"]
        return heads.get(cut) if (row["kind"], row["D"]) == ("forward", 64) else None

    names = tuple(PROGRAMS)
    return by_design(directory, PROGRAMS_RUN, names, column, names, "triton-programs")


def triton_tf32(directory: Path) -> str:
    """float32 as it is, cut to tf32, and torch's own kernel with tf32."""
    run = results.newest("triton-tf32", directory)
    if run is None:
        return results.NOT_MEASURED
    cells: dict[tuple[int, int, bool], dict[str, float]] = {}
    for row in run["rows"]:
        head = row["kernel"] + (", backward" if row["backward"] else "")
        cells.setdefault((row["D"], row["S"], row["causal"]), {})[head] = row["tflops"]
    heads = tuple(next(iter(cells.values())))
    return by_problem(
        heads, cells, lambda found: [f"{found[h]:.0f}" for h in heads], "TFLOP/s", run, "float32"
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "triton_programs": triton_programs,
    "triton_tf32": triton_tf32,
}
