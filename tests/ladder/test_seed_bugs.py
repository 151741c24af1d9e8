"""Two mistakes that block reductions invite, and what the machine says to them.

The first returns its result to warp 0 alone. The second borrows the memory of the Q tile for the
partial results of the warps. Both look right in a test with one warp, or one KV tile.
"""

from __future__ import annotations

import numpy as np
import pytest

from lockstep import simt
from lockstep.ladder import Problem, run_on_machine
from lockstep.ladder.check import errors
from lockstep.ladder.parts.rows import EMPTY, FULL, rows_max, warp_max, warp_sum
from lockstep.ladder.rungs import r04_small_tile as small_tile
from lockstep.simt import Constant, HazardError, SimtError, cuda, float16, float32

THREADS = 256
WARPS = THREADS // 32
PROBLEM = Problem(B=1, H=1, S=100, D=32)  # three query tiles, two KV tiles


@simt.device
def max_for_warp_0(value, partial, WARPS_PER_ROW: Constant):
    """Only the first threads of the block read the partial results: the final shuffle broadcasts
    within each warp, and in the others there is nothing to broadcast."""
    value = warp_max(value)
    if cuda.threadIdx.x % 32 == 0:
        partial[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    value = EMPTY
    if cuda.threadIdx.x < WARPS:
        value = partial[cuda.threadIdx.x % 32]
    return cuda.shfl_sync(FULL, warp_max(value), 0)


@simt.device
def max_in_borrowed_memory(value, tile, WARPS_PER_ROW: Constant):
    """The first floats of the tile hold the partial results. There is a barrier too few as well:
    nothing keeps a fast warp from writing before a slow one has read the tile."""
    value = warp_max(value)
    if cuda.threadIdx.x % 32 == 0:
        tile[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    value = tile[0]
    for other in range(1, WARPS):
        value = max(value, tile[other])
    return value


@simt.kernel
def reduce(x: float32[:], out: float32[:], BROKEN: Constant):
    partial = cuda.shared.array(WARPS, float32)
    if BROKEN:
        out[cuda.threadIdx.x] = max_for_warp_0(x[cuda.threadIdx.x], partial, WARPS)
    else:
        out[cuda.threadIdx.x] = rows_max(x[cuda.threadIdx.x], partial, WARPS)


@simt.kernel
def reduce_twice(x: float32[:], out: float32[:]):
    """A maximum and a sum through the same scratch, as a softmax needs them."""
    partial = cuda.shared.array(WARPS, float32)
    top = max_for_warp_0(x[cuda.threadIdx.x], partial, WARPS)
    part = warp_sum(cuda.exp2(x[cuda.threadIdx.x] - top))
    if cuda.threadIdx.x % 32 == 0:
        partial[cuda.threadIdx.x // 32] = part
    cuda.syncthreads()
    out[cuda.threadIdx.x] = partial[0]


@simt.kernel
def score_and_reduce(q: float32[:], out: float32[:]):
    """Scores of a query with itself, rolled; the reduction's scratch lies on the query."""
    q_tile = cuda.shared.array(0, float32)
    scratch = cuda.shared.array(0, float32)
    t = cuda.threadIdx.x
    q_tile[t] = q[t]
    cuda.syncthreads()
    score = 0.0
    for d in range(32):
        score += q_tile[d] * q_tile[(t + d) % THREADS]
    out[t] = max_in_borrowed_memory(score, scratch, WARPS)


@simt.kernel
def half_tile_under_float_scratch(q: float16[:], out: float32[:]):
    q_tile = cuda.shared.array(0, float16)
    scratch = cuda.shared.array(0, float32)
    t = cuda.threadIdx.x
    q_tile[t] = q[t]
    cuda.syncthreads()
    out[t] = max_in_borrowed_memory(float32(q_tile[t]), scratch, WARPS)


@pytest.fixture
def numbers():
    return np.random.default_rng(0).standard_normal(THREADS).astype(np.float32)


def test_a_reduction_for_warp_0_leaves_the_others_empty(numbers):
    out = np.zeros(THREADS, np.float32)
    reduce[1, THREADS](numbers, out, True)
    assert (out[:32] == numbers.max()).all()
    assert (out[32:] == EMPTY).all()
    reduce[1, THREADS](numbers, out, False).check()
    assert (out == numbers.max()).all()


def test_and_using_its_scratch_again_is_a_race(numbers):
    trace = reduce_twice[1, THREADS](numbers, np.zeros(THREADS, np.float32))
    with pytest.raises(HazardError, match=r"race: overwrites partial\[\d\], which another thread"):
        trace.check()


def test_a_softmax_with_that_reduction_is_wrong(monkeypatch):
    """small_tile itself, with the broken maximum in place of the right one."""
    monkeypatch.setattr(small_tile, "rows_max", max_for_warp_0)
    monkeypatch.setattr(small_tile.small_tile, "_typed", {})  # what was built of it before
    tensors = PROBLEM.draw()
    run_on_machine(small_tile.RUNG, PROBLEM, tensors)
    found = errors(PROBLEM, tensors)
    assert not found.ok
    assert found.ours == float("inf")  # exp2(s - (-inf)), and infinity over infinity


def test_scratch_that_overlaps_the_tile_is_a_race(numbers):
    trace = score_and_reduce[1, THREADS, 4 * THREADS](numbers, np.zeros(THREADS, np.float32))
    with pytest.raises(HazardError, match=r"race: overwrites q_tile\[\d\], which .* thread"):
        trace.check()


def test_scratch_of_another_type_over_the_tile_is_refused(numbers):
    half, out = numbers.astype(np.float16), np.zeros(THREADS, np.float32)
    with pytest.raises(SimtError, match="'scratch' overlays 'q_tile' with another type"):
        half_tile_under_float_scratch[1, THREADS, 2 * THREADS](half, out)
