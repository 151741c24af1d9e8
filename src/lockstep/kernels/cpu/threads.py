"""A small pool of threads that run compiled code side by side.

Compiled kernels release the interpreter lock and draw their work from a shared counter, so a
pool of Python threads is all the scheduling there is. It uses as many threads as torch does
(``torch.set_num_threads``), may be entered from several threads at once, and survives a fork.
No result depends on how many threads there are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

# Waking a thread costs about as much as this many fused multiply-adds.
WORTH_A_THREAD = 1 << 20

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()
_local = threading.local()


def _forget_pool() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="lockstep")
        return _pool


def scratch(words: int) -> np.ndarray:
    """This thread's scratch memory: at least ``words`` int64, on a cache line, never cleared."""
    buffer = getattr(_local, "scratch", None)
    if buffer is None or buffer.size < words:
        raw = np.empty(words + 8, np.int64)
        buffer = _local.scratch = raw[-(raw.ctypes.data // 8) % 8 :][:words]
    return buffer


def parallel(kernel: Callable[..., Any], arguments: tuple, scratch_words: int, work: int) -> None:
    """Run ``kernel(counter, scratch, *arguments)``, both by address, on as many threads as ``work`` is worth.

    Args:
        kernel: compiled, releases the interpreter lock, takes tickets from ``counter``.
        arguments: passed on to it.
        scratch_words: int64 words of scratch each thread needs.
        work: about how many fused multiply-adds there are in all.
    """
    counter = np.zeros(1, np.int64)

    def run() -> None:
        kernel(counter.ctypes.data, scratch(scratch_words).ctypes.data, *arguments)

    helpers = min(torch.get_num_threads() - 1, work // WORTH_A_THREAD)
    if helpers <= 0:
        run()
        return
    futures = [_threads().submit(run) for _ in range(helpers)]
    try:
        run()
    finally:
        wait(futures)
    for future in futures:
        future.result()
