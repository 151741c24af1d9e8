"""The arithmetic under the CPU path: exponential, logarithm, tanh, and rounding to 16 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit
from problems import same_bits

import lockstep
from lockstep.kernels.cpu.compiler import scalar

F32 = np.float32


def over(function):
    """Make an elementwise function of an array."""

    @njit
    def each(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    def call(values) -> np.ndarray:
        x = np.asarray(values, F32)
        y = np.empty_like(x)
        each(x, y)
        return y

    return call


exp, log2, tanh = over(scalar.exp), over(scalar.log2), over(scalar.tanh)


def ulps(result: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units of the last place of the exact result."""
    return float((np.abs(result.astype(np.float64) - exact) / np.spacing(np.abs(F32(exact)))).max())


def test_exp_is_within_a_few_roundings_of_weights_that_count():
    x = np.random.default_rng(0).uniform(-20, 0, 200_000).astype(F32)
    near = x[x > -2]
    assert ulps(exp(near), np.exp(near.astype(np.float64))) < 1.5
    assert ulps(exp(x), np.exp(x.astype(np.float64))) < 6


def test_exp_of_small_weights_is_relatively_exact():
    x = np.random.default_rng(0).uniform(-86, -20, 200_000).astype(F32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exp(x) - exact) <= 2e-6 * exact).all()


def test_exp_at_the_edges():
    assert exp([0.0, -0.0]).tolist() == [1.0, 1.0]
    assert exp([-math.inf, -3.4e38, -1e30, -104.0, -88.0]).tolist() == [0.0] * 5
    assert np.isnan(exp([math.nan])[0])
    # From a normal number to zero, with none below the smallest normal number between them.
    falling = exp(np.linspace(-86, -88, 10_000))
    assert ((falling == 0) | (falling >= np.finfo(F32).tiny)).all()
    assert (falling[:-1] >= falling[1:]).all()


def test_log2_is_within_two_ulps():
    rng = np.random.default_rng(1)
    x = np.concatenate([np.exp2(rng.uniform(-20, 30, 100_000)), rng.uniform(1, 2, 100_000)])
    x = x.astype(F32)
    exact = np.log2(x.astype(np.float64))
    # Near 1 the result is near 0; what counts there is its size against the lse it is added to.
    error = np.abs(log2(x) - exact)
    assert (error <= 2 * np.spacing(F32(1)) * np.maximum(np.abs(exact), 1)).all()


def test_log2_of_powers_of_two_is_exact():
    x = np.arange(-100, 101)
    assert (log2(np.exp2(x.astype(np.float64))) == x).all()


def test_tanh_is_within_a_few_roundings():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-10, 10, 100_000), rng.uniform(-0.1, 0.1, 100_000)])
    x = x.astype(F32)
    exact = np.tanh(x.astype(np.float64))
    assert np.abs(tanh(x) - exact).max() <= 4 * np.spacing(F32(1))
    assert ulps(tanh(x), exact) < 8


def test_tanh_at_the_edges():
    assert tanh([0.0, math.inf, -math.inf, 1e30, -1e30]).tolist() == [0, 1, -1, 1, -1]
    assert np.isnan(tanh([math.nan])[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("Sq", [1, 40])
def test_every_16_bit_number_goes_through(Sq, dtype):
    """With a single key of weight one, out is v: loaded, widened, rounded and stored."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    v = every[every.isfinite()].view(-1, 1, 1, 16)  # [B, 1, 1, 16]
    q, k = torch.zeros(len(v), 1, Sq, 8, dtype=dtype), torch.zeros(len(v), 1, 1, 8, dtype=dtype)
    out = lockstep.attention(q, k, v, kernel="cpu")
    # -0 becomes 0, as in any sum.
    assert same_bits(out, (v + 0.0).expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("Sq", [1, 40])
def test_rounding_is_to_nearest_even(Sq, dtype):
    """Two keys of equal weight: out is the mean of two values, exact in fp32, rounded once."""
    every = torch.arange(2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    a = torch.cat([every, -every])
    b = torch.cat([every[1:], every[:1], -every[1:], -every[:1]])
    v = torch.stack([a.view(-1, 1, 16), b.view(-1, 1, 16)], 2)  # [B, 1, 2, 16]
    q, k = torch.zeros(len(v), 1, Sq, 8, dtype=dtype), torch.zeros(len(v), 1, 2, 8, dtype=dtype)
    # The sum starts at +0, so a zero is positive before rounding; a tiny number may round to -0.
    mean = ((a.float() + b.float()) / 2 + 0.0).to(dtype).view(-1, 1, 1, 16)
    out = lockstep.attention(q, k, v, kernel="cpu")
    assert same_bits(out, mean.expand_as(out))
