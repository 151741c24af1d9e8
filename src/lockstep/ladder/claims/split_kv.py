"""Claims of the document on splitting keys over blocks in two kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lockstep.ladder import LaunchPlan, Problem, find, plans_of
from lockstep.ladder.check import oracle

from .claim import Claim, Readings, about, at_least, at_most, between, exactly
from .evidence import CAUSAL, LONG, TOY, launch_plan, output, speedups, splits

_claim = partial(Claim, "split-KV")
ONE_HEAD = Problem(B=1, H=1, S=8192, D=64, causal=True)
FULL_HEAD = Problem(B=1, H=1, S=8192, D=64)
SHORT = Problem(B=1, H=1, S=1024, D=64)
TENSOR = "split_kv (kv_tiles 4, mma)"
SPLIT, UNSPLIT = "split_kv (64x64, kv_tiles 4)", "split_kv (64x64, all)"
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


def _gains() -> Readings | None:
    """Four key tiles to a block, as the document has it, against none split off."""
    found = {}
    for problem in (ONE_HEAD, FULL_HEAD, SHORT, CAUSAL):
        gains = _by_splits(_gain, problem)
        if gains:
            found[str(problem)] = gains["kv_tiles 4"]
    return (found | (speedups(SPLIT, UNSPLIT, LONG) or {})) or None


def _gains_by_tensor_cores() -> Readings | None:
    """Products on tensor cores against ordinary ones, four key tiles to a block.

    The suite `ladder` stands in where its times are well beyond the host's between two launches.
    """
    found = speedups(TENSOR, SPLIT, CAUSAL, LONG) or {}
    for problem in (ONE_HEAD, FULL_HEAD, SHORT, CAUSAL):
        forms = [splits("64x64", problem, products) for products in ("fma", "mma")]
        if all(forms):
            ordinary, tensor = (form["4"]["microseconds"] for form in forms)
            found[str(problem)] = ordinary / tensor
    return found or None


def _gain_by_length() -> float | None:
    """The gain of splitting with 8,192 tokens, over that with 1,024."""
    long, short = (_by_splits(_gain, problem) for problem in (FULL_HEAD, SHORT))
    return long["kv_tiles 4"] / short["kv_tiles 4"] if long and short else None


def _gains_over_costs() -> Readings | None:
    found = {}
    for problem in (ONE_HEAD, FULL_HEAD, SHORT, CAUSAL):
        readings = _by_splits(_gain_over_cost, problem)
        if readings:
            found[str(problem)] = readings["kv_tiles 4"]
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
        between(5, 10),
        "×",
        "bench",
        _gains_over_costs,
        "much more where one head leaves most of the GPU idle, less where 64 heads fill it",
    ),
    _claim(
        "comparison with the unsplit kernel",
        "splitting makes the kernel faster",
        at_least(1),
        "×",
        "bench",
        _gains,
        "where heads fill the GPU already, the reduction is all that splitting adds",
    ),
    _claim(
        "comparison with the unsplit kernel",
        "above all where the sequence is long: 8,192 tokens gain more than 1,024",
        at_least(1),
        "× the gain",
        "bench",
        _gain_by_length,
        "a long sequence has many query tiles, which fill the GPU without splitting",
    ),
    _claim(
        "why two kernels",
        "joining the parts takes a kernel of its own",
        at_least(2),
        "kernels",
        "plan",
        lambda: len(plans_of(find("split_kv").choose(join="last_block"), TOY)),
        "the last block of a query tile can join: an atomic and fences order it behind the others",
    ),
    _claim(
        "implementation validation",
        "key tiles per block are the number of splits: four of them give four splits",
        exactly(4),
        "splits",
        "plan",
        lambda: _partial().grid[1],
        "the number of splits is the key tiles of the sequence over those of a block",
    ),
    _claim(
        "implementation validation",
        "so twice the length leaves the number of splits as it is",
        exactly(1),
        "×",
        "plan",
        lambda: (
            launch_plan("split_kv", replace(TOY, S=2 * TOY.S), **FIGURES).grid[1]
            / _partial().grid[1]
        ),
        "with a fixed number of tiles per block it doubles",
    ),
    _claim(
        "future optimisations",
        "tensor cores make it faster still",
        at_least(1),
        "×",
        "bench",
        _gains_by_tensor_cores,
    ),
)
