"""Defects but races, planted and found: at the right line, with the thread and the other one.

The line that must be reported carries `# !`, the other access `# ?`.
"""

from __future__ import annotations

import numpy as np
import pytest
from simt_support import marked, only_hazard

from lockstep import simt
from lockstep.simt import Constant, cuda, float16, float32, int32, wmma

FULL = 0xFFFFFFFF


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


# Barriers and lanes


def test_barrier_in_a_divergent_branch():
    @simt.kernel
    def diverge(out: float32[:]):
        t = cuda.threadIdx.x
        if t < 40:
            cuda.syncthreads()  # !
        out[t] = 1.0

    hazard = only_hazard(diverge[1, 64](zeros(64)))
    assert (hazard.kind, hazard.loc.line) == ("divergent barrier", marked(diverge))
    assert "40 of 64" in hazard.message


def test_barrier_in_a_loop_that_some_threads_leave_early():
    @simt.kernel
    def uneven(out: float32[:]):
        t = cuda.threadIdx.x
        for i in range(1 + t // 32):
            out[t] = float32(i)
            cuda.syncthreads()  # !

    hazard = only_hazard(uneven[1, 64](zeros(64)))
    assert (hazard.kind, hazard.loc.line) == ("divergent barrier", marked(uneven))


def test_threads_that_returned_do_not_hold_up_a_barrier():
    @simt.kernel
    def leave(out: float32[:], n: int32):
        t = cuda.threadIdx.x
        if t >= n:
            return
        cuda.syncthreads()
        out[t] = 1.0

    out = zeros(64)
    assert not leave[1, 64](out, 50).hazards
    assert out.sum() == 50


def test_syncwarp_by_a_part_of_the_warp():
    @simt.kernel
    def half(out: float32[:]):
        t = cuda.threadIdx.x
        if t < 16:
            cuda.syncwarp()  # !
        out[t] = 1.0

    hazard = only_hazard(half[1, 64](zeros(64)))
    assert (hazard.kind, hazard.loc.line) == ("divergent barrier", marked(half))


@pytest.mark.parametrize("what", ["shuffle", "vote"])
def test_lanes_that_are_not_there(what):
    @simt.kernel
    def lanes(x: float32[:], SHUFFLE: Constant):
        t = cuda.threadIdx.x
        y = x[t]
        if t < 20:
            if SHUFFLE:
                y = cuda.shfl_down_sync(FULL, y, 1)
            elif cuda.any_sync(FULL, y > 0.0):
                y = 1.0
        x[t] = y

    trace = lanes[1, 32](zeros(32), what == "shuffle")
    assert {h.kind for h in trace.hazards} == {"inactive lane"}
    assert all("lane" in h.message for h in trace.hazards)


def test_shuffle_reads_a_lane_outside_its_mask():
    @simt.kernel
    def beyond(x: float32[:]):
        t = cuda.threadIdx.x
        if t < 16:
            x[t] = cuda.shfl_sync(0xFFFF, x[t], 20)  # !

    hazard = only_hazard(beyond[1, 32](zeros(32)))
    assert (hazard.kind, hazard.loc.line) == ("inactive lane", marked(beyond))
    assert "lane 20" in hazard.message


def test_shuffle_within_its_mask_is_fine():
    @simt.kernel
    def half(x: float32[:]):
        t = cuda.threadIdx.x
        if t < 16:
            x[t] = cuda.shfl_xor_sync(0xFFFF, x[t], 8)

    x = np.arange(32, dtype="float32")
    assert not half[1, 32](x).hazards
    assert list(x[:16]) == [*range(8, 16), *range(8)]


# Memory that is not there, or not yet


@pytest.mark.parametrize("offset", [-1, 1])
def test_out_of_bounds_global(offset):
    @simt.kernel
    def copy(x: float32[:], y: float32[:], OFFSET: Constant):
        i = cuda.grid(1)
        y[i] = x[i + OFFSET]  # !

    hazard = only_hazard(copy[2, 32](zeros(64), zeros(64), offset))
    assert (hazard.kind, hazard.loc.line) == ("out of bounds", marked(copy))
    wrong = -1 if offset < 0 else 64
    assert f"x[{wrong}] of shape (64,)" in hazard.message
    assert (hazard.thread, hazard.block) == (
        ((0, 0, 0), (0, 0, 0)) if offset < 0 else ((31, 0, 0), (1, 0, 0))
    )


def test_out_of_bounds_store_changes_nothing_else():
    @simt.kernel
    def store(x: float32[:, :]):
        t = cuda.threadIdx.x
        x[t // 8, t % 8] = 1.0  # !

    x = zeros(3, 8)
    hazard = only_hazard(store[1, 32](x))
    assert (hazard.kind, hazard.loc.line) == ("out of bounds", marked(store))
    assert hazard.thread == (24, 0, 0)
    assert x.min() == 1.0


def test_out_of_bounds_along_one_axis_of_a_shared_array():
    @simt.kernel
    def column(out: float32[:]):
        tile = cuda.shared.array((4, 8), float32)
        t = cuda.threadIdx.x
        tile[0, t] = 1.0  # !
        out[t] = 1.0

    assert only_hazard(column[1, 16](zeros(16))).message.startswith("tile[0, 8]")


def test_uninitialised_shared_memory():
    @simt.kernel
    def gap(out: float32[:]):
        tile = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        if t != 7:
            tile[t] = 1.0
        cuda.syncthreads()
        out[t] = tile[t]  # !

    hazard = only_hazard(gap[1, 32](zeros(32)))
    assert (hazard.kind, hazard.loc.line) == ("uninitialised shared memory", marked(gap))
    assert hazard.thread == (7, 0, 0)


def test_uninitialised_register():
    @simt.kernel
    def maybe(x: float32[:], n: int32):
        t = cuda.threadIdx.x
        if t < n:
            y = 1.0
        x[t] = y  # !

    hazard = only_hazard(maybe[1, 32](zeros(32), 30))
    assert (hazard.kind, hazard.loc.line) == ("uninitialised register", marked(maybe))
    assert hazard.thread == (30, 0, 0)
    assert not maybe[1, 32](zeros(32), 32).hazards
    assert only_hazard(maybe[1, 32](zeros(32), 0)).thread == (0, 0, 0)


def test_uninitialised_local_array():
    @simt.kernel
    def local(x: float32[:]):
        regs = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        regs[t % 4] = 1.0
        x[t] = regs[0]  # !

    hazard = only_hazard(local[1, 32](zeros(32)))
    assert (hazard.kind, hazard.loc.line) == ("uninitialised local array", marked(local))
    assert hazard.thread == (1, 0, 0)


# Alignment


def test_misaligned_vector():
    @simt.kernel
    def vectors(x: float32[:], y: float32[:], OFFSET: Constant):
        t = cuda.threadIdx.x
        cuda.vstore(y, 4 * t, cuda.vload(x, 4 * t + OFFSET, 4))  # !

    hazard = only_hazard(vectors[1, 8](zeros(36), zeros(32), 1))
    assert (hazard.kind, hazard.loc.line) == ("misaligned access", marked(vectors))
    assert not vectors[1, 8](zeros(36), zeros(32), 4).hazards
    # a view that starts in the middle of an allocation is misaligned just the same
    assert only_hazard(vectors[1, 8](zeros(40)[1:], zeros(32), 0)).kind == "misaligned access"


@pytest.mark.parametrize(("row", "ld"), [(0, 20), (1, 16)])
def test_misaligned_fragment(row, ld):
    @simt.kernel
    def fragments(out: float32[:], START: Constant, LD: Constant):
        tile = cuda.shared.array(16 * 24 + 16, float16)
        for i in range(cuda.threadIdx.x, 16 * 24 + 16, 32):
            tile[i] = float16(0.0)
        cuda.syncthreads()
        a = wmma.load_a(tile, START, LD)  # !
        b = wmma.load_b(tile, 0, 16)
        wmma.store(out, 0, wmma.mma_sync(a, b, wmma.fill(0.0)), 16)

    hazard = only_hazard(fragments[1, 32](zeros(256), 8 * row, ld))
    assert (hazard.kind, hazard.loc.line) == ("misaligned access", marked(fragments))


def test_fragment_by_a_partial_warp_or_with_a_lane_dependent_address():
    @simt.kernel
    def partial(out: float32[:], PARTIAL: Constant):
        t = cuda.threadIdx.x
        if PARTIAL:
            if t < 16:
                wmma.store(out, 0, wmma.fill(0.0), 16)
        else:
            wmma.store(out, (t % 2) * 256, wmma.fill(0.0), 16)

    kinds = {h.kind for h in partial[1, 32](zeros(512), True).hazards}
    assert kinds == {"fragment used by a partial warp"}
    kinds = {h.kind for h in partial[1, 32](zeros(512), False).hazards}
    assert "fragment operand differs within a warp" in kinds


# Asynchronous copies


@pytest.mark.parametrize("case", ["right", "no wait", "wait too weak", "no barrier"])
def test_asynchronous_copy(case):
    @simt.kernel
    def pipeline(x: float32[:], out: float32[:], PENDING: Constant, BARRIER: Constant):
        tile = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        cuda.memcpy_async(tile, 4 * t, x, 4 * t, 4)  # ?
        cuda.pipeline_commit()
        if PENDING >= 0:
            cuda.pipeline_wait_prior(PENDING)
        if BARRIER:
            cuda.syncthreads()
        for i in range(4):
            out[32 * i + t] = tile[32 * i + t]  # !

    pending = {"no wait": -1, "wait too weak": 1}.get(case, 0)
    x, out = np.arange(128, dtype="float32"), zeros(128)
    trace = pipeline[1, 32](x, out, pending, case != "no barrier")
    if case == "right":
        assert not trace.hazards
        assert np.array_equal(x, out)
        return
    hazard = only_hazard(trace)
    wanted = "race" if case == "no barrier" else "asynchronous copy not waited for"
    assert (hazard.kind, hazard.loc.line) == (wanted, marked(pipeline))
    assert hazard.other_loc.line == marked(pipeline, "# ?")


def test_two_stages_in_flight():
    @simt.kernel
    def stages(x: float32[:], out: float32[:], n: int32, PENDING: Constant):
        tile = cuda.shared.array((2, 32), float32)
        t = cuda.threadIdx.x
        cuda.memcpy_async(tile, (0, t), x, t, 1)
        cuda.pipeline_commit()
        for i in range(n):
            if i + 1 < n:
                cuda.memcpy_async(tile, ((i + 1) % 2, t), x, 32 * (i + 1) + t, 1)
            cuda.pipeline_commit()
            cuda.pipeline_wait_prior(PENDING)
            cuda.syncthreads()
            out[32 * i + t] = tile[i % 2, 31 - t]
            cuda.syncthreads()

    x, out = np.arange(256, dtype="float32"), zeros(256)
    assert not stages[1, 32](x, out, 8, 1).hazards
    assert np.array_equal(out.reshape(8, 32)[:, ::-1].ravel(), x)
    kinds = {h.kind for h in stages[1, 32](x, out, 8, 2).hazards}
    assert kinds == {"asynchronous copy not waited for"}


def test_check_raises_with_everything_found():
    @simt.kernel
    def bad(x: float32[:]):
        x[cuda.threadIdx.x + 1] = 1.0

    trace = bad[1, 32](zeros(32))
    with pytest.raises(simt.HazardError, match=r"x\[32\] of shape \(32,\)"):
        trace.check()
