"""Runs jobs in real processes that form a gloo group, and collects what each rank returns.

A process that imports PyTorch costs seconds, a group costs nothing: processes stay and take one job
after the other, each in a group of its own. Where one has ended, the next job starts another.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass(frozen=True)
class Ended:
    """How a job ended on a rank."""

    status: int  # 0, or that of a process that has ended instead of giving a result
    result: Any
    said: str  # on stderr, from the start of the process


class _Process:
    """Takes jobs by stdin and gives their results by stdout, each a line of JSON."""

    def __init__(self) -> None:
        self._stderr: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._running = subprocess.Popen(
            (sys.executable, "-m", "jobs"),
            env=os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    @property
    def is_there(self) -> bool:
        return self._running.poll() is None

    def send(self, job: dict[str, Any]) -> None:
        self._running.stdin.write(json.dumps(job) + "\n")
        self._running.stdin.flush()

    def receive(self) -> Ended:
        """Waits for the result, or for the end of the process."""
        line = self._running.stdout.readline()
        status = 0 if line else self._running.wait()
        self._stderr.seek(0)
        return Ended(status, json.loads(line) if line else None, self._stderr.read())

    def kill(self) -> None:
        self._running.kill()
        self._running.wait()


_processes: list[_Process] = []


@atexit.register
def _end() -> None:
    for process in _processes:
        process.kill()


def run_world(ranks: int, job: str, *args: Any, timeout: float = 240) -> list[Ended]:
    """Runs `jobs.JOB(*args)` on every rank of a new world; args and results are JSON."""
    _processes[:] = [process for process in _processes if process.is_there]
    _processes.extend(_Process() for _ in range(ranks - len(_processes)))
    world = _processes[:ranks]
    overdue = threading.Timer(timeout, lambda: [process.kill() for process in world])
    overdue.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank, process in enumerate(world):
                process.send(
                    {"job": job, "args": args, "folder": folder, "ranks": ranks, "rank": rank}
                )
            return [process.receive() for process in world]
    finally:
        overdue.cancel()


def results_of(ended: list[Ended]) -> list[Any]:
    """What every rank returned, once all of them have ended well."""
    for rank, end in enumerate(ended):
        assert end.status == 0, f"rank {rank} ended with {end.status}:\n{end.said}"
    return [end.result for end in ended]
