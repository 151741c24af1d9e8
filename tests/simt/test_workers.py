"""A launch in several processes: what is counted and found is what one counts and finds."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from lockstep import simt
from lockstep.simt import cuda, float32, int32
from lockstep.simt.errors import SimtError
from lockstep.simt.machine.grid import run
from lockstep.simt.machine.workers import communicates, divide

BLOCKS, THREADS = 6, 64
SIZE = BLOCKS * THREADS


@simt.kernel
def columns(x: float32[:], out: float32[:], n: int32):
    """Conflicts, divergence, and a race in shared memory."""
    tile = cuda.shared.array((64, 32), float32)
    tid = cuda.threadIdx.x
    at = cuda.blockIdx.x * 64 + tid
    tile[tid, cuda.blockIdx.x] = x[at]
    if tid < 40:
        out[at] = tile[tid + 1, cuda.blockIdx.x] * 2.0


@simt.kernel
def neighbours(x: float32[:], out: float32[:], n: int32):
    """Every block also writes the first element of the next one."""
    at = cuda.blockIdx.x * 64 + cuda.threadIdx.x
    out[at] = x[at] + out[at]
    if cuda.threadIdx.x == 0 and at + 64 < n:
        out[at + 64] = 1.0


@simt.kernel
def counts(x: float32[:], out: float32[:], total: int32[:], n: int32):
    cuda.atomic.add(total, 0, 1)


@simt.kernel
def endless(x: float32[:], out: float32[:], n: int32):
    """The last blocks ask for a range without an end."""
    out[cuda.blockIdx.x * 64 + cuda.threadIdx.x] = 2.0
    step = 1
    if cuda.blockIdx.x >= 4:
        step = 0
    for i in range(0, 3, step):
        out[i] = 3.0


def run_in_batches(kernel, arguments, workers, progress=None):
    """The trace of a launch, two blocks to a batch."""
    return run(
        kernel.typed(**arguments),
        (BLOCKS, 1, 1),
        (THREADS, 1, 1),
        0,
        arguments,
        progress=progress,
        lanes_per_batch=2 * THREADS,
        workers=workers,
    )


def launched(kernel, workers, out=None):
    """The trace as JSON without its time, and the output."""
    x = np.arange(SIZE, dtype=np.float32)
    out = np.ones(SIZE, np.float32) if out is None else out
    calls: list[tuple[int, int]] = []
    trace = run_in_batches(
        kernel, kernel.bind(x, out, SIZE), workers, lambda done, of: calls.append((done, of))
    )
    assert calls[-1] == (BLOCKS, BLOCKS)
    found = trace.to_json()
    del found["seconds"]
    return found, out


@pytest.mark.parametrize("kernel", [columns, neighbours], ids=lambda k: k.__name__)
@pytest.mark.parametrize("workers", [2, 3])
def test_several_processes_count_what_one_does(kernel, workers):
    """`neighbours` races between blocks: it is run again, by one process."""
    counted, out = launched(kernel, workers)
    alone, expected = launched(kernel, 1)
    assert counted == alone
    assert counted["hazards"]
    np.testing.assert_array_equal(out, expected)


def test_batches_are_of_like_sizes_and_in_order():
    assert [batch.tolist() for batch in divide(5, 2)] == [[0, 1], [2, 3], [4]]
    assert [batch.size for batch in divide(736, 512)] == [368, 368]


def test_what_other_processes_write_arrives_in_strided_memory_and_in_tensors():
    wide = np.ones(2 * SIZE, np.float32)
    _, expected = launched(columns, 1)
    launched(columns, 2, wide[::2])
    np.testing.assert_array_equal(wide[::2], expected)
    np.testing.assert_array_equal(wide[1::2], 1)
    tensor = torch.ones(SIZE)
    launched(columns, 2, tensor)
    np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.fixture
def forked(monkeypatch):
    """Numbers of the processes that were forked."""
    fork, numbers = os.fork, []

    def remembering():
        number = fork()
        numbers.append(number)
        return number

    monkeypatch.setattr(os, "fork", remembering)
    return numbers


def gone(number):
    with pytest.raises(ChildProcessError):
        os.waitpid(number, os.WNOHANG)
    return True


def test_what_fails_in_a_process_fails_here(forked):
    x, out = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    with pytest.raises(SimtError, match="step zero"):
        run_in_batches(endless, endless.bind(x, out, SIZE), 3)
    assert len(forked) == 3
    assert all(map(gone, forked))


def test_an_interrupted_launch_leaves_no_process_and_no_output(forked):
    def interrupt(done, of):
        raise KeyboardInterrupt

    x, out = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    with pytest.raises(KeyboardInterrupt):
        run_in_batches(columns, columns.bind(x, out, SIZE), 2, interrupt)
    assert len(forked) == 2
    assert all(map(gone, forked))
    assert (out == 1).all()


def test_kernels_whose_blocks_count_on_each_other_run_in_one_process():
    total = np.zeros(1, np.int32)
    x = np.zeros(4, np.float32)
    assert communicates(counts.typed(**counts.bind(x, x.copy(), total, 4)))
    assert not communicates(columns.typed(**columns.bind(x, x.copy(), 4)))
