"""Times of kernels on a GPU, by its own clock, a million of each in less than a minute.

A CUDA graph holds many samples. Each is a kernel of one block, `next_sample`, which copies the next
secrets to where the call reads them, reading their partners as well, and then the kernels of the
call. `next_sample` reads the clock of the GPU (`globaltimer`) when it begins, which ends the sample
before, and after its copy, which begins its own. Neither the host nor an event has a part in it.
The order of the classes is drawn at random, anew for each sample.

These calls are small. Several run side by side, each on a stream of its own: what one does to the
time of another does not depend on the class that the other one has drawn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

# Samples of a graph, and threads that copy.
IN_GRAPH, THREADS = 250, 1024
SIDE_BY_SIDE = 14
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


def compare(subjects: Iterable[Subject], samples: int) -> Iterator[tuple[str, dict[str, Times]]]:
    """The name of each subject, and the times of each class of secrets and of all together.

    `samples` calls of each are timed, rounded up to whole graphs.
    """
    graphs = -(-samples // IN_GRAPH)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        # Nothing may run while a graph is captured.
        chains = [_Chain(subject, graphs) for subject in subjects]
        for chain, ns in zip(chains, pool.map(_Chain.replay, chains), strict=True):
            yield chain.name, chain.samples.split(ns)


class _Chain:
    """A graph of samples of one subject, and the memory it works in."""

    def __init__(self, subject: Subject, graphs: int) -> None:
        self.name, self.graphs = subject.name, graphs
        self.samples: Samples = plan(subject.draw, subject.fixes, graphs * IN_GRAPH)
        packed = [_packed(secrets) for secrets in self.samples.pool]
        self.pool = torch.stack(packed).cuda()
        self.buffer = self.pool[0].clone()
        order = 2 * self.samples.order + self.samples.is_fixed
        self.order = torch.from_numpy(order).to(torch.int32).cuda()
        self.at = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.began, self.ended = (
            torch.zeros(len(self.order), dtype=torch.int64, device="cuda") for _ in range(2)
        )
        new_stream: Any = torch.cuda.Stream
        self.stream: Any = new_stream()
        self.graph: Any = torch.cuda.CUDAGraph()
        self._capture(subject.run, _views(self.buffer, self.samples.pool[0]))

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

    def replay(self) -> np.ndarray:
        """Nanoseconds of each sample."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            self.at.zero_()
            for _ in range(self.graphs):
                self.graph.replay()
            self.stream.synchronize()
            taken = int(self.at[0])
            if taken != len(self.order):
                raise RuntimeError(f"{self.name}: {taken} samples of {len(self.order)}")
            ns: np.ndarray = (self.ended - self.began).cpu().numpy()
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
