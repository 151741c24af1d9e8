"""What kernels compute on the machine: against NumPy, bit for bit where the arithmetic allows."""

from __future__ import annotations

import numpy as np
import pytest
import simt_attention
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import simt
from lockstep.simt import (
    Constant,
    bfloat16,
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


@simt.kernel
def axpy(x: float32[:], y: float32[:], a: float32, n: int32):
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        y[i] = a * x[i] + y[i]


@pytest.mark.parametrize(("grid", "block"), [(1, 1), (1, 33), (7, 64), (3, (8, 4, 2))])
def test_grid_stride_loop_at_odd_sizes(grid, block):
    x, y = floats(1023), floats(1023)
    wanted = np.float32(2.5) * x + y
    n = int(np.prod(block))
    if isinstance(block, tuple):  # cuda.grid(1) counts along x only
        with pytest.raises(simt.HazardError, match="race"):
            axpy[grid, block](x, y, 2.5, 1023).check()
        return
    axpy[grid, n](x, y, 2.5, 1023).check()
    assert np.array_equal(y, wanted)


def test_two_dimensional_blocks_and_strided_arrays():
    @simt.kernel
    def transpose(x: float32[:, :], y: float32[:, :]):
        i = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
        j = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < x.shape[0] and j < x.shape[1]:
            y[j, i] = x[i, j]

    x = floats(40, 70)[::2, :50]  # strides no dense array has
    y = np.zeros((50, 20), np.float32)
    transpose[(4, 5), (16, 4)](x, y).check()
    assert np.array_equal(y, x.T)


def test_integers_wrap_and_divide_as_python_does():
    @simt.kernel
    def arithmetic(a: int32[:], b: int32[:], out: int32[:, :], u: uint32[:]):
        i = cuda.threadIdx.x
        out[0, i] = a[i] // b[i]
        out[1, i] = a[i] % b[i]
        out[2, i] = a[i] * b[i] + 2147483647
        out[3, i] = a[i] >> 3
        out[4, i] = (a[i] << 5) ^ b[i]
        u[i] = (uint32(a[i]) * 2654435769 + 1) >> 7

    a = np.array([7, -7, 7, -7, 2**31 - 1, -(2**31), 0, 12345], np.int32)
    b = np.array([2, 2, -2, -2, 3, 3, 5, -678], np.int32)
    out, u = np.zeros((5, 8), np.int32), np.zeros(8, np.uint32)
    arithmetic[1, 8](a, b, out, u).check()
    wide, other = a.astype(object), b.astype(object)

    def wrap(values):
        return [(v + 2**31) % 2**32 - 2**31 for v in values]

    assert out[0].tolist() == [x // y for x, y in zip(wide, other, strict=True)]
    assert out[1].tolist() == [x % y for x, y in zip(wide, other, strict=True)]
    assert out[2].tolist() == wrap(x * y + 2**31 - 1 for x, y in zip(wide, other, strict=True))
    assert out[3].tolist() == [x >> 3 for x in wide]
    assert out[4].tolist() == wrap((x << 5) ^ y for x, y in zip(wide, other, strict=True))
    assert u.tolist() == [((x % 2**32) * 2654435769 + 1) % 2**32 >> 7 for x in wide]


def test_uniform_integers_wrap_too():
    @simt.kernel
    def uniform(out: int32[:], n: int32):
        x = n * n
        y = uint32(n) * uint32(n)
        out[0] = x
        out[1] = int32(y >> 4)

    out = np.zeros(2, np.int32)
    uniform[1, 1](out, 123456).check()
    product = 123456**2
    assert out[0] == (product + 2**31) % 2**32 - 2**31
    assert out[1] == product % 2**32 >> 4


def test_bit_functions():
    @simt.kernel
    def bit_functions(x: uint32[:], out: int32[:, :], r: uint32[:], f: float32[:]):
        i = cuda.threadIdx.x
        out[0, i] = cuda.popc(x[i])
        out[1, i] = cuda.clz(x[i])
        out[2, i] = cuda.ffs(x[i])
        r[i] = cuda.brev(x[i])
        f[i] = cuda.bitcast(cuda.bitcast(f[i], uint32) ^ 0x80000000, float32)

    x = np.array([0, 1, 2**31, 0xFFFFFFFF, 0x00F0, 12345678], np.uint32)
    out, r, f = np.zeros((3, 6), np.int32), np.zeros(6, np.uint32), floats(6)
    wanted = -f
    bit_functions[1, 6](x, out, r, f).check()
    values = [int(v) for v in x]
    assert out[0].tolist() == [v.bit_count() for v in values]
    assert out[1].tolist() == [32 - v.bit_length() for v in values]
    assert out[2].tolist() == [(v & -v).bit_length() for v in values]
    assert r.tolist() == [int(f"{v:032b}"[::-1], 2) for v in values]
    assert np.array_equal(f, wanted)


@settings(max_examples=60, deadline=None)
@given(*(st.floats(width=32, allow_nan=False, allow_infinity=False) for _ in range(3)))
def test_fma_rounds_once(x, y, z):
    from fractions import Fraction

    from lockstep.simt.machine.values import fma

    with np.errstate(all="ignore"):
        got = fma(np.array([[x]], np.float32), np.array([[y]], np.float32), np.float32(z))[0, 0]
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if np.isfinite(got) and abs(exact) > 2.0**-100:
        gap = abs(Fraction(float(got)) - exact)
        for step in (-np.inf, np.inf):
            neighbour = np.nextafter(got, np.float32(step))
            if np.isfinite(neighbour):
                assert gap <= abs(Fraction(float(neighbour)) - exact)


def test_conversions_follow_the_hardware():
    @simt.kernel
    def convert(x: float32[:], i: int32[:], u: uint32[:], h: float16[:], b: float32[:]):
        t = cuda.threadIdx.x
        i[t] = int32(x[t])
        u[t] = uint32(x[t])
        h[t] = float16(x[t])
        b[t] = float32(bfloat16(x[t]))

    x = np.array([1.9, -1.9, 3e9, -3e9, np.nan, 1e-8, 65519.9, 1.00390625], np.float32)
    i, u = np.zeros(8, np.int32), np.zeros(8, np.uint32)
    h, b = np.zeros(8, np.float16), np.zeros(8, np.float32)
    convert[1, 8](x, i, u, h, b).check()
    assert i.tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 0, 65519, 1]
    assert u.tolist() == [1, 0, 3000000000, 0, 0, 0, 65519, 1]
    with np.errstate(over="ignore"):
        assert np.array_equal(h, x.astype(np.float16), equal_nan=True)
    wanted = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(b, wanted, equal_nan=True)


def test_torch_tensors_and_bfloat16():
    @simt.kernel
    def double(x: bfloat16[:, :], y: bfloat16[:, :]):
        t = cuda.threadIdx.x
        y[0, t] = bfloat16(x[1, t] * 1.01)

    x = torch.randn(2, 32, dtype=torch.bfloat16)
    y = torch.zeros(2, 32, dtype=torch.bfloat16)
    double[1, 32](x, y).check()
    wanted = (x[1].float() * np.float32(1.01)).bfloat16()
    assert torch.equal(y[0], wanted)
    assert torch.equal(y[1], torch.zeros(32, dtype=torch.bfloat16))


# Control flow: every lane follows its own way, as a Python loop over lanes would


@simt.kernel
def collatz(x: int32[:], steps: int32[:], n: int32, LIMIT: Constant):
    i = cuda.grid(1)
    if i >= n:
        return
    v = x[i]
    count = 0
    while v != 1:
        if v % 2 == 0:
            v //= 2
        else:
            v = 3 * v + 1
        count += 1
        if count == LIMIT:
            break
    steps[i] = count


@pytest.mark.parametrize("limit", [5, 1000])
def test_while_with_break_and_return(limit):
    def by_hand(v: int) -> int:
        count = 0
        while v != 1 and count != limit:
            v = v // 2 if v % 2 == 0 else 3 * v + 1
            count += 1
        return count

    x = np.arange(1, 201, dtype=np.int32)
    steps = np.full(200, -1, np.int32)
    collatz[4, 64](x, steps, 200, limit).check()
    assert steps.tolist() == [by_hand(int(v)) for v in x]


def test_for_with_continue_break_and_return_in_nested_loops():
    @simt.kernel
    def nested(out: int32[:], n: int32):
        i = cuda.grid(1)
        total = 0
        for a in range(i % 7, n, 1 + i % 3):
            if a % 5 == 3:
                continue
            for b in range(n, a, -2):
                if b % 4 == 1:
                    continue
                if a * b > 60 + i:
                    break
                total += a * b
                if total > 900:
                    out[i] = -total
                    return
            total += 1
        out[i] = total

    def by_hand(i: int, n: int) -> int:
        total = 0
        for a in range(i % 7, n, 1 + i % 3):
            if a % 5 == 3:
                continue
            for b in range(n, a, -2):
                if b % 4 == 1:
                    continue
                if a * b > 60 + i:
                    break
                total += a * b
                if total > 900:
                    return -total
            total += 1
        return total

    out = np.zeros(96, np.int32)
    nested[3, 32](out, 23).check()
    assert out.tolist() == [by_hand(i, 23) for i in range(96)]


def test_conditions_evaluate_only_what_decides():
    @simt.kernel
    def guarded(x: float32[:], out: int32[:], n: int32):
        i = cuda.grid(1)
        if i < n and x[i] > 0.0:
            out[i] = 1
        if i >= n or x[i] <= 0.0:
            out[i] += 2
        out[i] += 10 if i < n and x[i] > 1.0 else 20
        y = x[i] if i < n else -1.0
        if y < 0.0:
            out[i] += 100

    x = floats(50)
    out = np.zeros(64, np.int32)
    guarded[2, 32](x, out, 50).check()
    padded = np.r_[x, np.full(14, -1, np.float32)]
    wanted = np.where(padded > 0, 1, 2) + np.where(padded > 1, 10, 20) + 100 * (padded < 0)
    assert out.tolist() == wanted.tolist()


def test_device_function_with_an_early_return():
    @simt.device
    def soft_sign(v, limit: float32):
        if v > limit:
            return limit
        if v < -limit:
            return -limit
        return v

    @simt.kernel
    def clip(x: float32[:]):
        i = cuda.grid(1)
        x[i] = soft_sign(x[i], 0.5) * 2.0

    x = floats(64)
    wanted = np.clip(x, np.float32(-0.5), np.float32(0.5)) * 2
    clip[2, 32](x).check()
    assert np.array_equal(x, wanted)


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


# The workload


@pytest.mark.parametrize("shifted", [False, True])
def test_attention(shifted):
    q, k, v, out = simt_attention.problem(1, 2, 111, 32)
    trace = simt_attention.run(q, k, v, out, 111, shifted).check()
    assert np.abs(out - simt_attention.oracle(q, k, v, 111)).max() < 2e-6
    assert [p.name for p in trace.phases] == [
        "",
        "load q",
        "load kv",
        "scores",
        "softmax",
        "accumulate",
        "write",
    ]


def test_batches_of_blocks_change_nothing():
    from lockstep.simt.machine import run

    q, k, v, out = simt_attention.problem(1, 2, 100, 32)
    whole = simt_attention.run(q, k, v, out, 100)
    again = np.full_like(out, np.nan)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": again,
        "seq": 100,
        "scale": 32**-0.5,
        "D": 32,
        "SHIFTED": False,
    }
    typed = simt_attention.attention.typed(**arguments)
    parts = run(typed, whole.grid, whole.block, 0, arguments, lanes_per_batch=256)
    assert np.array_equal(out, again)
    assert parts.totals == whole.totals
    assert parts.depth.tolist() == whole.depth.tolist()


# Launches that cannot be


def test_launch_errors_name_the_argument():
    x = floats(8)
    with pytest.raises(TypeError, match=r"axpy\[grid, block\]"):
        axpy[1]
    with pytest.raises(ValueError, match="block is 0"):
        axpy[1, 0]
    with pytest.raises(ValueError, match="grid is 2147483648, every size must be at most"):
        axpy[1 << 31, 32]
    with pytest.raises(ValueError, match="2048 threads"):
        axpy[1, 2048](x, x, 1.0, 8)
    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        axpy[1, 32](x, x, 1.0)
    with pytest.raises(TypeError, match=r"'x' is declared float32\[:\], got float16"):
        axpy[1, 32](x.astype(np.float16), x, 1.0, 8)
    with pytest.raises(TypeError, match="'x' takes an array or a number, got ndarray"):
        axpy[1, 32](x.astype(np.float64), x, 1.0, 8)
    frozen = floats(8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="'y' is read-only"):
        axpy[1, 32](x, frozen, 1.0, 8)
