"""Forked children of a process whose OpenMP threads are up: the same bits, and no waiting."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.kernels.cpu.compiler import compile as compiling

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# Large enough for torch to use several threads for each copy, fill and conversion.
B, H, S, D = 2, 4, 700, 64
SECONDS = 60

Run = Callable[[], Sequence[Tensor]]


def _forward() -> Run:
    q, k, v = torch.randn(3, B, H, S, D)
    return lambda: lockstep.attention(q, k, v, causal=True, return_lse=True)


def _columns() -> Run:
    """Rows that are not contiguous are copied."""
    q, k, v = torch.randn(3, B, H, D, S).mT
    bias = torch.randn(B, H, S, S).mT
    return lambda: [lockstep.attention(q, k, v, bias=bias)]


def _lengths() -> Run:
    n = 40_000
    q, k, v = torch.randn(3, n, 1, 1, 8)
    kv_lens = torch.ones(n, dtype=torch.int32)
    return lambda: [lockstep.attention(q, k, v, kv_lens=kv_lens)]


def _pages() -> Run:
    n = 40_000
    q, k_pages, v_pages = torch.randn(n, 1, 1, 8), *torch.randn(2, 4, 16, 1, 8)
    table, kv_lens = torch.zeros(n, 1, dtype=torch.int32), torch.full((n,), 9)
    return lambda: [lockstep.attention_paged(q, k_pages, v_pages, table, kv_lens)]


def _autocast() -> Run:
    q, k, v = torch.randn(3, B, H, S, D)

    def run() -> Sequence[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [lockstep.attention(q, k, v).view(torch.int16)]

    return run


def _vmap() -> Run:
    q, k, v = torch.randn(3, B, H, 3, S, D)
    return lambda: [torch.vmap(lockstep.attention, in_dims=2)(q, k, v)]


def _oracle() -> Run:
    q, k, v = torch.randn(3, 1, 2, 300, D, dtype=torch.float64)
    return lambda: [lockstep.attention(q, k, v)]


def _reference() -> Run:
    q, k, v = torch.randn(3, B, H, 300, D)
    return lambda: lockstep.reference.attention(q, k, v, causal=True, return_lse=True)


def _given_of_reference() -> tuple[list[Tensor], list[Tensor]]:
    inputs = [x.requires_grad_() for x in torch.randn(3, B, H, 300, D).unbind()]
    return inputs, [torch.randn(B, H, 300, D).double(), torch.randn(B, H, 300).double()]


def _reference_backward() -> Run:
    inputs, douts = _given_of_reference()

    def run() -> Sequence[Tensor]:
        results = lockstep.reference.attention(*inputs, causal=True, return_lse=True)
        return torch.autograd.grad(results, inputs, douts)

    return run


def _reference_backward_of_a_parents_graph() -> Run:
    inputs, douts = _given_of_reference()
    results = lockstep.reference.attention(*inputs, causal=True, return_lse=True)
    return lambda: torch.autograd.grad(results, inputs, douts, retain_graph=True)


def _reference_backward_of_its_gradients() -> Run:
    inputs, douts = _given_of_reference()
    douts[0].requires_grad_()
    more = torch.randn(2, B, H, 300, D).unbind()

    def run() -> Sequence[Tensor]:
        results = lockstep.reference.attention(*inputs, return_lse=True)
        dq, dk, _ = torch.autograd.grad(results, inputs, douts, create_graph=True)
        (second,) = torch.autograd.grad([dq, dk], douts[:1], more, create_graph=True)
        return torch.autograd.grad(second, inputs, douts[0])

    return run


def _merge() -> Run:
    parts = [(torch.randn(B, H, D, S).mT, torch.randn(B, H, S)) for _ in range(2)]
    return lambda: lockstep.merge(parts)


def _derive(*wanted: str, dout: bool = True, dlse: bool = True) -> Run:
    given = {name: torch.randn(B, H, S, D) for name in "qkv"}
    given["bias"], given["sinks"] = torch.randn(1, H, S, S), torch.randn(H)
    inputs = [given[name].requires_grad_() for name in wanted]
    douts = [torch.randn(B, H, D, S).mT] * dout + [torch.randn(B, S, H).mT] * dlse

    def run() -> Sequence[Tensor]:
        out, lse = lockstep.attention(**given, return_lse=True)
        return torch.autograd.grad([out] * dout + [lse] * dlse, inputs, douts)

    return run


def _backward() -> Run:
    return _derive("q", "k", "v", dlse=False)


def _backward_of_both() -> Run:
    return _derive("q", "k", "v", "sinks")


def _backward_of_lse() -> Run:
    return _derive("q", "k", dout=False)


def _backward_of_bias() -> Run:
    return _derive("bias")


def _backward_of_merge() -> Run:
    outs, lses = torch.randn(2, B, H, S, D), torch.randn(2, B, H, S)
    inputs = [x.requires_grad_() for x in (*outs.unbind(), *lses.unbind())]
    douts = [torch.randn(B, H, S, D), torch.randn(B, H, S)]

    def run() -> Sequence[Tensor]:
        parts = [(inputs[0], inputs[2]), (inputs[1], inputs[3])]
        return torch.autograd.grad(lockstep.merge(parts), inputs, douts)

    return run


def _bytes(run: Run) -> list[bytes]:
    return [x.detach().numpy().tobytes() for x in run()]


def _answer(run: Run, pipe) -> None:
    pipe.send((_bytes(run), torch.get_num_threads()))


def _ask_child(run: Run) -> tuple[list[bytes], int]:
    """The bytes of the results in a forked child, and its number of threads afterwards."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(run, sender))
    child.start()
    sender.close()
    try:
        assert receiver.poll(SECONDS), "the child hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


@pytest.fixture
def _three_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.randn(1 << 20).exp()  # torch's threads are up
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(
    "job",
    [
        _forward,
        _columns,
        _lengths,
        _pages,
        _autocast,
        _vmap,
        _oracle,
        _reference,
        _reference_backward,
        _reference_backward_of_a_parents_graph,
        _reference_backward_of_its_gradients,
        _merge,
        _backward,
        _backward_of_both,
        _backward_of_lse,
        _backward_of_bias,
        _backward_of_merge,
    ],
)
def test_a_forked_child_has_the_same_bits_and_keeps_its_threads(job: Callable[[], Run]):
    run = job()
    expected = _bytes(run)
    found, threads = _ask_child(run)
    assert found == expected
    assert threads == 3


def test_a_child_forked_while_another_thread_compiles():
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    run = lambda: [lockstep.attention(q, k, v)]  # noqa: E731
    expected = _bytes(run)
    compiles, forks = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with compiling._compiling:
            compiles.set()
            forks.wait(1)

    def need_the_lock() -> Sequence[Tensor]:
        with compiling._compiling:
            return run()

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    compiles.wait()
    found, _ = _ask_child(need_the_lock)
    forks.set()
    thread.join()
    assert found == expected
