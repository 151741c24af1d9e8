"""Compiled code on disk, many threads at once, and forked children."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.kernels import cpu

CALL = """
import torch, lockstep
x = torch.randn(1, 2, 300, 64, requires_grad=True)
lockstep.attention(x, x, x, causal=True).sum().backward()
"""


def _compiled_files() -> dict[Path, int]:
    caches = Path(cpu.__file__).parent.glob("__pycache__/*.nb[ic]")
    return {path: path.stat().st_mtime_ns for path in caches}


def test_a_later_process_compiles_nothing():
    environment = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    environment.pop("NUMBA_CACHE_DIR", None)
    for _ in range(2):
        before = _compiled_files()
        subprocess.run([sys.executable, "-c", CALL], check=True, env=environment)
    assert before, "nothing was kept on disk"
    assert _compiled_files() == before


def test_importing_the_kernels_does_not_import_numba():
    code = "import sys, lockstep; sys.exit('numba' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_python_threads_may_call_at_once():
    inputs = [torch.randn(3, 1, 4, 500, 64) for _ in range(6)]
    expected = [lockstep.attention(*x, causal=True) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: lockstep.attention(*x, causal=True), inputs * 3))
    for out, reference in zip(found, expected * 3, strict=True):
        assert torch.equal(out, reference)


def _attend(x: torch.Tensor, pipe) -> None:
    pipe.send_bytes(lockstep.attention(x, x, x).numpy().tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_attends_with_the_same_bits():
    x = torch.randn(1, 4, 600, 64)
    expected = lockstep.attention(x, x, x)  # the parent's OpenMP threads are up
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_attend, args=(x, sender))
    child.start()
    try:
        assert receiver.poll(60), "the child hangs"
        assert receiver.recv_bytes() == expected.numpy().tobytes()
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
