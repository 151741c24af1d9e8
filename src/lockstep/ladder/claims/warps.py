"""Claims of the document on what warps do in the three kernels."""

from __future__ import annotations

from functools import partial

import numpy as np

from lockstep.ladder.plan import PEAKS
from lockstep.ladder.rungs import r03_large_tile as large_tile
from lockstep.ladder.rungs import r04_small_tile as small_tile
from lockstep.ladder.rungs import r06_warp_mma_edged as warp_mma

from .claim import Claim, Readings, about, at_least, between, exactly
from .evidence import (
    CAUSAL,
    LONG,
    SMALL,
    TRACED,
    TRACED_LARGE,
    launch_plan,
    phase_time,
    planned_phase,
    speedups,
    teraflops,
    time_shares,
    traced,
    traced_phase,
)
from .kernels import pass_to_the_next_lane, store_a_fragment
from .parallelisation import scores_per
from .tree_softmax import ONE_THREAD

_claim = partial(Claim, "warp-level strategy")
VECTOR = 8  # elements of a 16-byte access
EDGED = {"tile": "45x90"}
EDGES = ("scores at edges", "output at edges")
FP32_LANES = 64  # of a multiprocessor of the A100
TENSOR_CORES = 4  # likewise


def _busy(rung: str, phase: str, **options: str) -> float:
    problem = TRACED_LARGE if rung == "large_tile" else TRACED
    return 100 * traced_phase(rung, problem, phase, **options).thread_utilisation


