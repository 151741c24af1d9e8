"""The roof over the CPU kernels: how many floating-point operations the cores do in a second.

Each thread does fused multiply-adds on registers, as many side by side as a tile of the kernels
has, and nothing else: no loads, no stores, no exponentials. No kernel can be faster on these cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep import forks
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.call.arguments import argument, enter
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler.compile import kernel
from lockstep.kernels.cpu.compiler.simd import Emit, emitter
from lockstep.kernels.cpu.compiler.vectors import MR, NV, WIDTH, f32, i64

CHAINS = MR * NV
BYTES = 4 * WIDTH * CHAINS
STEPS = 1 << 20
ROUNDS = 7


@emitter(i64, i64)
def _multiply_add(e: Emit, memory, n):
    """memory [CHAINS, WIDTH] += n · x · x, where x is its first vector."""
    x = e.load(memory)
    sums = [e.variable(e.load(memory, 4 * WIDTH * i)) for i in range(CHAINS)]
    with e.loop(n):
        for total in sums:
            total.set(e.fma(x, x, total.get()))
    for i, total in enumerate(sums):
        e.store(total.get(), memory, 4 * WIDTH * i)


@kernel
def _run(arguments):
    """Argument: how many steps each thread does."""
    memory = enter(arguments)
    fill(memory, CHAINS * WIDTH, f32(1e-3))
    _multiply_add(memory, argument(arguments, 0))


def measure(clock: Callable[[], float] = time.perf_counter) -> float:
    """Operations a second of all threads together, two for each multiply-add; the best of several
    rounds by this clock.

    Example:
        >>> measure() > 1e8
        True
    """
    threads = forks.threads()
    operations = 2 * threads * STEPS * CHAINS * WIDTH
    best = float("inf")
    for _ in range(ROUNDS):
        start = clock()
        parallel(_run, (STEPS,), BYTES, work=operations)
        best = min(best, clock() - start)
    return operations / best
