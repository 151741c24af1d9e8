"""The fp32 cases of `lockstep bench cpu` on one core, by the processor's time: README.

    PYTHONPATH=src python benchmarks/cpu_one_core.py

For machines that other work runs on as well: what counts is the time that the thread ran, the
least of many rounds, in turns with PyTorch. Two heads stand for eight. Every case is checked first.
Writes benchmarks/results/cpu-one-core.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.bench import cpu, pivot_tables
from lockstep.kernels.cpu import roof
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 12


def cases() -> list[cpu.Case]:
    forward = [case for case in cpu.CASES if case.name in ("fp32 forward", "fp32 causal")]
    both = [case for case in cpu.CASES if case.backward]
    return [replace(case, Hq=2, Hkv=2) for case in forward + both]


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main() -> None:
    torch.set_num_threads(1)
    best = roof.measure(time.thread_time) / 1e9
    rows = []
    for case in cases():
        cpu.run(case, rounds=1)
        calls = cpu.contenders(case, *cpu._inputs(case))
        rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
        ours, theirs = (min(turn[name] for turn in rounds) for name in (cpu.LOCKSTEP, cpu.SDPA))
        figures = {
            "lockstep, ms": ours * 1e3,
            "SDPA, ms": theirs * 1e3,
            "speed": theirs / ours,
            "of the roof, %": case.operations / ours / best / 1e7,
            "SDPA, of the roof, %": case.operations / theirs / best / 1e7,
        }
        print(case.name, case.shape, figures, flush=True)
        common = {"case": case.name, "shape": case.shape}
        rows += pivot_tables.rows_of(common, figures)
    run = results.collect("cpu-one-core", rows)
    run["roof_gflops"] = round(best, 1)
    caption = f"The roof is {best:.1f} GFLOP/s; least of {ROUNDS} turns"
    run["tables"] = {"cpu_one_core": pivot_tables.table_of(["case", "shape"], figures, 3, caption)}
    results.write(run, ROOT / results.RESULTS / "cpu-one-core.json")


if __name__ == "__main__":
    main()
