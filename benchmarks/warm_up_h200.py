"""What `lockstep warm-up` takes, with nothing on disk and with everything: docs/models.md.

    PYTHONPATH=src python benchmarks/warm_up_h200.py [MODEL ...] [--save-to benchmarks/results]

Each warm-up is a process of its own, and those with nothing on disk begin with empty caches.
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

from lockstep.bench.pivot_tables import rows_of, table_of
from lockstep.environment import usable_cores
from lockstep.output import results

MODELS = ("Llama 3 8B", "Gemma 2 9B", "gpt-oss", "DeepSeek V3 TP 8", "BERT large")
# A whole life but for packed sequences.
WORK = "prefill,decode,training"
COMMAND = "from lockstep.cli import app; app()"
BUILDS, COLD, WHOLE, LOADED = "builds", "s, nothing on disk", "s of the command", "s to load each"


def warm_up(model: str, caches: str, *options: str) -> dict[str, Any]:
    """What the command says, and its time from start to end."""
    arguments = ("warm-up", model, "--work", WORK, "--json", *options)
    places = {"TRITON_CACHE_DIR": f"{caches}/triton", "LOCKSTEP_CACHE_DIR": f"{caches}/lockstep"}
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env=os.environ | places,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout) | {"whole": perf_counter() - start}


def measure(model: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as caches:
        cold = warm_up(model, caches)
        loaded = warm_up(model, caches, "--processes", "1")
    figures = {
        BUILDS: cold["builds"],
        COLD: cold["seconds"],
        WHOLE: round(cold["whole"], 1),
        LOADED: round(loaded["seconds"] / loaded["builds"], 3),
    }
    print(model, figures, flush=True)
    return rows_of({"model": model}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--save-to", type=Path)
    options = parser.parse_args()
    run = results.collect("warm-up", [row for model in options.models for row in measure(model)])
    caption = f"Prefill, chunks, decode and training, bf16, {usable_cores()} cores"
    columns = (BUILDS, COLD, WHOLE, LOADED)
    run["tables"] = {"warm_up": table_of(["model"], columns, 3, caption)}
    if options.save_to:
        print(results.save_for_gpu(run, "warm-up", options.save_to))


if __name__ == "__main__":
    main()
