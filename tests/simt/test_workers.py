"""A launch in several threads: what is counted and found is what one thread counts and finds."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep import simt
from lockstep.simt import cuda, float32, int32
from lockstep.simt.machine.grid import run
from lockstep.simt.machine.workers import communicates, divide

BLOCKS, THREADS = 6, 64


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


def launched(kernel, workers, per_batch=2):
    """The trace as JSON without its time, and the output, in batches of `per_batch` blocks."""
    size = BLOCKS * THREADS
    x, out = np.arange(size, dtype=np.float32), np.ones(size, np.float32)
    arguments = kernel.bind(x, out, size)
    calls: list[tuple[int, int]] = []
    trace = run(
        kernel.typed(**arguments),
        (BLOCKS, 1, 1),
        (THREADS, 1, 1),
        0,
        arguments,
        progress=lambda done, of: calls.append((done, of)),
        lanes_per_batch=per_batch * THREADS,
        workers=workers,
    )
    assert calls[-1] == (BLOCKS, BLOCKS)
    found = trace.to_json()
    del found["seconds"]
    return found, out


@pytest.mark.parametrize("kernel", [columns, neighbours], ids=lambda k: k.__name__)
@pytest.mark.parametrize("workers", [2, 3])
def test_several_threads_count_what_one_does(kernel, workers):
    """`neighbours` races between blocks: it is run again, from what memory held before."""
    counted, out = launched(kernel, workers)
    alone, expected = launched(kernel, 1)
    assert counted == alone
    assert counted["hazards"]
    np.testing.assert_array_equal(out, expected)


def test_batches_are_of_like_sizes_and_in_order():
    assert [batch.tolist() for batch in divide(5, 2)] == [[0, 1], [2, 3], [4]]
    assert [batch.size for batch in divide(736, 512)] == [368, 368]


def test_kernels_whose_blocks_count_on_each_other_run_in_one_thread():
    total = np.zeros(1, np.int32)
    x = np.zeros(4, np.float32)
    assert communicates(counts.typed(**counts.bind(x, x.copy(), total, 4)))
    assert not communicates(columns.typed(**columns.bind(x, x.copy(), 4)))
