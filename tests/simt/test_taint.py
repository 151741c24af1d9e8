"""Planted leaks in small kernels, each found where it is; and kernels without any."""

from __future__ import annotations

import pytest

from lockstep import simt
from lockstep.simt import cuda, float32, int32
from lockstep.simt.cuda_cpp import emit

pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
from lockstep.simt.nvrtc import compile_source
from lockstep.simt.samples import kernels
from lockstep.simt.taint import find_leaks

ROWS = 64


@simt.kernel
def early_exit(x: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    if x[i] != 0.0:
        for j in range(ROWS):
            out[i] += x[j] * x[i]


@simt.kernel
def skipped_rescale(x: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    m = float32(0.0)
    for j in range(ROWS):
        if x[j] > m:
            m = x[j]
            for k in range(ROWS):
                out[i * ROWS + k] *= x[j]


@simt.kernel
def look_up(x: int32[:], table: float32[:], out: float32[:]):
    i = cuda.threadIdx.x
    out[i] = table[x[i] & 255]


@simt.kernel
def trip_count(x: int32[:], out: float32[:]):
    i = cuda.threadIdx.x
    total = out[i]
    for _ in range(x[0]):
        total = total * 1.5 + 1.0
    out[i] = total


PLANTED = {
    "early exit": (early_exit, "branch"),
    "skipped rescale": (skipped_rescale, "branch"),
    "look-up by value": (look_up, "address"),
    "trip count": (trip_count, "branch"),
}


def leaks(kernel, arch, public=(), **arguments):
    compiled = compile_source(emit(kernel.typed(**arguments), threads=64), arch)
    return find_leaks(compiled.cubin, public)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_leaks_are_found(name, arch):
    kernel, kind = PLANTED[name]
    found = leaks(kernel, arch)
    assert kind in {leak.kind for leak in found}
    assert all(leak.line > 0 and leak.text for leak in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_constant_time_select_does_not_leak(arch):
    assert not leaks(kernels.oblivious_max, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_is_public_may_choose(arch):
    parameters_of_x = range(3)  # pointer, and what comes with it
    assert leaks(look_up, arch)
    assert not leaks(look_up, arch, public=parameters_of_x)
