"""Claims of the document on the softmax by tree reductions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lockstep.ladder.rungs import r04_small_tile as small_tile

from .claim import Claim, Readings, about, at_most, between, exactly
from .evidence import (
    LONG,
    ONE_HEAD,
    SEVERAL_TILES,
    SMALL,
    TRACED,
    launch_plan,
    output,
    planned,
    time_shares,
    traced_phase,
)
from .tree_softmax import (
    ONE_THREAD,
    TIMED_TREES,
    depth_ratios,
    softmax_depth_ratios,
    tree_speedups,
)

if TYPE_CHECKING:
    import torch

_claim = partial(Claim, "parallel softmax")


def _scratch() -> float:
    tree, one = (
        launch_plan("small_tile", SMALL, softmax=softmax).shared_bytes
        for softmax in ("row_tree", "sequential")
    )
    return tree - one


def _busy(softmax: str) -> float:
    phase = traced_phase("small_tile", TRACED, "softmax", softmax=softmax)
    return phase.thread_utilisation


def _thread_gain() -> Readings:
    return {
        "of thread instructions": _busy("row_tree") / _busy("sequential"),
        "of threads that have a score": small_tile.BLOCK_KV,
    }


def _lane_gain() -> float:
    one, tree = (
        traced_phase("small_tile", TRACED, "softmax", softmax=softmax).counts.active_lanes
        for softmax in ("sequential", "row_tree")
    )
    return tree / one


def _outputs() -> tuple[torch.Tensor, torch.Tensor]:
    one, tree = (
        output("small_tile", SEVERAL_TILES, softmax=softmax).double()
        for softmax in ("sequential", "row_tree")
    )
    return one, tree


def _difference() -> float:
    one, tree = _outputs()
    return float((one - tree).abs().max())


def _share_that_differs() -> float:
    one, tree = _outputs()
    return 100 * float((one != tree).double().mean())


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
        depth_ratios,
        "scores and P·V stay as deep as they were",
    ),
    _claim(
        "depth table",
        "the softmax of a row becomes 12.8 times shallower",
        about(12.8, 0.1),
        "×",
        "trace",
        softmax_depth_ratios,
        "two passes and a correction against two reductions with barriers; not 90 steps against 7",
    ),
    _claim(
        "thread efficiency",
        "thread utilisation rises 256 times",
        about(256, 0.15),
        "×",
        "trace",
        _thread_gain,
        "all threads take part in the reductions, 90 of 256 have a score",
    ),
    _claim(
        "thread efficiency",
        "lanes per warp rise 32 times",
        about(32, 0.1),
        "×",
        "trace",
        _lane_gain,
    ),
    _claim(
        "thread efficiency",
        "all threads are busy during the tree softmax",
        about(100, 0.15),
        "%",
        "trace",
        lambda: {
            "of thread instructions": 100 * _busy("row_tree"),
            "of threads, those with a score": 100 * small_tile.BLOCK_KV / small_tile.THREADS,
        },
        "all threads take part in the reductions, 90 of 256 have a score",
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
        lambda: tree_speedups(SMALL, LONG),
        "the softmax is only part of the kernel",
    ),
    _claim(
        "how to verify",
        "small problems become 10 to 15 times faster",
        between(10, 15),
        "×",
        "bench",
        lambda: tree_speedups(ONE_HEAD),
        "the softmax is only part of the kernel",
    ),
    _claim(
        "how to verify",
        "the one-thread softmax takes 30 to 40 % of the time",
        between(30, 40),
        "%",
        "bench",
        lambda: time_shares(ONE_THREAD, LONG, "softmax"),
        "nor is it the 99.7 % of the other document: the two contradict each other",
    ),
    _claim(
        "how to verify",
        "the tree softmax takes less than 5 %",
        at_most(5),
        "%",
        "bench",
        lambda: time_shares(TIMED_TREES, LONG, "softmax"),
        "45 rows wait for each other at two barriers each",
    ),
    _claim(
        "correctness testing",
        "both softmaxes give the same output to 1e-4",
        at_most(1e-4),
        "largest difference",
        "trace",
        _difference,
        "one rounding of a 16-bit output between 0.25 and 0.5 is 2e-4",
    ),
    _claim(
        "algorithmic correctness",
        "the final result is identical",
        exactly(0),
        "% of elements differ",
        "trace",
        _share_that_differs,
        "a sum in another order is rounded elsewhere: close, not identical",
    ),
)
