"""Claims of the document on splitting keys over blocks in two kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lockstep.ladder import LaunchPlan, Problem, find, plans_of
from lockstep.ladder.check import oracle

from .claim import Claim, Readings, about, at_least, at_most, between, exactly
from .evidence import CAUSAL, TOY, launch_plan, output, splits

_claim = partial(Claim, "split-KV")
ONE_HEAD = Problem(B=1, H=1, S=8192, D=64, causal=True)
SHORT = Problem(B=1, H=1, S=1024, D=64)
FIGURES = {"tile": "8x8", "kv_tiles": 4}


def _partial(**options: object) -> LaunchPlan:
    return launch_plan("split_kv", TOY, **{**FIGURES, **options})


def _entry() -> float:
    plan = _partial()
    return plan.workspace / plan.blocks


def _error() -> float:
    tensors = TOY.draw()
    got = output("split_kv", TOY, **FIGURES).double()
    return float((got - oracle(TOY, tensors)).abs().max())


def _by_splits(
    measure: Callable[[dict, dict], float], problem: Problem = ONE_HEAD
) -> Readings | None:
    """A measure of each split and the unsplit kernel, at tiles of 64."""
    rows = splits("64x64", problem)
    if not rows:
        return None
    return {
        f"kv_tiles {kv_tiles}": measure(row, rows["all"])
        for kv_tiles, row in rows.items()
        if kv_tiles != "all"
    }


def _reduction_share(row: dict, unsplit: dict) -> float:
    return 100 * row["launches"]["join_parts"] / sum(row["launches"].values())


def _gain(row: dict, unsplit: dict) -> float:
    return unsplit["microseconds"] / row["microseconds"]


def _gain_over_cost(row: dict, unsplit: dict) -> float:
    """Time that the first kernel saves by splitting, over the time that joining takes."""
    partial = "partial_attention"
    saved = unsplit["launches"][partial] - row["launches"][partial]
    return saved / row["launches"]["join_parts"]


def _best_gains() -> Readings | None:
    found = {}
    for problem in (ONE_HEAD, SHORT, CAUSAL):
        gains = _by_splits(_gain, problem)
        if gains:
            found[str(problem)] = max(gains.values())
    return found or None


def _memory_overhead() -> float:
    return 100 * _partial().workspace / (4 * TOY.rows * TOY.D)


CLAIMS = (
    _claim(
        "two-kernel architecture",
        "attention becomes two kernels",
        exactly(2),
        "kernels",
        "plan",
        lambda: len(plans_of(find("split_kv"), TOY)),
    ),
    _claim(
        "tunable parallelism",
        "256 queries in tiles of 8 make 32 blocks when nothing is split",
        exactly(32),
        "blocks",
        "plan",
        lambda: _partial(kv_tiles="all").blocks,
    ),
    _claim(
        "tunable parallelism",
        "four key tiles per block make 8 splits of a query tile",
        exactly(8),
        "splits",
        "plan",
        lambda: _partial().grid[1],
    ),
    _claim(
        "tunable parallelism",
        "which makes 256 blocks",
        exactly(256),
        "blocks",
        "plan",
        lambda: _partial().blocks,
    ),
    _claim(
        "tunable parallelism",
        "8 times as many as before",
        exactly(8),
        "×",
        "plan",
        lambda: _partial().blocks / _partial(kv_tiles="all").blocks,
    ),
    _claim(
        "two-kernel architecture",
        "the reduction has 32 blocks, one for each query tile",
        exactly(32),
        "blocks",
        "plan",
        lambda: launch_plan("split_kv", TOY, 1, **FIGURES).blocks,
    ),
    _claim(
        "workspace memory",
        "each block leaves 1,040 elements",
        exactly(1040),
        "elements",
        "plan",
        _entry,
    ),
    _claim(
        "workspace memory",
        "266,240 elements in all",
        exactly(266_240),
        "elements",
        "plan",
        lambda: _partial().workspace,
    ),
    _claim(
        "workspace memory",
        "about 0.5 MB",
        about(0.5, 0.1),
        "MB",
        "plan",
        lambda: 4 * _partial().workspace / 1e6,
        "parts are kept in float32; in float16 every split would cost precision",
    ),
    _claim(
        "workspace memory",
        "which is 10 to 20 % more memory",
        between(10, 20),
        "%",
        "plan",
        _memory_overhead,
        "q, k, v and out have 131,072 elements together, half as many as the workspace",
    ),
    _claim(
        "implementation validation",
        "the output is within 0.0012 of the exact one",
        at_most(0.0012),
        "largest error",
        "trace",
        _error,
    ),
    _claim(
        "performance claims, costs",
        "the reduction takes 10 to 20 % of the time",
        between(10, 20),
        "%",
        "bench",
        lambda: _by_splits(_reduction_share),
        "the more splits there are, the more there is to join",
    ),
    _claim(
        "performance claims",
        "what parallelism gains is 5 to 10 times what the reduction costs",
        at_least(5),
        "×",
        "bench",
        lambda: _by_splits(_gain_over_cost),
        "the more splits there are, the more there is to join",
    ),
    _claim(
        "comparison with the unsplit kernel",
        "splitting wins, above all where the sequence is long and heads are few",
        at_least(1),
        "×",
        "bench",
        _best_gains,
        "where heads fill the GPU already, the reduction is all that splitting adds",
    ),
)
