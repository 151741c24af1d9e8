"""Tasks in other processes: each is done once, whatever happens to the others."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from lockstep import build_processes
from lockstep.build_processes import processes

STARTS = [True, pytest.param(False, marks=pytest.mark.slow)]


def shared(tasks, n, can_copy, get_ready=os.getpid):
    with processes(n, get_ready, can_copy) as others:
        return sorted(others.share(tasks))


@pytest.mark.parametrize("can_copy", STARTS)
def test_every_task_is_done_once(tmp_path, can_copy):
    # A folder cannot be made twice.
    tasks = [partial(os.mkdir, tmp_path / str(i)) for i in range(7)]
    assert shared(tasks, 3, can_copy) == list(range(7))
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize("can_copy", STARTS)
def test_a_process_is_ready_before_there_are_tasks(tmp_path, can_copy):
    ready, done = tmp_path / "ready", tmp_path / "done"
    assert shared([partial(os.rename, ready, done)], 2, can_copy, partial(os.mkdir, ready)) == [0]
    assert done.exists()


def test_a_task_that_fails_leaves_the_others_to_others(tmp_path):
    tasks = [partial(os.rmdir, tmp_path / "none")]
    tasks += [partial(os.mkdir, tmp_path / str(i)) for i in range(3)]
    assert shared(tasks, 2, True) == [1, 2, 3]


def test_processes_that_cannot_get_ready_do_nothing(tmp_path):
    failing = partial(os.rmdir, tmp_path / "none")
    assert shared([partial(os.mkdir, tmp_path / "x")], 2, True, failing) == []


def test_processes_without_tasks_end():
    with processes(2, os.getpid, True):
        pass


def test_a_process_with_threads_is_not_copied(monkeypatch):
    copies = []
    monkeypatch.setattr(build_processes, "_spawn", build_processes._copy)
    monkeypatch.setattr(build_processes, "_copy", lambda *_: copies.append(_))
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert shared([os.getpid], 2, True) == [0]
    finally:
        end.set()
        thread.join()
    assert copies == []
