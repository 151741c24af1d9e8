"""Sum a vector: a tree in shared memory, with the threads of a block thinning out.

Run it:

    python examples/simt/tree_sum.py

Two ways to pair up partial sums. With neighbours (every second thread adds the element next to its
own, then every fourth the one two away, ...) the active threads stay scattered over all warps; with
halves (a thread adds what lies half an array away) whole warps fall idle together. The sums and the
number of steps are the same: compare `warps` and `lanes` of the lines marked (*).
"""

from __future__ import annotations

import numpy as np
from rich.console import Console

from lockstep import simt
from lockstep.simt import Constant, cuda, float32, int32

THREADS = 256


@simt.kernel
def tree_sum(x: float32[:], sums: float32[:], n: int32, NEIGHBOURS: Constant):
    part = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x

    with simt.phase("gather"):
        total = 0.0
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            total += x[i]
        part[t] = total
        cuda.syncthreads()

    with simt.phase("tree"):
        if NEIGHBOURS:
            step = 1
            while step < THREADS:
                if t % (2 * step) == 0:
                    part[t] += part[t + step]  # (*)
                cuda.syncthreads()
                step *= 2
        else:
            step = THREADS // 2
            while step > 0:
                if t < step:
                    part[t] += part[t + step]  # (*)
                cuda.syncthreads()
                step //= 2

    if t == 0:
        sums[cuda.blockIdx.x] = part[0]


def main() -> None:
    console = Console()
    blocks, n = 8, 100_000
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    for neighbours in (True, False):
        sums = np.full(blocks, np.nan, np.float32)
        trace = tree_sum[blocks, THREADS](x, sums, n, neighbours).check()
        error = abs(float(sums.sum(dtype=np.float64)) - float(x.sum(dtype=np.float64)))
        console.rule(f"pairs of {'neighbours' if neighbours else 'halves'}: error {error:.1e}")
        console.print(trace)


if __name__ == "__main__":
    main()
