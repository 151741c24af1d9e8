"""Many processes and many threads at once."""

from __future__ import annotations

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
    caches = Path(cpu.__file__).parent.glob("__pycache__/*.code")
    return {path: path.stat().st_mtime_ns for path in caches}


@pytest.mark.slow
def test_a_later_process_compiles_nothing():
    environment = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    environment.pop("NUMBA_CACHE_DIR", None)
    # The first may have to compile, unless another test has had it done.
    for _ in range(2):
        before = _compiled_files()
        subprocess.run([sys.executable, "-c", CALL], check=True, env=environment)
        if before and _compiled_files() == before:
            return
    raise AssertionError(f"the second process has compiled, too: {len(before)} files before it")


def test_python_threads_may_call_at_once():
    inputs = [torch.randn(3, 1, 4, 500, 64) for _ in range(6)]
    expected = [lockstep.attention(*x, causal=True) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: lockstep.attention(*x, causal=True), inputs * 3))
    for out, reference in zip(found, expected * 3, strict=True):
        assert torch.equal(out, reference)
