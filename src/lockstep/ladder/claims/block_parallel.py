"""Claims of the design of a constant-time kernel with a block per tile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

from lockstep.ladder import PhasePlan
from lockstep.ladder.parts import paired_rows
from lockstep.ladder.plan import PEAKS

from .claim import Claim, Readings, about, at_least, at_most, between, exactly
from .evidence import (
    CAUSAL,
    compiled,
    launch_plan,
    microseconds,
    per_head,
    planned,
    planned_phase,
    speedups,
    utilisation,
)

_claim = partial(Claim, "block-parallel design")
FULL = replace(CAUSAL, causal=False)
TILE = paired_rows.BLOCK
FIRST, OPTIMISED = "block_tile (one_thread)", "block_tile (two_threads)"
BLOCK_TILES = (OPTIMISED, "block_tile")  # the document's design, and ours after it
STATED_BYTES, STATED_MICROSECONDS = 392 * 1024 * 64, 20  # of 64 heads; of one


def _threads(rung: str) -> float:
    launch = launch_plan(rung, CAUSAL)
    return launch.blocks * launch.block


def _barriers(stage: str) -> float:
    """The barriers of a block with 16 key tiles."""
    launch = launch_plan("block_tile", FULL, stage=stage)
    return launch.barriers / launch.blocks


def _fewest_barriers() -> Readings:
    causal = launch_plan("block_tile", CAUSAL)
    return {
        "causal, mean": causal.barriers / causal.blocks,
        "not causal": _barriers("register_tiles"),
    }


def _traffic() -> float:
    launch = launch_plan("block_tile", FULL)
    return launch.load_bytes + launch.store_bytes


def _products() -> float:
    """Operations of Q·Kᵀ and P·V in one tile of 64 × 64, a multiply-add counting two as in the
    TFLOP/s that they are divided by, and one exponential per score."""
    phases = {p.name: p for p in launch_plan("block_tile", FULL).phases}
    multiply_adds = sum(phases[n].items * phases[n].steps for n in ("scores", "output"))
    return 2 * multiply_adds + TILE * TILE


def _of_a_head() -> float:
    return _products() * paired_rows.tiles_visited(FULL)


def _bandwidth() -> Readings | None:
    found = microseconds("block_tile", CAUSAL)
    if found is None:
        return None
    plan = planned("block_tile", CAUSAL)
    return {
        "all that blocks ask for": plan.traffic / found / 1e3,
        "every tensor once": plan.least_traffic / found / 1e3,
    }


def _stated_bandwidth() -> Readings:
    """TB/s: all heads' bytes in the time of one head, as stated, and in the time of all of them."""
    stated = STATED_BYTES / STATED_MICROSECONDS / 1e6
    return {"64 heads' bytes in 64 heads' time": stated / 64}


def _registers() -> Readings | None:
    return {
        f"{title}, {found['spilled_bytes']} bytes spilled": found["registers"]
        for title in (FIRST, *BLOCK_TILES)
        if (found := compiled(title, CAUSAL)) is not None
    } or None


def _utilisations(*titles: str) -> Readings | None:
    found = {title: utilisation(title) for title in titles}
    return {title: value for title, value in found.items() if value is not None} or None


def _speedups_over_rows(*titles: str) -> Readings | None:
    gains = {title: speedups(title, "row_per_thread", CAUSAL) for title in titles}
    return {title: gain[str(CAUSAL)] for title, gain in gains.items() if gain} or None


def _architecture_over_optimisations() -> Readings | None:
    """The gain of the step from a row per thread to a tile per block, over that of each single
    optimisation after it."""
    stages = ("row_per_thread", FIRST, "block_tile (double_buffer)", OPTIMISED, "block_tile")
    stages += ("block_tile_mma", "persistent_mma")
    times = [microseconds(stage, CAUSAL) for stage in stages]
    if not all(times):
        return None
    gains = [before / after for before, after in pairwise(times)]  # type: ignore[operator]
    return {name: gains[0] / gain for name, gain in zip(stages[2:], gains[1:], strict=True)}


