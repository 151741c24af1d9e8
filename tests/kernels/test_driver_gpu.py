"""Calls whose kernels were launched before have the same bits from any thread, on any stream and in
a graph."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from kernel_calls import forget_calls

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

import lockstep
from lockstep.call import call_cache
from lockstep.kernels import driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def calls() -> dict[str, Any]:
    """Calls of each kernel, with tensors that are copied and tensors that are not."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    odd = torch.randn(v.numel() + 3, device="cuda").to(v.dtype)[3:].view_as(v)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    ones = torch.arange(3, dtype=torch.int32, device="cuda")
    page_table = torch.randperm(32, device="cuda").int().view(2, 16)
    kv_lens = torch.tensor([1900, 77], dtype=torch.int32, device="cuda")
    pages = torch.randn(2, 32, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(2, 2, 2, 5000, 64, device="cuda", dtype=torch.bfloat16)
    paging = {"page_table": page_table, "kv_lens": kv_lens}
    tokens = q.transpose(1, 2).contiguous().transpose(1, 2)
    paged, dense, varlen = (
        partial(call, causal=True)
        for call in (lockstep.attention_paged, lockstep.attention, lockstep.attention_varlen)
    )
    found = {
        "paged": partial(paged, q, *pages, page_table, kv_lens),
        "decode": partial(paged, q[:, :, :1], *pages, page_table, kv_lens),
        "decode, tokens first": partial(paged, tokens[:, :, :3], *pages, page_table, kv_lens),
        "dense decode": partial(dense, q[:, :, :1], *cache),
        "ragged": partial(varlen, packed[0], *pages, cu_seqlens, **paging),
        "ragged, of one query": partial(
            varlen, packed[0][:2], *pages, ones, **paging, max_seqlen_q=1
        ),
    }
    for kernel in ("triton", "hopper"):
        found |= {
            f"{kernel}, dense": partial(dense, q, k, v, kernel=kernel),
            f"{kernel}, odd": partial(dense, q, k, odd, kernel=kernel),
            f"{kernel}, varlen": partial(varlen, *packed, cu_seqlens, cu_seqlens, kernel=kernel),
        }
    return found


def in_a_thread(call: Any) -> Any:
    """Results of four new threads, which launch at once."""
    with ThreadPoolExecutor(4) as threads:
        results = [x.result() for x in [threads.submit(call) for _ in range(40)]]
    torch.cuda.synchronize()
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


def on_a_stream(call: Any) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call()
    stream.synchronize()
    return results


def in_a_graph(call: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for x in results:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize(
    "name",
    [
        "paged",
        "decode",
        "decode, tokens first",
        "dense decode",
        "ragged",
        "ragged, of one query",
        "triton, dense",
        "triton, odd",
        "triton, varlen",
        "hopper, dense",
        "hopper, odd",
        "hopper, varlen",
    ],
)
def test_later_launches_give_the_bits_of_the_first(name, monkeypatch):
    """The first goes through Triton."""
    if name.startswith("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    by_driver, launch = [], driver.find_launch()
    monkeypatch.setattr(
        driver, "find_launch", lambda: lambda *given: (by_driver.append(given), launch(*given))
    )
    forget_calls(monkeypatch)
    with_lse, alone = partial(calls()[name], return_lse=True), as_tuple(calls()[name])
    first = with_lse()
    for how in (lambda call: call(), in_a_thread, on_a_stream, in_a_graph):
        assert all(map(torch.equal, how(with_lse), first))
        assert all(map(torch.equal, how(alone), first[:1]))
    assert by_driver


def as_tuple(call: Any) -> Any:
    return lambda: (call(),)


def test_a_graph_is_right_when_its_call_is_forgotten(monkeypatch):
    forget_calls(monkeypatch)
    call = as_tuple(calls()["dense decode"])
    (expected,) = call()
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = call()
    for cache in (call_cache._CALLS, call_cache._LOOKUPS):
        cache.clear()
    call_cache.lookup_of_arguments.cache_clear()
    gc.collect()
    # Memory that was given back belongs to these now.
    others = [torch.full((2,), -1, dtype=torch.int32, device="cuda") for _ in range(10000)]
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
    del others


def test_a_kind_may_be_prepared_in_a_thread_of_its_own(monkeypatch):
    """One that has not used CUDA before."""
    forget_calls(monkeypatch)
    found = calls()
    expected = {name: call() for name, call in found.items()}
    forget_calls(monkeypatch)

    def thrice(call: Any) -> list[torch.Tensor]:
        return [call() for _ in range(4)]

    for name, call in found.items():
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(thrice, call).result()
        assert all(torch.equal(x, expected[name]) for x in results), name
