"""float16 without instructions for it: the numbers that those give."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.kernels.cpu.call.arguments import argument
from lockstep.kernels.cpu.compiler import simd
from lockstep.kernels.cpu.compiler.compile import Kernel
from lockstep.kernels.cpu.compiler.vectors import F16, WIDTH, i64

EDGES = (65504, 65519.99, 65520, 65536, 1e30, 0, 6e-8, 2.9e-8, 2.98023224e-8, 6.1035e-5, 6.0976e-5)


@pytest.fixture(params=[WIDTH, 1], ids=["vectors", "numbers"])
def convert(request, monkeypatch):
    """A function that fills an array with the numbers of another one, float16 or float32."""
    monkeypatch.setattr(simd, "HAS_HALF", False)
    width = request.param

    @simd.emitter(i64, i64, i64)
    def widen(e, src, dst, n):
        with e.loop(n) as i:
            value = e.load_as_f32(e.offset(src, i, 2 * width), F16, width)
            e.store(value, e.offset(dst, i, 4 * width))

    @simd.emitter(i64, i64, i64)
    def narrow(e, src, dst, n):
        with e.loop(n) as i:
            value = e.load_as_f32(e.offset(src, i, 4 * width), 0, width)
            e.store_from_f32(value, e.offset(dst, i, 2 * width), F16)

    def run(arguments):
        src, dst, n = argument(arguments, 1), argument(arguments, 2), argument(arguments, 3)
        if argument(arguments, 0):
            widen(src, dst, n)
        else:
            narrow(src, dst, n)

    module = Kernel(run, f"halves_{width}")
    module.load(module.generate(module.lowered()))

    def fill(dst, src):
        is_wide = src.dtype == np.float16
        words = (0, 0, 0, 0, is_wide, src.ctypes.data, dst.ctypes.data, src.size // width)
        module(np.array(words, np.int64).ctypes.data)
        return dst

    return fill


def test_every_half_is_widened_to_its_number(convert):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    found, expected = convert(np.zeros(halves.size, np.float32), halves), halves.astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(found[~numbers]).all()


def test_numbers_are_rounded_to_the_nearest_half(convert):
    draws = np.random.default_rng(0)
    any_bits = draws.integers(0, 1 << 32, 1 << 17, dtype=np.uint64).astype(np.uint32)
    spread = draws.standard_normal(1 << 17) * 10.0 ** draws.integers(-9, 6, 1 << 17)
    # Halves, and the middles between them.
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    edges = np.array([*EDGES, *(-x for x in EDGES), np.inf, -np.inf, np.nan, -0.0])
    parts = (any_bits.view(np.float32), spread, halves, middles, -middles, edges)
    with np.errstate(over="ignore", invalid="ignore"):
        given = np.concatenate(parts).astype(np.float32)
        given = given[given.size % WIDTH :]
        expected = given.astype(np.float16)
    found = convert(np.zeros(given.size, np.float16), given)
    numbers = ~np.isnan(expected)
    assert np.array_equal(found[numbers].view(np.uint16), expected[numbers].view(np.uint16))
    assert np.isnan(found[~numbers]).all()
