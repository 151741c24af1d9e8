"""Runs a job in real processes that form a gloo group, and collects what each rank returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    status: int
    result: Any
    said: str  # on stderr


def run_world(ranks: int, job: str, *args: Any, timeout: float = 240) -> list[Ended]:
    """Runs `jobs.JOB(*args)` on every rank of a new world; args and results are JSON."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "jobs", job, json.dumps(args), folder, str(ranks))
        processes = [
            subprocess.Popen(
                (*command, str(rank)), env=environment, stderr=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=timeout)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [
            Ended(process.returncode, _result(Path(folder) / f"{rank}.json"), said[rank])
            for rank, process in enumerate(processes)
        ]


def results_of(ended: list[Ended]) -> list[Any]:
    """What every rank returned, once all of them have ended well."""
    for rank, end in enumerate(ended):
        assert end.status == 0, f"rank {rank} ended with {end.status}:\n{end.said}"
    return [end.result for end in ended]


def _result(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
