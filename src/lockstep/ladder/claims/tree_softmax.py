"""Claims of the same document's later part: the softmax by trees, and what it should give."""

from __future__ import annotations

from functools import partial

from lockstep.ladder import Problem
from lockstep.ladder.rungs import r04_small_tile as small_tile

from .claim import Claim, Readings, about, between
from .evidence import (
    LONG,
    ONE_HEAD,
    SMALL,
    TRACED,
    planned_phase,
    speedups,
    teraflops,
    time_shares,
    traced,
    traced_phase,
)

_claim = partial(Claim, "parallelisation strategy")
ONE_THREAD = ("small_tile (sequential)",)
# as the document has it, a row over all 256 threads; and with two rows at a time
TREES = ("row_tree", "tree")
TIMED_TREES = tuple(f"small_tile ({softmax})" for softmax in TREES)


def _softmax_depth(softmax: str) -> float:
    phase = planned_phase("small_tile", SMALL, "softmax", softmax=softmax)
    return phase.depth / phase.visits


def _lanes(softmax: str) -> float:
    phase = traced_phase("small_tile", TRACED, "softmax", softmax=softmax)
    return 100 * phase.counts.active_lanes / 32


def softmax_depth_ratios() -> Readings:
    """How many times shallower the softmax is with each tree."""
    depth = {
        softmax: traced_phase("small_tile", TRACED, "softmax", softmax=softmax).depth
        for softmax in ("sequential", *TREES)
    }
    return {tree: depth["sequential"] / depth[tree] for tree in TREES}


def depth_ratios() -> Readings:
    """How many times shallower the whole block is with each tree."""
    depth = {
        softmax: float(traced("small_tile", TRACED, softmax=softmax).depth.sum())
        for softmax in ("sequential", *TREES)
    }
    return {tree: depth["sequential"] / depth[tree] for tree in TREES}


def tree_speedups(*problems: Problem) -> Readings | None:
    """How many times as fast the kernel is with each tree as with one thread, where measured."""
    found = {}
    for tree in TREES:
        gains = speedups(f"small_tile ({tree})", ONE_THREAD[0], *problems)
        found |= {f"{tree}, {shape}": gain for shape, gain in (gains or {}).items()}
    return found or None


CLAIMS = (
    _claim(
        "parallel softmax, the problem",
        "while one thread does the softmax, 0.4 % of the threads are busy",
        about(0.4, 0.05),
        "%",
        "trace",
        lambda: (
            100
            * traced_phase("small_tile", TRACED, "softmax", softmax="sequential").thread_utilisation
        ),
    ),
    _claim(
        "parallel softmax, the problem",
        "and one lane of a warp, 3.1 %",
        about(3.1, 0.05),
        "%",
        "trace",
        lambda: _lanes("sequential"),
    ),
    _claim(
        "parallel softmax, the problem",
        "the softmax of a tile is 4,050 steps deep",
        about(4050, 0.1),
        "steps",
        "plan",
        lambda: _softmax_depth("sequential"),
        "a score is visited for the maximum and for the sum, then the row's output corrected",
    ),
    _claim(
        "parallel softmax, the solution",
        "trees make that 315 steps",
        about(315, 0.1),
        "steps",
        "plan",
        lambda: {tree: _softmax_depth(tree) for tree in TREES},
        "a row takes two reductions, each of five shuffles and a step per warp, not one of seven",
    ),
    _claim(
        "reduction algorithm",
        "a reduction over 256 threads is 10 operations deep",
        about(10, 0.1),
        "steps",
        "plan",
        lambda: small_tile.reduction_steps("row_tree"),
        "every warp takes the eight results one by one; a second tree would end in warp 0 alone",
    ),
    _claim(
        "performance impact of the tree",
        "the softmax becomes 12.8 times shallower",
        about(12.8, 0.1),
        "×",
        "trace",
        softmax_depth_ratios,
        "two passes and a correction against two reductions with barriers; not 90 steps against 7",
    ),
    _claim(
        "performance impact of the tree",
        "and the kernel has 128 times the parallelism",
        about(128, 0.1),
        "×",
        "trace",
        depth_ratios,
        "work over depth of the whole block: scores and P·V are as deep as they were",
    ),
    _claim(
        "corrected depth analysis",
        "a block becomes 32 times shallower",
        about(32, 0.1),
        "×",
        "trace",
        depth_ratios,
        "the other phases stay, and P·V with a thread per column is now the deepest",
    ),
    _claim(
        "expected gains",
        "the softmax by one thread takes 99.7 % of the time",
        about(99.7),
        "%",
        "bench",
        lambda: time_shares(ONE_THREAD, LONG, "softmax"),
        "P·V with a thread per column takes most of the rest",
    ),
    _claim(
        "expected gains",
        "trees make the whole kernel 5 to 10 times faster",
        between(5, 10),
        "×",
        "bench",
        lambda: tree_speedups(SMALL, LONG),
        "the softmax is only part of the kernel",
    ),
    _claim(
        "expected gains",
        "one-thread softmax at B1 H32 S8192 D64: 1.77 TFLOP/s",
        about(1.77, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops(ONE_THREAD, LONG),
        "another GPU, and another compiler",
    ),
    _claim(
        "expected gains",
        "with trees 22.7 TFLOP/s",
        about(22.7, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops(TIMED_TREES, LONG),
        "12.8 times a part of the kernel is not 12.8 times the kernel",
    ),
    _claim(
        "performance impact of the tree",
        "one-thread softmax at B1 H1 S1024 D64: 0.19 TFLOP/s",
        about(0.19, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops(ONE_THREAD, ONE_HEAD),
        "another GPU, and another compiler",
    ),
    _claim(
        "performance impact of the tree",
        "with trees 2.4 TFLOP/s",
        about(2.4, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops(TIMED_TREES, ONE_HEAD),
        "12.8 times a part of the kernel is not 12.8 times the kernel",
    ),
)
