"""How many builds a model needs, and what `lockstep warm-up` takes for them: docs/models.md.

    PYTHONPATH=src python benchmarks/warm_up_h200.py [MODEL ...] [--save-to benchmarks/results]

Builds are counted for all models; those named, or `TIMED`, are timed. Each warm-up is a process of
its own. One begins with empty caches, and its time is that of the command, start and end included.
The next loads all builds from disk, after PyTorch and CUDA have started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lockstep import builds
from lockstep.bench.pivot_tables import rows_of, table_of
from lockstep.environment import usable_cores
from lockstep.models import MODELS
from lockstep.output import results

TIMED = ("Llama 3 8B", "gpt-oss")
# A whole life but for packed sequences.
WORKS = ("prefill", "decode", "training")
WARM_UP = "from lockstep.cli import app; app()"
LOAD = """
import json, sys, torch, lockstep
torch.zeros(1, device="cuda")
found = lockstep.warm_up(sys.argv[1], works=sys.argv[2].split(","), processes=1)
print(json.dumps(found._asdict()))
"""
BUILDS, PACKED = "builds", "with packed sequences"
COLD, LOADED, EACH = "s, nothing on disk", "s to load them", "s each"


def count(model: str) -> dict[str, float]:
    """How many kernels are compiled for a model, without compiling them."""

    def of(works: tuple[str, ...]) -> int:
        calls = builds.calls_of(MODELS[model].values(), works)
        # The last task is no kernel: what launches them.
        return len(builds.tasks_of(calls, torch.bfloat16, "cuda")) - 1

    return {BUILDS: of(WORKS), PACKED: of(builds.WORKS)}


def run(program: str, *arguments: str, caches: str) -> tuple[dict[str, Any], float]:
    """What a program prints, and its seconds from start to end."""
    places = {"TRITON_CACHE_DIR": f"{caches}/triton", "LOCKSTEP_CACHE_DIR": f"{caches}/lockstep"}
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | places,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout), perf_counter() - start


def time(model: str) -> dict[str, float]:
    works = ",".join(WORKS)
    with tempfile.TemporaryDirectory() as caches:
        _, cold = run(WARM_UP, "warm-up", model, "--work", works, "--json", caches=caches)
        loaded, _ = run(LOAD, model, works, caches=caches)
    seconds = loaded["seconds"]
    return {COLD: round(cold, 1), LOADED: seconds, EACH: round(seconds / loaded["builds"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=TIMED)
    parser.add_argument("--save-to", type=Path)
    options = parser.parse_args()
    rows = []
    # The seconds first: they need the machine for themselves.
    for measure, models in ((time, options.models), (count, MODELS)):
        for model in models:
            figures = measure(model)
            print(model, figures, flush=True)
            rows += rows_of({"model": model}, figures)
    found = results.collect("warm-up", rows)
    caption = f"Prefill, chunks, decode and training, bf16, {usable_cores()} cores"
    columns = (BUILDS, PACKED, COLD, LOADED, EACH)
    found["tables"] = {"warm_up": table_of(["model"], columns, 3, caption)}
    if options.save_to:
        print(results.save_for_gpu(found, "warm-up", options.save_to))


if __name__ == "__main__":
    main()
