"""The memory that a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import torch
from torch.autograd.profiler import profile


def peak(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call needs beyond what is there before it.

    On a CPU this is what PyTorch allocates in all, freed in between or not, and NumPy's peak: the
    resident size of a process says little, because allocators keep what was freed before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    tracemalloc.start()
    try:
        with profile(use_kineto=False, profile_memory=True) as seen:
            call()
        numpy = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    events = seen.function_events or []
    return numpy + sum(max(int(event.self_cpu_memory_usage), 0) for event in events)