def _arithmetic_over_memory() -> float:
    at = planned("block_tile", FULL, "H100")
    arithmetic = at.pairs * 4 * FULL.D / (PEAKS["H100"].fp32 * 1e12)
    return arithmetic / (at.least_traffic / (PEAKS["H100"].bandwidth * 1e9))


CLAIMS = (
    _claim(
        "grid dimensions",
        "a thread per row makes 65,536 threads at B4 H16 S1024",
        exactly(65_536),
        "threads",
        "plan",
        lambda: _threads("row_per_thread"),
    ),
    _claim(
        "grid dimensions",
        "a block per 64 rows makes 1,024 blocks",
        exactly(1024),
        "blocks",
        "plan",
        lambda: launch_plan("block_tile", CAUSAL).blocks,
    ),
    _claim(
        "grid dimensions",
        "that is 131,072 threads",
        exactly(131_072),
        "threads",
        "plan",
        lambda: _threads("block_tile"),
    ),
    _claim(
        "loading Q",
        "each of 128 threads loads 32 elements of the 64 × 64 tile",
        exactly(32),
        "elements",
        "plan",
        lambda: planned_phase("block_tile", CAUSAL, "load kv").items * 8 / 2 / paired_rows.THREADS,
    ),
    _claim(
        "loading Q",
        "a tile of Q, K or V takes 8 KB",
        about(8),
        "KB",
        "plan",
        lambda: TILE * (CAUSAL.D + paired_rows.PAD) * 2 / 1024,
        "16 bytes behind each row keep rows in different banks",
    ),
    _claim(
        "computing S",
        "each thread computes 32 dot products",
        exactly(32),
        "scores",
        "plan",
        lambda: planned_phase("block_tile", CAUSAL, "scores").rounds,
    ),
    _claim(
        "computing S",
        "a tile of scores takes 8 KB",
        about(8),
        "KB",
        "plan",
        lambda: TILE * paired_rows.PITCH * 4 / 1024,
        "scores are float32, and rows are padded",
    ),
    _claim(
        "targets",
        "a thread per row waits at 64 barriers",
        exactly(64),
        "barriers",
        "plan",
        lambda: (
            launch_plan("row_per_thread", FULL).barriers
            / launch_plan("row_per_thread", FULL).blocks
        ),
    ),
    _claim(
        "synchronisations, first form",
        "three barriers per key tile: 49 for 16 tiles",
        about(49, 0.05),
        "barriers",
        "plan",
        lambda: _barriers("one_thread"),
    ),
    _claim(
        "synchronisations, double-buffered",
        "two per key tile: 33",
        about(33, 0.05),
        "barriers",
        "plan",
        lambda: _barriers("two_threads"),
    ),
    _claim(
        "targets",
        "8 barriers or fewer",
        at_most(8),
        "barriers",
        "plan",
        _fewest_barriers,
        "one for each of 16 key tiles; 8 would take tiles of 128 keys",
    ),
    _claim(
        "thread-to-row mapping",
        "one thread per row would leave half of the threads idle",
        exactly(50),
        "%",
        "plan",
        lambda: 100 * (1 - PhasePlan("rows", TILE, 128).utilisation(128)),
    ),
    _claim(
        "memory traffic",
        "a head moves 392 KB",
        about(392, 0.05),
        "KB",
        "plan",
        lambda: _traffic() / FULL.heads / 1024,
        "K and V are counted for one query tile; each of the 16 reads them",
    ),
    _claim(
        "memory traffic",
        "all 64 heads move 25 MB",
        about(25, 0.05),
        "MB",
        "plan",
        lambda: _traffic() / 1e6,
        "K and V are counted for one query tile; each of the 16 reads them",
    ),
    _claim(
        "compute",
        "a tile takes 530 thousand operations",
        about(530, 0.02),
        "thousand",
        "plan",
        lambda: _products() / 1e3,
        "a multiply-add is two operations, as in the TFLOP/s that they are divided by",
    ),
    _claim(
        "compute",
        "a head takes 8.5 million",
        about(8.5, 0.05),
        "million",
        "plan",
        lambda: _of_a_head() / 1e6,
        "16 tiles are one row of them, a head has 256; and a multiply-add is two operations",
    ),
    _claim(
        "compute",
        "which takes 0.26 µs",
        about(0.26, 0.1),
        "µs",
        "plan",
        lambda: _of_a_head() / PEAKS["H100"].fp32 / 1e6,
        "at the 67 TFLOP/s of all ordinary cores of an H100, for all 256 tiles",
    ),
    _claim(
        "memory traffic",
        "25 MB in 20 µs take 1.25 TB/s",
        about(1.25, 0.05),
        "TB/s",
        "arithmetic",
        _stated_bandwidth,
        "the bytes are those of 64 heads, the time that of one",
    ),
    _claim(
        "per-thread output accumulation",
        "about 80 registers per thread",
        about(80, 0.1),
        "registers",
        "compiler",
        _registers,
        "addresses, the row of Q and what is on its way take registers as well",
    ),
    _claim(
        "targets",
        "a thread per row uses 24.8 % of the multiprocessors",
        about(24.8, 0.1),
        "%",
        "bench",
        lambda: _utilisations("row_per_thread"),
        "another GPU, and another kernel of the same kind",
    ),
    _claim(
        "targets",
        "a block per tile 60 to 70 %",
        between(60, 70),
        "%",
        "bench",
        lambda: _utilisations(*BLOCK_TILES),
        "as Nsight Compute counts it: the busiest unit of a multiprocessor, of its peak",
    ),
    _claim(
        "realistic expectations",
        "with one thread per row 30 to 40 µs per head",
        between(30, 40),
        "µs",
        "bench",
        lambda: per_head((FIRST,), CAUSAL),
        "it depends on what heads the time is divided by",
    ),
    _claim(
        "key insight",
        "which is 2 to 3 times as fast as a thread per row without blocks",
        between(2, 3),
        "×",
        "bench",
        lambda: _speedups_over_rows(FIRST),
        "our thread per row is faster than the document's to begin with",
    ),
    _claim(
        "key insight",
        "and that step matters more than any single optimisation",
        at_least(1),
        "× the gain of",
        "bench",
        _architecture_over_optimisations,
        "tiles in registers and tensor cores gain more; copies ahead and two threads per row less",
    ),
    _claim(
        "compute",
        "arithmetic takes less time than memory",
        at_most(1),
        "arithmetic / memory",
        "plan",
        _arithmetic_over_memory,
        "with all 256 tiles counted and K and V read from the cache, ordinary cores are the limit",
    ),
    _claim(
        "targets",
        "a thread per row takes 90.67 µs per head",
        about(90.67, 0.1),
        "µs",
        "bench",
        lambda: per_head(("row_per_thread",), CAUSAL),
        "another GPU, and another kernel of the same kind",
    ),
    _claim(
        "targets",
        "a block per tile takes 15 to 20 µs per head",
        between(15, 20),
        "µs",
        "bench",
        lambda: per_head(BLOCK_TILES, CAUSAL),
        "it depends on what heads the time is divided by: those of a sequence, or of the batch",
    ),
    _claim(
        "targets",
        "which is 5 times as fast",
        about(5, 0.1),
        "×",
        "bench",
        lambda: _speedups_over_rows(*BLOCK_TILES),
        "our thread per row is faster than the document's to begin with",
    ),
    _claim(
        "targets",
        "and asks for more than 500 GB/s",
        at_least(500),
        "GB/s",
        "bench",
        _bandwidth,
        "K and V are read again by every query tile, mostly from the cache",
    ),
    _claim(
        "incremental development, fragments",
        "with fragments 5 to 8 µs per head, or less",
        at_most(8),
        "µs",
        "bench",
        lambda: per_head(("block_tile_mma",), CAUSAL),
    ),
    _claim(
        "next steps",
        "less than 5 µs per head in the end, with copies by the hardware and a persistent kernel",
        at_most(5),
        "µs",
        "bench",
        lambda: per_head(("block_tile_mma", "persistent_mma"), CAUSAL),
        "neither is needed for it, and persistent blocks gain nothing here",
    ),
)
