"""Run a compiled kernel on several threads.

The threads are torch's own OpenMP threads where there are any: they are awake already, and a
second pool would fight with them for the cores. Elsewhere, and in a forked child, where OpenMP
cannot be used again, they are Python threads; kernels run without the interpreter lock.

Threads draw tickets from a shared counter, so no result depends on how many there are.
"""

from __future__ import annotations

import ctypes
import re
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import forks
from lockstep.kernels.cpu.call.arguments import HEADER
from lockstep.kernels.cpu.compiler.compile import Kernel

# A second thread pays off from about this many fused multiply-adds on.
WORTH_A_THREAD = 1 << 18
OPENMP = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.so")

_local = threading.local()


@lru_cache(maxsize=1)
def _gomp_parallel() -> Callable[..., Any] | None:
    """OpenMP's entry to a parallel region, from the library torch has loaded; None without."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    lines = maps.read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    # Other packages may bring an OpenMP of their own; torch's threads are the ones to share.
    for path in sorted(paths, key=lambda path: ("torch" not in path, path)):
        if OPENMP.search(Path(path).name):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if function is not None:
                unsigned = ctypes.c_uint
                function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, unsigned, unsigned)
                function.restype = None
                return function
    return None


def _scratch(size: int) -> int:
    """Where this thread's scratch memory lies: ``size`` bytes from a cache line on, not cleared."""
    if getattr(_local, "size", -1) < size:
        _local.scratch, _local.size = np.empty(size + 64, np.uint8), size
        _local.address = -(-_local.scratch.ctypes.data // 64) * 64
    return _local.address  # type: ignore[no-any-return]


def parallel(
    kernel: Kernel, arguments: Sequence[int], scratch_bytes: int = 0, work: int = 0
) -> None:
    """Run ``kernel`` on as many threads as ``work`` is worth, at most `forks.threads`.

    Args:
        kernel: reads its arguments with `arguments.argument`, its work with `take_ticket`.
        arguments: integers and addresses; what they point to must outlive the call.
        scratch_bytes: how much memory each thread gets from `enter`.
        work: about how many fused multiply-adds there are in all.
    """
    threads = max(1, min(forks.threads(), 1 + work // WORTH_A_THREAD))
    stride = -(-scratch_bytes // 64) * 64
    block = array("q", (0, 0, _scratch(threads * stride), stride, *arguments))
    assert len(block) == HEADER + len(arguments)
    address, _ = block.buffer_info()
    if threads == 1:
        kernel(address)
        return
    gomp_parallel = _gomp_parallel()
    if gomp_parallel is not None and not forks.forked:
        gomp_parallel(kernel.address, address, threads, 0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(kernel, [address] * threads))
