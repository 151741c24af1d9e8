"""Barriers of the hardware, by number: signals that each thread gives for itself.

At an mbarrier Gluon has one thread arrive for a partition, and its warps meet before. Here a thread
arrives and goes on. A barrier is over when as many threads have come as it is for, and serves again
then: who arrives must know that the last time is over.

Triton takes numbers from 0 on, one for each partition and two more.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

FIRST_FREE = gl.constexpr(8)


@gluon.constexpr_function
def _assembly(verb, threads):
    return f"bar.{verb} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def arrive(number, THREADS: gl.constexpr):
    """Count this thread in, and go on."""
    gl.inline_asm_elementwise(
        _assembly("arrive", THREADS), "=r,r", [number], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_all(number, THREADS: gl.constexpr):
    """Count this thread in, and wait for the others."""
    gl.inline_asm_elementwise(
        _assembly("sync", THREADS), "=r,r", [number], gl.int32, is_pure=False, pack=1
    )