def _fragments_per_warp() -> float:
    phase = planned_phase("warp_mma", SMALL, "scores", tile="128x128")
    return phase.items / 32 / (warp_mma.THREADS // 32)


def _coalesced() -> dict[str, float]:
    kernels = {
        "small_tile": traced("small_tile", TRACED, softmax="tree"),
        "large_tile": traced("large_tile", TRACED_LARGE),
        "warp_mma": traced("warp_mma", TRACED, **EDGED),
    }
    return {
        name: 100 * trace.totals.ideal_sectors / trace.totals.global_sectors
        for name, trace in kernels.items()
    }


def _lost_to_divergence() -> float:
    """Percent of all lane slots that lanes of diverged warps leave empty at the edges."""
    trace = traced("warp_mma", TRACED, **EDGED)
    counts = [trace.phase(name).counts for name in EDGES]
    lost = sum(32 * c.instructions - c.lane_instructions for c in counts)
    return 100 * lost / (32 * trace.totals.instructions)


def _busy_warps_of_the_first_solution() -> float:
    """Warps for which its loop over rows, by 16 · warps up to the last whole 16, has a round."""
    aligned, warps = small_tile.BLOCK_Q // 16 * 16, warp_mma.THREADS // 32
    return sum(bool(range(16 * warp, aligned, 16 * warps)) for warp in range(warps))


def _products_per_clock() -> Readings:
    """16 × 16 × 16 products per clock of an A100: its peaks are at one clock."""
    peak = PEAKS["A100"]
    multiply_adds = peak.tensor / peak.fp32 * FP32_LANES
    whole = multiply_adds / 16**3
    return {"a multiprocessor": whole, "a tensor core": whole / TENSOR_CORES}


def _hazards_without_syncwarp() -> float:
    x = np.arange(32, dtype=np.float32)
    trace = pass_to_the_next_lane[1, 32](x, np.zeros_like(x), False)
    return len(trace.hazards)


def _hazards_of_a_store() -> float:
    out = np.zeros((16, 16), np.float32)
    return len(store_a_fragment[1, 32](out, small_tile.BLOCK_KV).hazards)


def _shuffle_gain() -> float | None:
    """The softmax of a row over 256 threads, by halving in shared memory and with shuffles."""
    shared, shuffled = (
        phase_time(f"small_tile ({softmax})", SMALL, "softmax")
        for softmax in ("row_shared", "row_tree")
    )
    return None if shared is None or shuffled is None else shared / shuffled


def _amdahl() -> float:
    """Q·Kᵀ is 60 % of the time and becomes four times as fast; the rest stays."""
    return 1 / (0.60 / 4 + 0.25 + 0.15)


def _loaded_per_warp() -> float:
    loads = planned_phase("large_tile", SMALL, "load q").items
    return loads * VECTOR / (large_tile.THREADS // 32)


CLAIMS = (
    _claim(
        "warps per implementation",
        "a block of small tiles has 8 warps",
        exactly(8),
        "warps",
        "plan",
        lambda: launch_plan("small_tile", SMALL).warps,
    ),
    _claim(
        "warps per implementation",
        "a block of large tiles has 2",
        exactly(2),
        "warps",
        "plan",
        lambda: launch_plan("large_tile", SMALL).warps,
    ),
    _claim(
        "work across warps",
        "a warp computes about 504 of the 4,050 scores",
        about(504),
        "scores",
        "plan",
        lambda: scores_per("small_tile", small_tile.THREADS // 32),
    ),
    _claim(
        "warp utilisation, large tiles",
        "a warp loads 1,920 elements of Q",
        exactly(1920),
        "elements",
        "plan",
        lambda: _loaded_per_warp(),
    ),
    _claim(
        "warp utilisation, large tiles",
        "and computes 7,200 scores",
        exactly(7200),
        "scores",
        "plan",
        lambda: scores_per("large_tile", large_tile.THREADS // 32),
    ),
    _claim(
        "warp utilisation, small tiles",
        "Q·Kᵀ keeps all threads busy",
        about(100, 0.05),
        "%",
        "trace",
        lambda: _busy("small_tile", "scores", softmax="sequential"),
        "a thread takes three queries at a time, and 1,350 such pieces do not divide by 256",
    ),
    _claim(
        "warp utilisation, small tiles",
        "so does the softmax",
        about(100, 0.05),
        "%",
        "trace",
        lambda: _busy("small_tile", "softmax", softmax="sequential"),
        "the table divides the scores by all warps, but one thread does them",
    ),
    _claim(
        "warp utilisation, small tiles",
        "so does P·V",
        about(100, 0.05),
        "%",
        "trace",
        lambda: _busy("small_tile", "output", softmax="sequential"),
        "a thread per column uses 32 of 256",
    ),
    _claim(
        "warp utilisation, large tiles",
        "Q·Kᵀ keeps all threads busy",
        about(100, 0.05),
        "%",
        "trace",
        lambda: _busy("large_tile", "scores"),
    ),
    _claim(
        "warp assignment",
        "with 45 rows, three of eight warps have fragments to multiply",
        about(3, 0.1),
        "warps",
        "plan",
        lambda: planned_phase("warp_mma", SMALL, "scores", **EDGED).threads / 32,
        "45 rows hold two whole fragments of 16; the third would be 13 rows high",
    ),
    _claim(
        "warp utilisation, fragments",
        "62.5 % of the warps are idle",
        about(62.5),
        "%",
        "trace",
        lambda: 100 * (1 - traced_phase("warp_mma", TRACED, "scores", **EDGED).warp_utilisation),
        "six of eight: 45 rows hold two whole fragments",
    ),
    _claim(
        "better use of warps",
        "tiles of 128 × 128 give each of eight warps 8 fragments of the scores",
        exactly(8),
        "fragments",
        "plan",
        _fragments_per_warp,
    ),
    _claim(
        "better use of warps",
        "and no warp is idle",
        about(100, 0.01),
        "%",
        "trace",
        lambda: (
            100 * traced_phase("warp_mma", TRACED_LARGE, "scores", tile="128x128").warp_utilisation
        ),
    ),
    _claim(
        "divergence",
        "warps of the small-tile kernel never diverge",
        exactly(0),
        "branches",
        "trace",
        lambda: traced("small_tile", TRACED, softmax="sequential").totals.divergent_branches,
        "loops that 256 threads do not divide end inside a warp, and one thread does the softmax",
    ),
    _claim(
        "divergence",
        "divergence at the edges beside the fragments costs about 5 %",
        about(5, 0.5),
        "% of lane slots",
        "trace",
        _lost_to_divergence,
        "lanes at the edges mostly agree; that ordinary cores do this work is the larger cost",
    ),
    _claim(
        "coalescing",
        "95 to 100 % of what is moved is needed",
        at_least(95),
        "%",
        "trace",
        _coalesced,
    ),
    _claim(
        "performance impact, time breakdown",
        "Q·Kᵀ takes 60 % of the time",
        about(60, 0.2),
        "%",
        "bench",
        lambda: time_shares(ONE_THREAD, SMALL, "scores"),
        "one thread at the softmax and an eighth of the threads at P·V take most of it",
    ),
    _claim(
        "performance impact, time breakdown",
        "the softmax takes 25 %",
        about(25, 0.2),
        "%",
        "bench",
        lambda: time_shares(ONE_THREAD, SMALL, "softmax"),
        "one thread does it",
    ),
    _claim(
        "performance impact, time breakdown",
        "P·V takes 15 %",
        about(15, 0.2),
        "%",
        "bench",
        lambda: time_shares(ONE_THREAD, SMALL, "output"),
        "the same arithmetic as Q·Kᵀ on an eighth of the threads",
    ),
    _claim(
        "synchronisation",
        "lanes of a warp run in lockstep, so no syncwarp is needed",
        exactly(0),
        "races",
        "trace",
        _hazards_without_syncwarp,
        "since Volta lanes may run apart: without a syncwarp, what one wrote another may not see",
    ),
    _claim(
        "fragments, storing the result",
        "scores are stored with a leading dimension of 90",
        exactly(0),
        "hazards",
        "trace",
        _hazards_of_a_store,
        "rows of a fragment in memory have to be a multiple of 16 bytes apart; 90 floats are not",
    ),
    _claim(
        "fragments, hardware execution",
        "tensor cores of an A100 do 16 × 16 × 16 per clock",
        exactly(1),
        "per clock",
        "arithmetic",
        _products_per_clock,
        "a tensor core does 256 multiply-adds per clock, of 4,096",
    ),
    _claim(
        "strategy comparison",
        "small tiles: 1.02 TFLOP/s at B2 H16 S1024 D32",
        about(1.02, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops(ONE_THREAD, SMALL),
        "another GPU, and another compiler",
    ),
    _claim(
        "strategy comparison",
        "with fragments 1.74 TFLOP/s",
        about(1.74, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops(("warp_mma (45x90)",), SMALL),
        "another GPU; and here P·V and the softmax are spread over all threads",
    ),
    _claim(
        "shuffle reductions",
        "shuffles make reductions 2 to 3 times as fast as shared memory",
        between(2, 3),
        "×",
        "bench",
        _shuffle_gain,
        "a reduction is one part of the softmax, beside exponentials and the correction",
    ),
    _claim(
        "better use of warps",
        "with the first solution more than three warps have fragments",
        at_least(4),
        "warps",
        "arithmetic",
        _busy_warps_of_the_first_solution,
        "it is the loop that was there: rows are dealt out by 16, and 45 rows have two of them",
    ),
    _claim(
        "performance impact, net speedup",
        "Q·Kᵀ four times as fast makes the kernel 2.8 times as fast",
        about(2.8, 0.05),
        "×",
        "arithmetic",
        _amdahl,
        "shares of time were multiplied by speedups; they have to be divided by them",
    ),
    _claim(
        "performance impact, net speedup",
        "fragments make the 45 × 90 kernel 1.7 times as fast",
        about(1.7, 0.1),
        "×",
        "bench",
        lambda: _fragments_at_the_same_tile(),
        "once P·V is spread over all threads, fragments at this tile add little",
    ),
    _claim(
        "best practices",
        "fragments are about 4 times as fast as ordinary cores where they cover the tile",
        about(4, 0.25),
        "×",
        "bench",
        lambda: speedups("warp_mma (64x64)", "small_tile_2d", SMALL, CAUSAL, LONG),
        "the larger the head dim and the sequence, the more of the time is multiplication",
    ),
)


def _fragments_at_the_same_tile() -> dict[str, float] | None:
    found = {}
    for before in ("small_tile (tree)", "small_tile_2d"):
        gains = speedups("warp_mma (45x90)", before, SMALL)
        if gains is None:
            return None
        found[f"against {before}"] = next(iter(gains.values()))
    return found
