"""Claims of the same document's later part: the softmax by trees, and what it should give."""

from __future__ import annotations

from functools import partial

from lockstep.ladder.rungs import r4_small_tile as small_tile

from .claim import Claim, about, between
from .evidence import (
    LONG,
    SMALL,
    TRACED,
    depth_share,
    planned_phase,
    speedups,
    teraflops,
    traced,
    traced_phase,
)

_claim = partial(Claim, "parallelisation strategy")


def _softmax_depth(softmax: str) -> float:
    phase = planned_phase("small_tile", SMALL, "softmax", softmax=softmax)
    return phase.depth / phase.visits


def _reduction_depth() -> float:
    """Five shuffles in the warps, a barrier, then the warps' results one after the other."""
    return 5 + 1 + small_tile.WARPS_PER_ROW


def _lanes(softmax: str) -> float:
    phase = traced_phase("small_tile", TRACED, "softmax", softmax=softmax)
    return 100 * phase.counts.active_lanes / 32


def softmax_depth_ratio() -> float:
    """How many times shallower the tree is."""
    one, tree = (
        traced_phase("small_tile", TRACED, "softmax", softmax=softmax).depth
        for softmax in ("sequential", "tree")
    )
    return one / tree


def depth_ratio() -> float:
    """How many times shallower the whole block is with it."""
    one, tree = (
        float(traced("small_tile", TRACED, softmax=softmax).depth.sum())
        for softmax in ("sequential", "tree")
    )
    return one / tree


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
        lambda: _softmax_depth("tree"),
        "a row takes two reductions of ten steps, not one of seven; two rows go at a time",
    ),
    _claim(
        "reduction algorithm",
        "a reduction over 256 threads is 10 operations deep",
        about(10, 0.1),
        "steps",
        "plan",
        _reduction_depth,
    ),
    _claim(
        "performance impact of the tree",
        "the softmax becomes 12.8 times shallower",
        about(12.8, 0.1),
        "×",
        "trace",
        lambda: softmax_depth_ratio(),
        "two rows are reduced at a time; with one at a time it is about half of that",
    ),
    _claim(
        "performance impact of the tree",
        "and the kernel has 128 times the parallelism",
        about(128, 0.1),
        "×",
        "trace",
        lambda: depth_ratio(),
        "work over depth of the whole block: scores and P·V are as deep as they were",
    ),
    _claim(
        "corrected depth analysis",
        "a block becomes 32 times shallower",
        about(32, 0.1),
        "×",
        "trace",
        lambda: depth_ratio(),
        "the other phases stay, and P·V with a thread per column is now the deepest",
    ),
    _claim(
        "expected gains",
        "the softmax by one thread takes 99.7 % of the time",
        about(99.7),
        "% of depth",
        "trace",
        lambda: depth_share("small_tile", TRACED, "softmax", softmax="sequential"),
        "P·V with a thread per column takes most of the rest",
    ),
    _claim(
        "expected gains",
        "trees make the whole kernel 5 to 10 times faster",
        between(5, 10),
        "×",
        "bench",
        lambda: speedups("small_tile (tree)", "small_tile (sequential)", SMALL, LONG),
        "the softmax is only part of the kernel",
    ),
    _claim(
        "expected gains",
        "one-thread softmax at B1 H32 S8192 D64: 1.77 TFLOP/s",
        about(1.77, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops("small_tile (sequential)", LONG),
        "another GPU, and another compiler",
    ),
    _claim(
        "expected gains",
        "with trees 22.7 TFLOP/s",
        about(22.7, 0.2),
        "TFLOP/s",
        "bench",
        lambda: teraflops("small_tile (tree)", LONG),
        "12.8 times a part of the kernel is not 12.8 times the kernel",
    ),
)
