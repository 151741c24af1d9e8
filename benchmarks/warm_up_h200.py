"""How many builds a model needs, and what `lockstep warm-up` takes for them: docs/models.md.

    PYTHONPATH=src python benchmarks/warm_up_h200.py --count-to FILE
    PYTHONPATH=src python benchmarks/warm_up_h200.py FILE [MODEL ...] [--save-to benchmarks/results]

The first command counts the builds of all models, which other work may disturb. The second times
those named, or `TIMED`, and needs the machine for itself. Each warm-up is a process of its own. One
begins with empty caches, and its time is that of the command, start and end included. The next
loads all builds from disk, after PyTorch and CUDA have started.
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
from lockstep.kernels import compiled
from lockstep.models import MODELS
from lockstep.output import results

TIMED = ("Llama 3 8B", "gpt-oss")
# A whole life but for packed sequences, and what is served at once.
WORKS = ("prefill", "decode", "training")
WARM_UP = "from lockstep.cli import app; app()"
LOAD = """
import json, sys, torch, lockstep
torch.zeros(1, device="cuda")
found = lockstep.warm_up(sys.argv[1], works=sys.argv[2].split(","), processes=1)
print(json.dumps(found._asdict()))
"""
BUILDS, PACKED, SERVED = "builds", "with packed sequences", "and served at once"
COLD, LOADED, EACH = "s, nothing on disk", "s to load them", "s each"


def count(model: str) -> dict[str, float]:
    """How many kernels are compiled for a model, without compiling them."""
    layers = MODELS[model].values()
    counts = {}
    # What is planned twice counts once.
    with torch.autograd.set_multithreading_enabled(False), compiled.planning() as planned:
        for column, works in (
            (BUILDS, WORKS),
            (PACKED, ("packed", "training")),
            (SERVED, ("serve",)),
        ):
            for call in builds.calls_of(layers, works):
                builds.run(call, torch.bfloat16, "cuda")
            counts[column] = len(planned)
    return counts


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


def save(rows: list[dict[str, Any]], directory: Path) -> None:
    found = results.collect("warm-up", rows)
    caption = f"Prefill, chunks, decode and training, bf16, {usable_cores()} cores"
    columns = (BUILDS, PACKED, SERVED, COLD, LOADED, EACH)
    found["tables"] = {"warm_up": table_of(["model"], columns, 3, caption)}
    print(results.save_for_gpu(found, "warm-up", directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", nargs="?", type=Path, help="a file of --count-to")
    parser.add_argument("models", nargs="*", default=TIMED)
    parser.add_argument("--count-to", type=Path)
    parser.add_argument("--save-to", type=Path)
    options = parser.parse_args()
    if (options.counts is None) == (options.count_to is None):
        parser.error("takes a file of counts, or --count-to")
    if options.count_to is not None:
        options.count_to.write_text(json.dumps({model: count(model) for model in MODELS}, indent=1))
        return
    rows = []
    counts = json.loads(options.counts.read_text())
    for model in options.models:
        counts[model] |= time(model)
        print(model, counts[model], flush=True)
    for model, figures in counts.items():
        rows += rows_of({"model": model}, figures)
    if options.save_to:
        save(rows, options.save_to)


if __name__ == "__main__":
    main()
