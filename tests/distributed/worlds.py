"""Runs jobs in real processes that form a gloo group, and collects what each rank returns.

A process that imports PyTorch costs seconds, a group costs nothing: one process imports it and is
forked for every rank. Ranks stay and take one job after the other, each in a group of its own.
Where one has ended, the next job starts another.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["jobs"])


@dataclass(frozen=True)
class Ended:
    """How a job ended on a rank."""

    status: int  # 0, or that of a process that has ended instead of giving a result
    result: Any
    said: str  # on stderr, from the start of the process


def _serve(*args: Any) -> None:
    import jobs

    jobs.serve(*args)


class _Process:
    """Takes jobs and gives their results through a pipe."""

    def __init__(self) -> None:
        self._said = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        self._pipe, theirs = FORKING.Pipe()
        # What it imports is looked up once, where the server starts.
        with mock.patch.dict(os.environ, PYTHONPATH=f"{SOURCE}:{HERE}", OMP_NUM_THREADS="1"):
            self._running = FORKING.Process(target=_serve, args=(theirs, self._said.name))
            self._running.start()
        theirs.close()

    @property
    def is_there(self) -> bool:
        return self._running.is_alive()

    def send(self, job: dict[str, Any]) -> None:
        self._pipe.send(job)

    def receive(self) -> Ended:
        """Waits for the result, or for the end of the process."""
        try:
            status, result = 0, self._pipe.recv()
        except EOFError:
            self._running.join()
            status, result = self._running.exitcode, None
        self._said.seek(0)
        return Ended(status, result, self._said.read())

    def kill(self) -> None:
        self._running.kill()
        self._running.join()


_processes: list[_Process] = []


@atexit.register
def _end() -> None:
    for process in _processes:
        process.kill()


def run_world(ranks: int, job: str, *args: Any, timeout: float = 240) -> list[Ended]:
    """Runs `jobs.JOB(*args)` on every rank of a new world; args and results are pickled."""
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
