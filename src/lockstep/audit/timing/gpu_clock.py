"""Times of kernels on a GPU, by its own clock, a million of each in less than a minute.

A CUDA graph holds many samples. Each is a kernel of one block, `next_sample`, which copies the next
secrets to where the call reads them, reading their partners as well, and then the kernels of the
call. `next_sample` reads the clock of the GPU (`globaltimer`) when it begins, which ends the sample
before, and after its copy, which begins its own. Neither the host nor an event has a part in it.
The order of the classes is drawn at random, anew for each sample.

These calls are small. All subjects run side by side, each on LANES streams of its own: what one
does to the time of another does not depend on the class that the other one has drawn. CUDA has
queues for 8 streams unless the environment variable CUDA_DEVICE_MAX_CONNECTIONS, at most 32, says
otherwise; streams that share a queue wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.audit.timing.clock import Samples, Secrets, Times, plan
from lockstep.audit.timing.subjects import Subject
from lockstep.simt import gpu
from lockstep.simt.cuda_cpp import CudaSource
from lockstep.simt.nvrtc import compile_source

# Samples of a graph, graphs of each stream that wait at a time, and threads that copy.
IN_GRAPH, AHEAD, THREADS = 250, 4, 1024
LANES = 2
ALIGNMENT = 256  # bytes, of each secret tensor
SOURCE = """
extern "C" __global__ void next_sample(
    const int* order, int* at, const uint4* pool, uint4* buffer, int words, int half,
    long long* began, long long* ended, bool is_last)
{
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    const int i = at[0], is_open = at[1];
    __syncthreads();
    if (threadIdx.x == 0 && is_open) ended[i - 1] = now;
    if (threadIdx.x == 0) at[1] = !is_last;
    if (is_last) return;
    const uint4* random = pool + (long long)(order[i] >> 1) * words;
    const uint4* fixed = random + (long long)half * words;
    const unsigned is_fixed = -(order[i] & 1), is_random = ~is_fixed;
    for (int j = threadIdx.x; j < words; j += blockDim.x) {
        const uint4 a = random[j], b = fixed[j];
        buffer[j] = make_uint4(
            (a.x & is_random) | (b.x & is_fixed), (a.y & is_random) | (b.y & is_fixed),
            (a.z & is_random) | (b.z & is_fixed), (a.w & is_random) | (b.w & is_fixed));
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        at[0] = i + 1;
        __threadfence();
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
        began[i] = now;
    }
}
"""


def compare(
    subjects: Iterable[Subject], samples: int, seconds: float = math.inf
) -> Iterator[tuple[str, dict[str, Times]]]:
    """The name of each subject, and the times of each class of secrets and of all together.

    `samples` calls of each are timed, rounded up to whole graphs; fewer if that takes longer than
    `seconds`.
    """
    rounds = -(-samples // (IN_GRAPH * LANES))
    # Nothing may run while a graph is captured.
    # Each has an order of its own: no class of one goes with that of another.
    runs = [_Run(subject, rounds, seed) for seed, subject in enumerate(subjects)]
    chains = [chain for run in runs for chain in run.chains]
    for chain in chains:
        chain.start()
    began, taken = time.perf_counter(), 0
    while taken < rounds and time.perf_counter() - began < seconds:
        for chain in chains:
            chain.replay(taken)
        taken += 1
    torch.cuda.synchronize()
    for run in runs:
        yield run.name, run.times(taken)


class _Run:
    """The samples of one subject, shared out to several streams in turns."""

    def __init__(self, subject: Subject, rounds: int, seed: int) -> None:
        self.name, n = subject.name, rounds * IN_GRAPH * LANES
        self.samples: Samples = plan(subject.draw, subject.fixes, n, seed)
        pool = torch.stack([_packed(secrets) for secrets in self.samples.pool]).cuda()
        order = 2 * self.samples.order + self.samples.is_fixed
        on_gpu = torch.from_numpy(order).to(torch.int32).cuda()
        like = self.samples.pool[0]
        self.chains = [
            _Chain(subject, like, pool, on_gpu[lane::LANES].contiguous()) for lane in range(LANES)
        ]

    def times(self, graphs: int) -> dict[str, Times]:
        """The times in the first `graphs` of each stream, in the order of the samples."""
        ns = np.stack([chain.nanoseconds(graphs) for chain in self.chains], axis=1).reshape(-1)
        return self.samples.first(len(ns)).split(ns)


class _Chain:
    """A graph of samples of one subject, and the memory it works in."""

    def __init__(self, subject: Subject, like: Secrets, pool: Tensor, order: Tensor) -> None:
        self.name, self.pool, self.order = subject.name, pool, order
        self.buffer = pool[0].clone()
        self.at = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.began, self.ended = (
            torch.zeros(len(order), dtype=torch.int64, device="cuda") for _ in range(2)
        )
        new_stream: Any = torch.cuda.Stream
        self.stream: Any = new_stream()
        new_event: Any = torch.cuda.Event
        self.done = [new_event() for _ in range(AHEAD)]
        self.graph: Any = torch.cuda.CUDAGraph()
        self._capture(subject.run, _views(self.buffer, like))

    def _capture(self, run: Callable[[Secrets], Tensor], secrets: Secrets) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._load()
                run(secrets)
            self._load(is_last=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(IN_GRAPH):
                self._load()
                run(secrets)
            self._load(is_last=True)

    def _load(self, is_last: bool = False) -> None:
        addresses = [x.data_ptr() for x in (self.order, self.at, self.pool, self.buffer)]
        words = ctypes.c_int32(self.buffer.numel() // 16)
        half = ctypes.c_int32(len(self.pool) // 2)
        clocks = self.began.data_ptr(), self.ended.data_ptr()
        _launch(*addresses, words, half, *clocks, ctypes.c_bool(is_last))

    def start(self) -> None:
        """Goes through the graph once, for the caches, and back to the first sample."""
        with torch.cuda.stream(self.stream):
            self.at.zero_()
            self.graph.replay()
            self.at.zero_()

    def replay(self, i: int) -> None:
        """The samples of graph `i`, when all but the last few graphs before it are done."""
        done = self.done[i % AHEAD]
        if i >= AHEAD:
            done.synchronize()
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            done.record()

    def nanoseconds(self, graphs: int) -> np.ndarray:
        """The time of each sample of the first `graphs` graphs."""
        n, taken = graphs * IN_GRAPH, int(self.at[0])
        if taken != n:
            raise RuntimeError(f"{self.name}: {taken} samples of {n}")
        ns: np.ndarray = (self.ended - self.began)[:n].cpu().numpy()
        return ns


def _packed(secrets: Secrets) -> Tensor:
    """All tensors as bytes, one after the other, each aligned."""
    parts = []
    for x in secrets.values():
        flat = x.contiguous().view(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT)))
    return torch.cat(parts)


def _views(buffer: Tensor, like: Secrets) -> Secrets:
    """The tensors in memory that `_packed` has laid out."""
    found, offset = {}, 0
    for name, x in like.items():
        size = x.numel() * x.element_size()
        found[name] = buffer[offset : offset + size].view(x.dtype).view(x.shape)
        offset += size + -size % ALIGNMENT
    return found


@lru_cache(maxsize=1)
def _kernel() -> Any:
    major, minor = torch.cuda.get_device_capability()
    source = CudaSource("next_sample", SOURCE, (), (), 0, 0)
    return gpu.load(compile_source(source, f"sm_{major}{minor}"), torch.cuda.current_device())


def _launch(*arguments: Any) -> None:
    from cuda.core import LaunchConfig, Stream, launch

    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    launch(stream, LaunchConfig(grid=1, block=THREADS), _kernel(), *arguments)
