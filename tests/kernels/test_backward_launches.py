"""Gradients on a GPU: those of later calls, which go straight to the driver, have the bits of those
of the first two, which go through Triton; in threads, on streams and in CUDA graphs, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernel_calls import forget_calls

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from problems import Case, draw, draw_varlen

import lockstep
from lockstep.kernels import driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def strided(D: int) -> Case:
    """Heads behind tokens, and values at odd addresses."""
    q, k, v = torch.randn(3, 2, 300, 4, D).to(BF16).transpose(2, 3)
    odd = torch.randn(v.numel() + 3).to(BF16)[3:].view_as(v.transpose(1, 2)).transpose(1, 2)
    return Case({"q": q, "k": k, "v": odd}, {"causal": True})


CASES = {
    "dense": lambda D: draw(163, 311, B=2, Hq=4, Hkv=2, D=D, dtype=BF16, causal=True),
    "sinks": lambda D: draw(163, 163, Hq=4, D=D, dtype=BF16, sinks=torch.randn(4), window=(30, 9)),
    "kv_lens": lambda D: draw(140, 300, B=3, D=D, dtype=BF16, kv_lens=torch.tensor([0, 7, 300])),
    "varlen": lambda D: draw_varlen([263, 5, 130], [263, 5, 211], D=D, dtype=BF16, causal=True),
    "strided": strided,
}


class Derivation:
    """A call with its gradients, again and again."""

    def __init__(self, case: Case, kernel: str) -> None:
        self.kernel = kernel
        # Where a tensor lies is part of the case; a copy would lie elsewhere.
        tensors = {
            name: torch.empty(0, dtype=x.dtype, device="cuda").set_(
                x.untyped_storage().cuda(), x.storage_offset(), x.shape, x.stride()
            )
            for name, x in case.tensors.items()
        }
        leaves = [x for n, x in tensors.items() if n in ("q", "k", "v", "sinks")]
        self.leaves = [x.requires_grad_() for x in leaves]
        self.case = Case(tensors, case.options)
        out, lse = self.forward()
        self.douts = torch.randn_like(out), torch.randn_like(lse)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.case.call(lockstep, kernel=self.kernel)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.douts)


def in_threads(call: Any) -> list[Any]:
    """Four new ones, which launch at once."""
    with ThreadPoolExecutor(4) as threads:
        results = [x.result() for x in [threads.submit(call) for _ in range(40)]]
    torch.cuda.synchronize()
    return results


def on_streams(call: Any) -> list[Any]:
    """Two, by turns."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for turn in range(10):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(call())
    torch.cuda.synchronize()
    return results


def in_a_graph(call: Any) -> list[Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for _ in range(2):
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    return [results]


@pytest.fixture
def by_driver(monkeypatch) -> list[Any]:
    """What went straight to the driver, with nothing prepared before."""
    found = []
    launch = driver.find_launch()
    assert launch is not None

    def noted(*given: Any) -> None:
        found.append(given)
        launch(*given)

    monkeypatch.setattr(driver, "find_launch", lambda: noted)
    forget_calls(monkeypatch)
    return found


def skip_unless_it_runs(kernel: str) -> None:
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize(("kernel", "D"), [("triton", 64), ("hopper", 64), ("hopper", 256)])
@pytest.mark.parametrize("case", CASES)
def test_later_gradients_have_the_bits_of_the_first(case, kernel, D, by_driver):
    skip_unless_it_runs(kernel)
    torch.manual_seed(0)
    call = Derivation(CASES[case](D), kernel)
    first = call()
    assert all(x.isfinite().all() for x in first)
    assert all(map(torch.equal, first, call()))
    by_driver.clear()
    again = call()
    # A forward, rows, and at least one pass.
    assert len(by_driver) >= 3
    results = [again]
    for how in (in_threads, on_streams, in_a_graph):
        results += how(call)
    for other in results:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(("kernel", "D"), [("triton", 64), ("hopper", 64), ("hopper", 256)])
def test_gradients_by_strides_and_addresses(kernel, D, by_driver):
    """Calls that differ in nothing else, by turns: each gets what it would get alone."""
    skip_unless_it_runs(kernel)
    torch.manual_seed(0)
    plain = Derivation(CASES["dense"](D), kernel)
    dout, dlse = plain.douts

    def moved(x: torch.Tensor, by: int) -> torch.Tensor:
        return torch.empty(x.numel() + by, dtype=x.dtype, device="cuda")[by:].view_as(x).copy_(x)

    douts = {
        "as it was": (dout, dlse),
        "elsewhere": (dout.clone(), dlse.clone()),
        "odd": (moved(dout, 1), moved(dlse, 1)),
        "transposed": (dout.transpose(1, 2).contiguous().transpose(1, 2), dlse),
        "far rows": (torch.cat([dout, dout], -1)[..., : dout.shape[-1]], dlse),
    }
    expected = plain()
    for _ in range(3):
        for name, given in douts.items():
            plain.douts = given
            assert all(map(torch.equal, expected, plain())), name
    # Without a gradient of lse it is another call.
    alone = [torch.autograd.grad(plain.forward()[0], plain.leaves, dout) for _ in range(3)]
    zero = torch.autograd.grad(plain.forward(), plain.leaves, (dout, torch.zeros_like(dlse)))
    for other in alone:
        assert all(map(torch.equal, zero, other))
