"""Every rung of the ladder on a GPU, timed beside PyTorch's attention and the library's own.

    PYTHONPATH=src python benchmarks/ladder_gpu.py

Each rung is checked against the float64 oracle before it is timed; all of them take their times in
one run. Needs a CUDA GPU and the extra `gpu`. Writes benchmarks/results/ladder-<gpu>.json. Exit
status 1 if a rung is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lockstep
from lockstep.bench import peers
from lockstep.bench.gpu_timing import take_turns
from lockstep.ladder import RUNGS, Problem, Rung, Tensors, run_on_gpu
from lockstep.ladder.check import errors
from lockstep.ladder.survey import microseconds
from lockstep.output import results
from lockstep.output.console import table
from lockstep.output.formats import duration

ROOT = Path(__file__).resolve().parents[1]
PROBLEMS = (
    Problem(B=2, H=16, S=1024, D=32),
    Problem(B=4, H=16, S=1024, D=64, causal=True),
    Problem(B=1, H=32, S=8192, D=64),
    Problem(B=1, H=1, S=1024, D=64),
)
CHECKED = (
    Problem(B=2, H=3, S=111, D=32),
    Problem(B=1, H=2, S=257, D=64, causal=True, dtype="bfloat16"),
    Problem(B=1, H=2, S=200, D=128, causal=True),
    Problem(B=1, H=1, S=1, D=64),
)
PEERS = {"FA2": "FA2 (PyTorch)", "cuDNN": "cuDNN"}


def wrong(rung: Rung) -> list[Problem]:
    """The problems that this rung gets wrong here."""
    found = []
    for problem in CHECKED:
        tensors = problem.draw(device="cuda")
        run_on_gpu(rung, problem, tensors)
        if not errors(problem, tensors).ok:
            found.append(problem)
    return found


def row(problem: Problem, name: str, time: float | None, why_not: str = "") -> dict[str, Any]:
    """One figure. Per head: the time of the whole call over H, as if heads took turns."""
    pairs = problem.S * (problem.S + 1) // 2 if problem.causal else problem.S**2
    flops = 4 * problem.D * pairs * problem.heads
    return {
        "problem": asdict(problem),
        "shape": str(problem),
        "kernel": name,
        "microseconds": time,
        "microseconds_per_head": time and time / problem.H,
        "tflops": time and flops / time / 1e6,
        "why_not": why_not,
    }


def rung_rows(problem: Problem, tensors: Tensors, rungs: list[Rung]) -> Iterator[dict[str, Any]]:
    for rung in rungs:
        about = {"rung": rung.name, "options": rung.settings, "constant_time": rung.constant_time}
        try:
            yield row(problem, rung.title, microseconds(rung, problem, tensors)) | about
        except ValueError as error:  # more workspace than int32 can index
            yield row(problem, rung.title, None, str(error)) | about
        torch.cuda.empty_cache()


def peer_rows(problem: Problem, tensors: Tensors) -> Iterator[dict[str, Any]]:
    """PyTorch's kernels, and whatever the library chooses for these tensors, in turns."""
    q, k, v, _ = tensors
    prepared = {peer.name: peer.prefill for peer in peers.find() if peer.name in PEERS}
    calls = {
        PEERS[name]: prepare(q, k, v, problem.causal)
        for name, prepare in prepared.items()
        if prepare is not None
    }
    ours = lockstep.explain(q, k, v, causal=problem.causal).kernel
    if ours not in (None, "oracle"):
        attention = partial(lockstep.attention, q, k, v, causal=problem.causal)
        calls[f"lockstep.attention ({ours})"] = attention
    timings = take_turns(calls)
    for name in calls:
        yield row(problem, name, 1e6 * timings.median(name))


def save(rows: list[dict[str, Any]]) -> Path:
    return results.save_for_gpu(results.collect("ladder", rows), "ladder", ROOT / results.RESULTS)


def main() -> int:
    """Check, time, print, save."""
    console = Console(width=100)
    if not torch.cuda.is_available():
        console.print("no CUDA device here", style="red")
        return 2
    steps = [step for rung in RUNGS for step in rung.steps()]
    failed = {step.title: problems for step in steps if (problems := wrong(step))}
    for title, problems in failed.items():
        console.print(f"wrong: {title} at {', '.join(map(str, problems))}", style="red")
    right = [step for step in steps if step.title not in failed]
    rows: list[dict[str, Any]] = []
    for problem in PROBLEMS:
        tensors = problem.draw(device="cuda")
        shown = table(str(problem), "time", "per head", "TFLOP/s", right=("time", "per head"))
        for found in (
            *rung_rows(problem, tensors, right),
            *peer_rows(problem, tensors),
        ):
            rows.append(found)
            time = found["microseconds"]
            cells = ("–", "–", found["why_not"][:40])
            if time is not None:
                per_head = duration(found["microseconds_per_head"] / 1e6)
                cells = (duration(time / 1e6), per_head, f"{found['tflops']:.1f}")
            shown.add_row(found["kernel"], *cells)
        console.print(shown)
        save(rows)
    console.print(f"saved {save(rows).relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
