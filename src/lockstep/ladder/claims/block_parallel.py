"""Claims of the design of a constant-time kernel with a block per tile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lockstep.ladder import PhasePlan
from lockstep.ladder.parts import paired_rows
from lockstep.ladder.plan import PEAKS

from .claim import Claim, about, at_least, at_most, between, exactly
from .evidence import CAUSAL, launch_plan, microseconds, planned, planned_phase, speedups

_claim = partial(Claim, "block-parallel design")
HEADS = 16  # the document's time per head is the time of the call, over its heads
FULL = replace(CAUSAL, causal=False)
TILE = paired_rows.BLOCK


def _threads(rung: str) -> float:
    launch = launch_plan(rung, CAUSAL)
    return launch.blocks * launch.block


def _barriers(rung: str) -> dict[str, float]:
    plans = {"causal, mean": launch_plan(rung, CAUSAL), "not causal": launch_plan(rung, FULL)}
    return {label: launch.barriers / launch.blocks for label, launch in plans.items()}


def _traffic() -> float:
    launch = launch_plan("block_tile", FULL)
    return launch.load_bytes + launch.store_bytes


def _products() -> float:
    """Multiply-adds of Q·Kᵀ and P·V in one tile of 64 × 64, and one exponential per score."""
    phases = {p.name: p for p in launch_plan("block_tile", FULL).phases}
    return sum(phases[n].items * phases[n].steps for n in ("scores", "output")) + TILE * TILE


def _per_head(rung: str) -> float | None:
    found = microseconds(rung, CAUSAL)
    return None if found is None else found / HEADS


def _bandwidth() -> float | None:
    found = microseconds("block_tile", CAUSAL)
    launch = launch_plan("block_tile", CAUSAL)
    return None if found is None else (launch.load_bytes + launch.store_bytes) / found / 1e3


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
        lambda: _barriers("block_tile")["not causal"],
        "a row stays in one warp from scores to output, so only the copies need a block barrier",
    ),
    _claim(
        "synchronisations, double-buffered",
        "two per key tile: 33",
        about(33, 0.05),
        "barriers",
        "plan",
        lambda: _barriers("block_tile")["not causal"],
        "a row stays in one warp from scores to output, so only the copies need a block barrier",
    ),
    _claim(
        "targets",
        "8 barriers or fewer",
        at_most(8),
        "barriers",
        "plan",
        lambda: _barriers("block_tile"),
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
    ),
    _claim(
        "compute",
        "a head takes 8.5 million",
        about(8.5, 0.05),
        "million",
        "plan",
        lambda: _products() * paired_rows.tiles_visited(FULL) / 1e6,
        "16 tiles are one row of them; a head has 256",
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
        lambda: _per_head("row_per_thread"),
        "another GPU, and another kernel of the same kind",
    ),
    _claim(
        "targets",
        "a block per tile takes 15 to 20 µs per head",
        between(15, 20),
        "µs",
        "bench",
        lambda: _per_head("block_tile"),
    ),
    _claim(
        "targets",
        "which is 5 times as fast",
        about(5, 0.1),
        "×",
        "bench",
        lambda: speedups("block_tile", "row_per_thread", CAUSAL),
        "our thread per row is faster than the document's to begin with",
    ),
    _claim(
        "targets",
        "and asks for more than 500 GB/s",
        at_least(500),
        "GB/s",
        "bench",
        _bandwidth,
    ),
    _claim(
        "incremental development, fragments",
        "with fragments 5 to 8 µs per head, or less",
        at_most(8),
        "µs",
        "bench",
        lambda: _per_head("block_tile_mma"),
    ),
    _claim(
        "next steps",
        "less than 5 µs per head in the end, with copies by the hardware and a persistent kernel",
        at_most(5),
        "µs",
        "bench",
        lambda: _per_head("block_tile_mma"),
        "neither was needed",
    ),
)
