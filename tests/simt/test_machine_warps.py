"""Warps, atomics, vectors, fragments and constant-time selects on the machine: against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep import simt
from lockstep.simt import (
    Constant,
    ct,
    cuda,
    float16,
    float32,
    int32,
    uint32,
    wmma,
)

FULL = 0xFFFFFFFF
RNG = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Warps


def test_shuffles():
    @simt.kernel
    def shuffles(x: int32[:], out: int32[:, :]):
        t = cuda.threadIdx.x
        out[0, t] = cuda.shfl_down_sync(FULL, x[t], 3)
        out[1, t] = cuda.shfl_up_sync(FULL, x[t], 5)
        out[2, t] = cuda.shfl_xor_sync(FULL, x[t], 9)
        out[3, t] = cuda.shfl_sync(FULL, x[t], 7)
        out[4, t] = cuda.shfl_sync(FULL, x[t], (t * 3) % 32)

    x = RNG.integers(0, 1000, 64).astype(np.int32)
    out = np.zeros((5, 64), np.int32)
    shuffles[1, 64](x, out).check()
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 32
    sources = [
        np.where(lane + 3 < 32, lane + 3, lane),
        np.where(lane - 5 >= 0, lane - 5, lane),
        lane ^ 9,
        np.full(64, 7),
        (np.arange(64) * 3) % 32,
    ]
    for row, source in zip(out, sources, strict=True):
        assert row.tolist() == x[base + source].tolist()


def test_votes():
    @simt.kernel
    def votes(x: int32[:], ballots: uint32[:], flags: int32[:, :]):
        t = cuda.threadIdx.x
        ballots[t] = cuda.ballot_sync(FULL, x[t] > 0)
        flags[0, t] = int32(cuda.all_sync(FULL, x[t] > 0))
        flags[1, t] = int32(cuda.any_sync(FULL, x[t] > 0))

    x = np.zeros(96, np.int32)
    x[5], x[64:] = 1, 1
    ballots, flags = np.zeros(96, np.uint32), np.zeros((2, 96), np.int32)
    votes[1, 96](x, ballots, flags).check()
    assert ballots.tolist() == [32] * 32 + [0] * 32 + [FULL] * 32
    assert flags[0].tolist() == [0] * 64 + [1] * 32
    assert flags[1].tolist() == [1] * 32 + [0] * 32 + [1] * 32


def test_warp_reduction_in_a_divergent_part_of_the_grid():
    @simt.kernel
    def reduce(x: float32[:, :], out: float32[:], first: int32):
        if cuda.blockIdx.x * 2 + cuda.warpid >= first:
            v = x[cuda.blockIdx.x * 2 + cuda.warpid, cuda.laneid]
            for hop in range(5):
                v += cuda.shfl_xor_sync(FULL, v, 16 >> hop)
            if cuda.laneid == 0:
                out[cuda.blockIdx.x * 2 + cuda.warpid] = v

    x, out = floats(8, 32), np.zeros(8, np.float32)
    reduce[4, 64](x, out, 3).check()
    assert np.allclose(out[3:], x[3:].sum(axis=1), atol=1e-5)
    assert not out[:3].any()


# Atomics


@pytest.mark.parametrize("space", ["global", "shared"])
def test_histogram(space):
    @simt.kernel
    def histogram(x: int32[:], out: int32[:], n: int32, SHARED: Constant):
        bins = cuda.shared.array(16, int32)
        t = cuda.threadIdx.x
        if SHARED:
            if t < 16:
                bins[t] = 0
            cuda.syncthreads()
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            if SHARED:
                cuda.atomic.add(bins, x[i], 1)
            else:
                cuda.atomic.add(out, x[i], 1)
        if SHARED:
            cuda.syncthreads()
            if t < 16:
                cuda.atomic.add(out, t, bins[t])

    x = RNG.integers(0, 16, 1000).astype(np.int32)
    out = np.zeros(16, np.int32)
    histogram[3, 64](x, out, 1000, space == "shared").check()
    assert out.tolist() == np.bincount(x, minlength=16).tolist()


def test_atomics_return_what_they_found():
    @simt.kernel
    def tickets(counter: int32[:], out: int32[:, :], u: uint32[:]):
        i = cuda.grid(1)
        out[0, i] = cuda.atomic.add(counter, 0, 2)
        out[1, i] = cuda.atomic.max(counter, 1, i)
        out[2, i] = cuda.atomic.exch(counter, 2, i)
        cuda.atomic.or_(u, 0, uint32(1) << uint32(i % 32))
        cuda.atomic.cas(counter, 3, i, i + 1)

    counter, out, u = np.zeros(4, np.int32), np.zeros((3, 128), np.int32), np.zeros(1, np.uint32)
    tickets[2, 64](counter, out, u).check()
    assert sorted(out[0].tolist()) == list(range(0, 256, 2))
    assert counter[[0, 1, 3]].tolist() == [256, 127, 128]
    assert set(out[2].tolist()) | {int(counter[2])} >= set(range(1, 128))
    assert u[0] == FULL


# Vectors, local arrays, dynamic memory


def test_vectors():
    @simt.kernel
    def vectors(x: float32[:], y: float32[:], h: float16[:, :], s: float32[:]):
        t = cuda.threadIdx.x
        v = cuda.vload(x, 4 * t, 4)
        cuda.vstore(y, 4 * t, cuda.vec(v.w, v.z, v[1], v.x + 1.0))
        w = cuda.vload(h, (t, 8), 8)
        s[t] = w[0] + w[7]

    x, y, h, s = (
        floats(64),
        np.zeros(64, np.float32),
        floats(16, 16).astype("f2"),
        np.zeros(16, "f"),
    )
    vectors[1, 16](x, y, h, s).check()
    wanted = x.reshape(16, 4)[:, ::-1].copy()
    wanted[:, 3] += 1
    assert np.array_equal(y.reshape(16, 4), wanted)
    assert np.array_equal(s, h[:, 8].astype("f") + h[:, 15].astype("f"))


def test_local_arrays_with_indices_that_differ_by_lane():
    @simt.kernel
    def rotate(x: float32[:, :]):
        row = cuda.local.array((2, 4), float32)
        t = cuda.threadIdx.x
        for j in range(8):
            row[(j + t) % 8 // 4, (j + t) % 4] = x[t, j]
        for j in range(8):
            x[t, j] = row[j // 4, j % 4]

    x = floats(32, 8)
    wanted = np.stack([np.roll(r, t) for t, r in enumerate(x)])
    rotate[1, 32](x).check()
    assert np.array_equal(x, wanted)


def test_dynamic_shared_memory_up_to_all_of_it():
    @simt.kernel
    def reverse(x: float32[:], n: int32):
        low = cuda.shared.array(0, float32)
        high = cuda.shared.array(0, float32, offset=4 * n)
        t = cuda.threadIdx.x
        for i in range(t, n, cuda.blockDim.x):
            low[i] = x[i]
            high[i] = x[n + i]
        cuda.syncthreads()
        for i in range(t, n, cuda.blockDim.x):
            x[i] = high[n - 1 - i]
            x[n + i] = low[n - 1 - i]

    n = 227 * 1024 // 8
    x = floats(2 * n)
    wanted = x[::-1].copy()
    trace = reverse[1, 1024, 8 * n](x, n).check()
    assert np.array_equal(x, wanted)
    assert trace.dynamic_shared_bytes == 8 * n
    with pytest.raises(ValueError, match="a block may have 232448"):
        reverse[1, 1024, 8 * n + 4](x, n)
    hazards = reverse[1, 32, 64](floats(24), 12).hazards
    assert {h.kind for h in hazards} == {"out of bounds"}


# Matrix fragments


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_fragments(dtype, layout):
    @simt.kernel
    def matmul(a, b, c: float32[:, :], bias: float32, K: Constant, LAYOUT: Constant):
        a_tile = cuda.shared.array((32, K), a.dtype)
        b_tile = cuda.shared.array((32, K), a.dtype)
        c_tile = cuda.shared.array((32, 32), float32)
        accs = cuda.local.array(2, wmma.accumulator)
        t = cuda.threadIdx.x
        for i in range(t, 32 * K, 64):
            a_tile[i // K, i % K] = a[i // K, i % K]
            b_tile[i // K, i % K] = b[i // K, i % K]
        cuda.syncthreads()
        row = cuda.warpid * 16
        for n in range(2):
            accs[n] = wmma.fill(bias)
            for k in range(0, K, 16):
                left = wmma.load_a(a_tile, (row, k))
                if LAYOUT == "col":
                    right = wmma.load_b(b_tile, (16 * n, k), layout="col")
                else:
                    right = wmma.load_b(b_tile, (k, 16 * n))
                accs[n] = wmma.mma_sync(left, right, accs[n])
        for n in range(2):
            wmma.store(c_tile, (row, 16 * n), max(accs[n] * 2.0, 0.0))
        cuda.syncthreads()
        for i in range(t, 1024, 64):
            c[i // 32, i % 32] = c_tile[i // 32, i % 32]

    a, b = torch.randn(32, 32, dtype=dtype), torch.randn(32, 32, dtype=dtype)
    c = torch.zeros(32, 32)
    trace = matmul[1, 64](a, b, c, 0.5, 32, layout).check()
    right = b.double().T if layout == "col" else b.double()
    wanted = torch.relu(2 * (a.double() @ right + 0.5))
    assert (c - wanted).abs().max() < 2e-5
    assert trace.totals.fragment_operations == 2 * 2 * (1 + 2 + 2)


def test_fragments_in_some_warps_of_some_blocks():
    @simt.kernel
    def tiles(x: float16[:, :], out: float32[:, :], rows: int32):
        first = 16 * (2 * cuda.blockIdx.x + cuda.warpid)
        acc = wmma.fill(0.0)
        if first < rows:
            a = wmma.load_a(x, (first, 0), 16)
            b = wmma.load_b(x, (0, 0), 16, layout="col")
            acc = wmma.mma_sync(a, b, acc)
        wmma.store(out, (first, 0), acc, 16)

    x = floats(96, 16).astype(np.float16)
    out = np.full((96, 16), np.nan, np.float32)
    tiles[3, 64](x, out, 48).check()
    wanted = x.astype("f8") @ x[:16].astype("f8").T
    assert np.allclose(out[:48], wanted[:48], atol=1e-4)
    assert not out[48:].any()


# Constant time


def test_constant_time_select():
    @simt.kernel
    def clamp(x: simt.Secret[float32[:]], n: simt.Secret[int32], out: float32[:]):
        i = cuda.grid(1)
        keep = (i < n) & (x[i] > 0.0)
        bits = ct.mask(keep) & cuda.bitcast(x[i], uint32)
        out[i] = ct.select(keep, x[i], -1.0) + cuda.bitcast(bits, float32)

    x, out = floats(64), np.zeros(64, np.float32)
    clamp[2, 32](x, 40, out).check()
    keep = (np.arange(64) < 40) & (x > 0)
    assert np.array_equal(out, np.where(keep, x + x, np.float32(-1)))


def test_constant_time_exponentials_have_no_subnormal_results():
    @simt.kernel
    def weights(x: simt.Secret[float32[:]], out: float32[:]):
        out[cuda.threadIdx.x] = ct.exp2(x[cuda.threadIdx.x])

    x = np.array([0.5, -125.5, -126.0, -126.5, -149.0, -200.0, -np.inf, np.inf], np.float32)
    out = np.ones(8, np.float32)
    weights[1, 8](x, out).check()
    assert np.array_equal(out[[0, 1, 2, 7]], np.exp2(x[[0, 1, 2, 7]]))
    assert not out[3:7].any()
    assert not weights.typed().warnings


def test_constant_time_select_of_vectors():
    @simt.kernel
    def blank(x: simt.Secret[float16[:]], n: simt.Secret[int32], out: float16[:]):
        i = 4 * cuda.grid(1)
        zero = float16(0.0)
        none = cuda.vec(zero, zero, zero, zero)
        cuda.vstore(out, i, ct.select(i < n, cuda.vload(x, i, 4), none))

    x = floats(128).astype(np.float16)
    x[41] = np.nan  # in a vector that is kept; the one behind it is not
    x[44] = np.nan
    out = np.ones(128, np.float16)
    blank[1, 32](x, 43, out).check()
    assert np.array_equal(out, np.where(np.arange(128) < 44, x, 0), equal_nan=True)
