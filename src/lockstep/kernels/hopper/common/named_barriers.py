"""The hardware's named barriers (`bar.sync`, `bar.arrive`), at which each thread arrives for
itself.

At an mbarrier, Gluon has one thread arrive for its partition, after a barrier of the partition's
warps. At a named barrier a thread arrives and goes on. The barrier completes when the given number
of threads has arrived, and is free again then. So a thread may arrive for the next time only if it
knows that the time before has completed.

Triton uses the numbers from 0 on, one for each partition and two more.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

FIRST_FREE = gl.constexpr(8)


@gluon.constexpr_function
def _assembly(verb, threads):
    return f"bar.{verb} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def arrive(number, THREADS: gl.constexpr):
    """This thread arrives at barrier `number`, which is for THREADS threads, and goes on."""
    gl.inline_asm_elementwise(
        _assembly("arrive", THREADS), "=r,r", [number], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_all(number, THREADS: gl.constexpr):
    """This thread arrives at barrier `number` and waits until THREADS threads have."""
    gl.inline_asm_elementwise(
        _assembly("sync", THREADS), "=r,r", [number], gl.int32, is_pure=False, pack=1
    )
