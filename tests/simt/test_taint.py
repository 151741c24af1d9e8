"""Planted leaks in small kernels, each found where it is; and kernels without any."""

from __future__ import annotations

import pytest

from lockstep.audit.timing.gpu_leaks import GPU_LEAKS, look_up
from lockstep.simt.cuda_cpp import emit

pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
from lockstep.simt.nvrtc import compile_source
from lockstep.simt.samples import kernels
from lockstep.simt.taint import find_leaks
from lockstep.simt.taint.code import parse
from lockstep.simt.taint.waits import wait_loops

KINDS = {
    "early exit on a zero row": "branch",
    "skipped rescale": "branch",
    "table look-up by value": "address",
    "trip count by value": "branch",
    "subnormal slow path": "branch",
}


def leaks(kernel, arch, public=(), **arguments):
    compiled = compile_source(emit(kernel.typed(**arguments), threads=64), arch)
    return find_leaks(compiled.cubin, public)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", GPU_LEAKS)
def test_planted_leaks_are_found(name, arch):
    found = leaks(GPU_LEAKS[name].kernel, arch)
    assert KINDS[name] in {leak.kind for leak in found}
    assert all(leak.line > 0 and leak.text for leak in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_constant_time_select_does_not_leak(arch):
    assert not leaks(kernels.oblivious_max, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_is_public_may_choose(arch):
    inputs = range(6)  # x and the table: a pointer, and what comes with it, of each
    assert leaks(look_up, arch)
    assert not leaks(look_up, arch, public=inputs)


WAITS = """
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   FADD R0, R0, R1 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   BRA `(.L_x_1) ;
"""


def test_loops_that_wait_are_told_from_others():
    assert wait_loops(parse(WAITS)) == {5, 6, 7}
