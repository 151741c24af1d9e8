"""The rungs of the ladder on the lockstep machine against a GPU: same outputs, same transactions?

What benchmarks/simt_vs_gpu.py does for the samples, for every launch of every rung:

    PYTHONPATH=src python benchmarks/ladder_vs_gpu.py

Needs a CUDA GPU, the extra `gpu`, and `ncu` on the path (`--no-counters` does without). Exit status
1 if an output differs, or a count that has no reason to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import simt_vs_gpu
import torch

from lockstep.ladder import RUNGS, Launch, Problem, Rung, launches_of
from lockstep.simt import ir
from lockstep.simt.samples import Sample

PROBLEM = Problem(B=1, H=1, S=128, D=32)
RESULT = simt_vs_gpu.ROOT / "benchmarks" / "results" / "ladder-vs-h200.json"
# outputs are fp16: a last bit of 2**-11, relative to a largest value that may be up to twice as big
TOLERANCE = 2.0**-10
ASYNCHRONOUS = "hardware counts some parts of an asynchronous copy twice"
WHY = "exp2 differs in the last bit, and tensor cores add in an order of their own"


def written(launch: Launch) -> tuple[str, ...]:
    """Names of the global arrays that a kernel stores to."""
    stores = (ir.Store, ir.VectorStore, ir.FragmentStore)
    body = launch.kernel.typed(**launch.arguments).body
    arrays = [stmt.array for stmt in ir.walk(body) if isinstance(stmt, stores)]
    return tuple(dict.fromkeys(a.name for a in arrays if a.space is ir.Space.GLOBAL))


def known_difference(launch: Launch) -> str:
    body = launch.kernel.typed(**launch.arguments).body
    copies = any(isinstance(stmt, ir.AsyncCopy) for stmt in ir.walk(body))
    return ASYNCHRONOUS if copies else ""


def samples_of(rung: Rung) -> list[Sample]:
    """One sample per launch, its arguments as the launches before it left them."""
    launches = launches_of(rung, PROBLEM, PROBLEM.draw())
    found = []
    for launch in launches:
        kernel, arguments = launch.kernel, _copied(launch.arguments)
        found.append(
            Sample(
                rung.title if len(launches) == 1 else f"{rung.title}: {kernel.__name__}",
                kernel,
                launch.grid,
                launch.block,
                written(launch),
                lambda _, kept=arguments: _copied(kept),
                launch.dynamic_bytes,
                tolerance=TOLERANCE,
                why=WHY,
                differs=known_difference(launch),
            )
        )
        if launch is not launches[-1]:
            kernel[launch.grid, launch.block, launch.dynamic_bytes].trace(**launch.arguments)
    return found


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def all_samples() -> list[Sample]:
    """Every launch of every rung."""
    return [sample for rung in RUNGS for step in rung.steps() for sample in samples_of(step)]


if __name__ == "__main__":
    about = __doc__.splitlines()[0]
    sys.exit(simt_vs_gpu.run("ladder-vs-gpu", all_samples, __file__, RESULT, about))
