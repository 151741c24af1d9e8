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
    cuda,
    float16,
    float32,
    int32,
    uint32,
)

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
