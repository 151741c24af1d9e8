"""Tasks that other processes do side by side: each takes the next one that no other has taken.

Processes become ready while the tasks are not known yet. One of them imports PyTorch, which takes
seconds, unless it begins as a copy of this process; with the tasks it becomes all others.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

Task = Callable[[], object]
"""A function that can be pickled."""

_COMMAND = "from lockstep.build_processes import work; work()"


class _Started(NamedTuple):
    """A process that waits for tasks."""

    tasks: IO[bytes]
    wait: Callable[[], object]


class Processes:
    """Other processes that wait for tasks. `share` may be called once."""

    def __init__(self, n: int, get_ready: Task, can_copy: bool) -> None:
        """Starts them. With `can_copy` the first may be a copy of this process."""
        readable, writable = os.pipe()
        self._finished = os.fdopen(readable)
        # Elsewhere a process that has used libraries of the system cannot go on as two.
        self._forks = n - 1 if sys.platform == "linux" else 0
        self._started = []
        for _ in range(n - self._forks):
            start = _copy if can_copy and self._forks and _is_alone() else _spawn
            self._started.append(start(readable, writable))
            self._send(self._started[-1], get_ready)
        os.close(writable)

    def share(self, tasks: Sequence[Task]) -> Iterator[int]:
        """Has all tasks done, and yields the number of each when it is done. One that fails ends
        its process: what is left to do there is done by others, or not at all."""
        with tempfile.TemporaryDirectory() as claims:
            for process in self._started:
                self._send(process, (self._forks, claims, list(tasks)))
            for line in self._finished:
                yield int(line)

    def _send(self, process: _Started, what: object) -> None:
        with suppress(BrokenPipeError):  # of a process that has ended
            pickle.dump(what, process.tasks)
            process.tasks.flush()

    def close(self) -> None:
        """Waits for all processes; those without tasks end."""
        for process in self._started:
            with suppress(BrokenPipeError):
                process.tasks.close()
        for process in self._started:
            process.wait()
        self._finished.close()


@contextmanager
def processes(n: int, get_ready: Task, can_copy: bool) -> Iterator[Processes]:
    """`n` processes that end with this context, and first of all do what `get_ready` does."""
    started = Processes(n, get_ready, can_copy)
    try:
        yield started
    finally:
        started.close()


def work() -> None:
    """Do tasks out of standard input that no other process has claimed, and print the number of
    each that is done."""
    get_ready = pickle.load(sys.stdin.buffer)
    get_ready()
    try:
        forks, claims, tasks = pickle.load(sys.stdin.buffer)
    except EOFError:  # there are none
        return
    for _ in range(forks):
        if os.fork() == 0:
            break
    for i, task in enumerate(tasks):
        try:
            (Path(claims) / str(i)).touch(exist_ok=False)
        except FileExistsError:
            continue
        task()
        # In one piece, beside those of other processes.
        os.write(sys.stdout.fileno(), f"{i}\n".encode())


def _is_alone() -> bool:
    """Whether no other thread of this process could hold a lock that its copy would wait for."""
    return threading.active_count() == 1


def _spawn(readable: int, writable: int) -> _Started:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": writable, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", _COMMAND], **pipes)
    assert process.stdin is not None
    return _Started(process.stdin, process.wait)


def _copy(readable: int, writable: int) -> _Started:
    tasks, to_write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(to_write)
        os.close(readable)
        _become_worker(tasks, writable)
    os.close(tasks)
    return _Started(os.fdopen(to_write, "wb"), lambda: os.waitpid(process, 0))


def _become_worker(tasks: int, writable: int) -> NoReturn:
    """Go on as `_spawn`'s process, and end without what this one has to do at its end."""
    try:
        os.dup2(tasks, 0)
        os.dup2(writable, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        work()
    finally:
        os._exit(0)
