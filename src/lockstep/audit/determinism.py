"""The claim `deterministic`: a call gives the same bits every time it is made."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.audit.calls import Shape, draw
from lockstep.audit.checks import Check, Pair
from lockstep.kernels.kernel import Kernel


def repeated(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """Forward and backward repeated, with results at other addresses each time."""
    for option in shape.options:
        batch = draw(shape, kernel, option)
        first = batch.run()
        kept = []
        for i in range(1, shape.repeats):
            # Results are then allocated at other addresses than before.
            kept.append(torch.empty(997 * i % 4096, device=shape.device))
            yield Pair(f"{option}, call {i + 1}", first, batch.run())


def threads(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """Calls with 1, 2, 3, as many threads as PyTorch uses, and twice that."""
    before = torch.get_num_threads()
    try:
        for option in shape.options:
            batch = draw(shape, kernel, option)
            torch.set_num_threads(before)
            expected = batch.run()
            for n in sorted({1, 2, 3, before, 2 * before}):
                torch.set_num_threads(n)
                yield Pair(f"{option}, {n} threads", expected, batch.run())
    finally:
        torch.set_num_threads(before)


def cuda_graph(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """A call captured once and replayed, each time over results filled with NaN."""
    for option in shape.options:
        batch = draw(shape, kernel, option)
        expected = batch.run()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            batch.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = batch.run()
        for i in range(3):
            for x in captured.tensors.values():
                x.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            yield Pair(f"{option}, replay {i + 1}", expected, captured)


def beside_other_work(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """Calls while matrix products on another stream take multiprocessors away at any moment."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    x = torch.randn(2048, 2048, device=shape.device)
    for option in shape.options:
        batch = draw(shape, kernel, option)
        expected = batch.run()
        side.wait_stream(torch.cuda.current_stream())
        for i in range(min(shape.repeats, 20)):
            with torch.cuda.stream(side):
                for _ in range(1 + i % 4):
                    x @ x
            yield Pair(f"{option}, call {i + 1}", expected, batch.run())
    side.synchronize()


def _on_cpu(shape: Shape) -> str | None:
    return None if shape.device == "cpu" else "CPU only"


def _on_cuda(shape: Shape) -> str | None:
    return None if shape.device.startswith("cuda") else "CUDA only"


CHECKS = (
    Check("the same call again", "deterministic", repeated),
    Check("any number of threads", "deterministic", threads, _on_cpu),
    Check("CUDA graph or eager", "deterministic", cuda_graph, _on_cuda),
    Check("beside other work on the GPU", "deterministic", beside_other_work, _on_cuda),
)
