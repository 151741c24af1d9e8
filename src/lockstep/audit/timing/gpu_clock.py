"""Times of kernels on a GPU, by its own clock, a million of them in half a minute.

A CUDA graph holds many samples. Each is a kernel of one block, `next_sample`, which copies the next
secrets to where the call reads them, and then the kernels of the call. `next_sample` reads the
clock of the GPU (`globaltimer`) when it begins, which ends the sample before, and after its copy,
which begins its own. Neither the host nor an event has a part in it. The order of the classes is
drawn at random, anew for each sample.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.audit.timing.clock import POOL, Secrets, Times
from lockstep.simt import gpu
from lockstep.simt.cuda_cpp import CudaSource
from lockstep.simt.nvrtc import compile_source

# Samples of a graph, and threads that copy.
IN_GRAPH, THREADS = 250, 256
ALL = "all classes"
ALIGNMENT = 256  # bytes, of each secret tensor
SOURCE = """
extern "C" __global__ void next_sample(
    const int* order, int* at, const uint4* pool, uint4* buffer, int words, long long* began,
    long long* ended, bool is_last)
{
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    const int i = *at;
    __syncthreads();
    if (threadIdx.x == 0 && i > 0) ended[i - 1] = now;
    if (is_last) return;
    const uint4* from = pool + (long long)order[i] * words;
    for (int j = threadIdx.x; j < words; j += blockDim.x) buffer[j] = from[j];
    __syncthreads();
    if (threadIdx.x == 0) {
        *at = i + 1;
        __threadfence();
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
        began[i] = now;
    }
}
"""


def compare(
    run: Callable[[Secrets], Tensor],
    draw: Callable[[torch.Generator], Secrets],
    fixes: Mapping[str, Callable[[Secrets], Secrets]],
    samples: int,
    seed: int = 0,
) -> dict[str, Times]:
    """Times of each class of secrets against random ones, and of all of them together.

    Of `samples` calls, half have random secrets; the classes share the other half. `draw` makes
    secrets on the CPU; `run` gets them on the GPU, always in the same memory.
    """
    generator = torch.Generator().manual_seed(seed)
    random = [draw(generator) for _ in range(POOL)]
    classes = [random]
    for fix in fixes.values():
        classes.append([fix({k: x.clone() for k, x in random[0].items()}) for _ in range(POOL)])
    pool = torch.stack([_packed(secrets) for one in classes for secrets in one]).cuda()
    buffer = pool[0].clone()
    graphs = -(-samples // IN_GRAPH)
    shape = (graphs * IN_GRAPH,)
    which = torch.randint(1, len(classes), shape, generator=generator)
    which *= torch.randint(0, 2, shape, generator=generator)
    order = which * POOL + torch.randint(0, POOL, shape, generator=generator)
    ns = _replay(run, _views(buffer, random[0]), buffer, pool, order, graphs)
    of = which.numpy()
    found = {ALL: Times(ns, of > 0)}
    for i, name in enumerate(fixes, 1):
        mine = (of == 0) | (of == i)
        found[name] = Times(ns[mine], of[mine] == i)
    return found


def _replay(
    run: Callable[[Secrets], Tensor],
    buffers: Secrets,
    buffer: Tensor,
    pool: Tensor,
    order: Tensor,
    graphs: int,
) -> np.ndarray:
    """Nanoseconds of each sample."""
    at = torch.zeros(1, dtype=torch.int32, device="cuda")
    on_gpu = order.to(torch.int32).cuda()
    began, ended = (torch.zeros(len(order), dtype=torch.int64, device="cuda") for _ in range(2))
    words = buffer.numel() // 16

    def load(is_last: bool = False) -> None:
        addresses = [x.data_ptr() for x in (on_gpu, at, pool, buffer)]
        counts = ctypes.c_int32(words), began.data_ptr(), ended.data_ptr()
        _launch(*addresses, *counts, ctypes.c_bool(is_last))

    new_stream: Any = torch.cuda.Stream
    with torch.cuda.stream(new_stream()):
        for _ in range(3):
            load()
            run(buffers)
        load(is_last=True)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            load()
            run(buffers)
        load(is_last=True)
    graph.replay()
    at.zero_()
    for _ in range(graphs):
        graph.replay()
    torch.cuda.synchronize()
    if int(at) != len(order):
        raise RuntimeError(f"{int(at)} samples were taken, {len(order)} were wanted")
    return (ended - began).cpu().numpy().astype(np.float64)


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
