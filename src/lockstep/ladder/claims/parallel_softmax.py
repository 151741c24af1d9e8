"""Claims of the document on the softmax by tree reductions."""

from __future__ import annotations

from functools import partial

from .claim import Claim, about, at_most, between, exactly
from .evidence import (
    LONG,
    SMALL,
    TRACED,
    depth_share,
    launch_plan,
    output,
    planned,
    speedups,
    traced_phase,
)
from .tree_softmax import depth_ratio, softmax_depth_ratio

_claim = partial(Claim, "parallel softmax")


def _scratch() -> float:
    tree, one = (
        launch_plan("small_tile", SMALL, softmax=softmax).shared_bytes
        for softmax in ("tree", "sequential")
    )
    return tree - one


def _gain(measure: str) -> float:
    one, tree = (
        traced_phase("small_tile", TRACED, "softmax", softmax=softmax)
        for softmax in ("sequential", "tree")
    )
    if measure == "lanes":
        return tree.counts.active_lanes / one.counts.active_lanes
    return tree.thread_utilisation / one.thread_utilisation


def _difference() -> float:
    one, tree = (
        output("small_tile", TRACED, softmax=softmax).double() for softmax in ("sequential", "tree")
    )
    return float((one - tree).abs().max())


CLAIMS = (
    _claim(
        "build notes",
        "the reductions need 16 floats, 64 bytes, of scratch",
        exactly(64),
        "bytes",
        "plan",
        _scratch,
    ),
    _claim(
        "performance impact",
        "attention without tiles has a depth of 1,056: the sequence and the head dim",
        about(1056, 0.1),
        "steps",
        "plan",
        lambda: planned("naive", SMALL).depth,
        "a row of scores is read for the maximum, then for the sum, then for the output",
    ),
    _claim(
        "performance impact",
        "tiles with a one-thread softmax are a thousand times deeper than that",
        about(1000, 0.2),
        "×",
        "plan",
        lambda: (
            planned("small_tile", SMALL, softmax="sequential").depth / planned("naive", SMALL).depth
        ),
        "the document squares the sequence, but a block has 12 key tiles of 45 rows",
    ),
    _claim(
        "performance impact",
        "trees make tiles a hundred times shallower",
        about(100, 0.2),
        "×",
        "trace",
        depth_ratio,
        "scores and P·V stay as deep as they were",
    ),
    _claim(
        "depth table",
        "the softmax of a row becomes 12.8 times shallower",
        about(12.8, 0.1),
        "×",
        "trace",
        softmax_depth_ratio,
        "two passes and a correction against two reductions, two rows at a time",
    ),
    _claim(
        "thread efficiency",
        "thread utilisation rises 256 times",
        about(256, 0.15),
        "×",
        "trace",
        lambda: _gain("threads"),
        "90 of the 256 threads have a score, and one keeps the row's state",
    ),
    _claim(
        "thread efficiency",
        "lanes per warp rise 32 times",
        about(32, 0.1),
        "×",
        "trace",
        lambda: _gain("lanes"),
    ),
    _claim(
        "thread efficiency",
        "all threads are busy during the tree softmax",
        about(100, 0.15),
        "%",
        "trace",
        lambda: (
            100 * traced_phase("small_tile", TRACED, "softmax", softmax="tree").thread_utilisation
        ),
        "90 of the 256 threads have a score, and one keeps the row's state",
    ),
    _claim(
        "expected improvement",
        "B1 H32 S8192 D64 takes 1.1 trillion operations",
        about(1.1, 0.05),
        "trillion",
        "plan",
        lambda: planned("small_tile", LONG).work / 1e12,
        "four operations per query, key and head dim are half of that",
    ),
    _claim(
        "executive summary",
        "the whole kernel becomes 12 to 32 times faster",
        between(12, 32),
        "×",
        "bench",
        lambda: speedups("small_tile (tree)", "small_tile (sequential)", SMALL, LONG),
        "the softmax is only part of the kernel",
    ),
    _claim(
        "how to verify",
        "the one-thread softmax takes 30 to 40 % of the time",
        between(30, 40),
        "% of depth",
        "trace",
        lambda: depth_share("small_tile", TRACED, "softmax", softmax="sequential"),
        "nor is it the 99.7 % of the other document: the two contradict each other",
    ),
    _claim(
        "how to verify",
        "the tree softmax takes less than 5 %",
        at_most(5),
        "% of depth",
        "trace",
        lambda: depth_share("small_tile", TRACED, "softmax", softmax="tree"),
        "45 rows wait for each other at two barriers each",
    ),
    _claim(
        "correctness testing",
        "both softmaxes give the same output to 1e-4",
        at_most(1e-4),
        "largest difference",
        "trace",
        _difference,
        "one rounding of a 16-bit output between 0.5 and 1 is 5e-4",
    ),
)
