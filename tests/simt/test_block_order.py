"""Order between blocks: a fence and an atomic hand over what a block wrote."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep import simt
from lockstep.simt import Constant, cuda, float32, int32
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.machine.grid import run

BLOCKS, THREADS = 6, 64


@simt.kernel
def last_block_adds(
    x: float32[:],
    parts: float32[:],
    count: int32[:],
    out: float32[:],
    BEFORE: Constant,
    AFTER: Constant,
    MEET: Constant,
):
    """Every block leaves its part; the last of them adds up all parts."""
    ticket = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    at = cuda.blockIdx.x * cuda.blockDim.x + t
    parts[at] = 2.0 * x[at]
    if MEET:
        cuda.syncthreads()
    if t == 0:
        if BEFORE:
            cuda.threadfence()
        ticket[0] = cuda.atomic.add(count, 0, 1)
        if AFTER:
            cuda.threadfence()
    cuda.syncthreads()
    if ticket[0] == cuda.gridDim.x - 1:
        total = 0.0
        for block in range(cuda.gridDim.x):
            total += parts[block * cuda.blockDim.x + t]
        out[t] = total


def trace(blocks_at_a_time: int, **constants: bool):
    x = np.arange(BLOCKS * THREADS, dtype=np.float32)
    out = np.zeros(THREADS, np.float32)
    arguments = {"x": x, "parts": np.zeros_like(x), "count": np.zeros(1, np.int32), "out": out}
    arguments |= {"BEFORE": True, "AFTER": True, "MEET": True} | constants
    typed = last_block_adds.typed(**arguments)
    lanes = blocks_at_a_time * THREADS
    found = run(typed, (BLOCKS, 1, 1), (THREADS, 1, 1), 0, arguments, lanes_per_batch=lanes)
    assert (out == 2 * x.reshape(BLOCKS, THREADS).sum(axis=0)).all()
    return found


@pytest.mark.parametrize("blocks_at_a_time", [1, 4, 6])
def test_a_hand_over_is_no_race(blocks_at_a_time):
    trace(blocks_at_a_time).check()


@pytest.mark.parametrize("blocks_at_a_time", [1, 6])
@pytest.mark.parametrize("missing", ["BEFORE", "AFTER", "MEET"])
def test_without_a_fence_or_a_barrier_it_is(missing, blocks_at_a_time):
    (hazard,) = trace(blocks_at_a_time, **{missing: False}).hazards
    assert hazard.kind == "race between blocks"
    assert "which another block wrote; nothing orders the two" in hazard.message
    assert hazard.block == (BLOCKS - 1, 0, 0)
    # thread 0 itself fenced after its own write: of the others' writes nothing is known
    assert ("parts[0]" in hazard.message) == (missing != "MEET")


@simt.kernel
def passed_on(x: float32[:], flags: int32[:], FENCED: Constant):
    """Block 0 hands over to block 1, which hands over to block 2; that one reads."""
    b = cuda.blockIdx.x
    if b == 0:
        x[0] = 1.0
        cuda.threadfence()
        cuda.atomic.add(flags, 0, 1)
    if b == 1:
        cuda.atomic.add(flags, 0, 1)
        if FENCED:
            cuda.threadfence()
        cuda.atomic.add(flags, 1, 1)
    if b == 2:
        cuda.atomic.add(flags, 1, 1)
        cuda.threadfence()
        x[1] = x[0]


@pytest.mark.parametrize("fenced", [True, False])
def test_what_was_taken_over_is_handed_on(fenced):
    x, flags = np.zeros(2, np.float32), np.zeros(2, np.int32)
    assert len(passed_on[3, 1](x, flags, fenced).hazards) == (0 if fenced else 1)


@simt.kernel
def fence_then_write(x: float32[:], flag: int32[:]):
    """What is written after the fence is not handed over."""
    if cuda.blockIdx.x == 0:
        cuda.threadfence()
        x[0] = 1.0
        cuda.atomic.add(flag, 0, 1)
    if cuda.blockIdx.x == 1:
        cuda.atomic.add(flag, 0, 1)
        cuda.threadfence()
        x[1] = x[0]


def test_a_write_after_the_fence_is_a_race():
    (hazard,) = fence_then_write[2, 1](np.zeros(2, np.float32), np.zeros(1, np.int32)).hazards
    assert "reads x[0], which another block wrote" in hazard.message


def test_in_cuda():
    text = emit(last_block_adds.typed(BEFORE=True, AFTER=True, MEET=True)).text
    assert text.count("__threadfence();") == 2
