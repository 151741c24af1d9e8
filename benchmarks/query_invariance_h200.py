"""What query_invariant=True costs on a Hopper GPU: prefill and decode, beside FA3.

    python benchmarks/query_invariance_h200.py PEERS_DIRECTORY --save-to benchmarks/results

PEERS_DIRECTORY is that of `gpu_h200.py`. With --warm-up everything is called once, and nothing is
timed: most of a first run is compilation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_h200 import load
from torch import Tensor

import lockstep
from lockstep.bench.gpu_timing import take_turns
from lockstep.output import results

TOKENS = 16384
ROUNDS = 3
PREFILL, DECODE = "query_invariant_prefill", "query_invariant_decode"
FEW = "query_invariant_few_queries"
# How far a contender may be from the first one: a few roundings of bf16.
MOST_DIFFERENCE = 0.03


class Cache(NamedTuple):
    """A decode case: one query for each of B sequences; without pages, keys are in one tensor."""

    B: int
    keys: int
    page: int | None
    Hq: int = 32
    Hkv: int = 8
    D: int = 128

    @property
    def name(self) -> str:
        where = f"pages of {self.page}" if self.page else "one tensor"
        heads = "" if self.Hkv == 8 else f"{self.Hkv} KV head, "
        return f"D {self.D}, {heads}{self.keys:,} keys, {where}, B {self.B}"


CACHES = (
    Cache(1, 4096, 256),
    Cache(1, 65536, 256),
    Cache(8, 16384, 16),
    Cache(64, 4096, 256),
    Cache(256, 1000, 16),
    Cache(1, 100_000, 16, Hq=8, Hkv=1),
    Cache(16, 8192, 16, Hq=64, D=64),
    Cache(1, 4096, None),
    Cache(8, 16384, None),
)
Calls = dict[str, Callable[[], Tensor]]


def ours(call: Callable[..., Tensor]) -> Calls:
    return {"default": call, "query-invariant": partial(call, query_invariant=True)}


def prefill(fa3: Any) -> Iterator[tuple[dict[str, Any], Calls]]:
    for D, H in ((64, 32), (128, 16)):
        for S in (1024, 4096, TOKENS):
            shape = (3, TOKENS // S, H, S, D)
            q, k, v = torch.randn(shape, device="cuda").bfloat16()
            for causal in (False, True):
                calls = ours(partial(lockstep.attention, q, k, v, causal=causal))
                calls["FA3"] = fa3.prefill(q, k, v, causal)
                flops = 4 * H * TOKENS * S * D / (2 if causal else 1)
                case = {"D": D, "S": S, "causal": causal}
                yield {"table": PREFILL, **case, "work": flops / 1e12}, calls


def few_queries(fa3: Any) -> Iterator[tuple[dict[str, Any], Calls]]:
    for B, Sq in ((1, 16), (1, 64), (1, 128), (4, 16), (4, 64), (4, 128), (4, 256)):
        q = torch.randn(B, 32, Sq, 128, device="cuda").bfloat16()
        call = partial(lockstep.attention_paged, *paged_cache(q, TOKENS, 16, 8), causal=True)
        calls = {**ours(call), "triton": partial(call, kernel="triton")}
        case = {"table": FEW, "queries": f"{B} × {Sq}"}
        yield case, {n: _graphed(c) for n, c in calls.items()}


def paged_cache(q: Tensor, keys: int, page: int, Hkv: int) -> tuple[Tensor, ...]:
    """The queries, pages of keys and values, their table, and lengths."""
    n = len(q) * -(-keys // page)
    k, v = torch.randn(2, n, page, Hkv, q.shape[-1], device="cuda").bfloat16()
    table = torch.randperm(n, device="cuda").int().view(len(q), -1)
    return q, k, v, table, torch.full((len(q),), keys, device="cuda", dtype=torch.int32)


def decode(fa3: Any) -> Iterator[tuple[dict[str, Any], Calls]]:
    for cache in CACHES:
        B, S, page, Hq, Hkv, D = cache
        q = torch.randn(B, Hq, 1, D, device="cuda").bfloat16()
        if page is None:
            k, v = torch.randn(2, B, Hkv, S, D, device="cuda").bfloat16()
            calls = ours(partial(lockstep.attention, q, k, v, causal=True))
        else:
            paged = paged_cache(q, S, page, Hkv)
            calls = ours(partial(lockstep.attention_paged, *paged, causal=True))
            if page >= 16:
                calls["FA3"] = fa3.decode(*paged)
        yield {"table": DECODE, "decode": cache.name}, {n: _graphed(c) for n, c in calls.items()}


def _graphed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call in a CUDA graph; returns what it has written."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def measure(fa3: Any, warm_up: bool) -> list[dict[str, Any]]:
    rows = []
    for cases in (prefill, decode, few_queries):
        for case, calls in cases(fa3):
            expected = calls["default"]().float()
            for name, call in calls.items():
                difference = float((call().float() - expected).abs().max())
                assert difference < MOST_DIFFERENCE, (case, name, difference)
            if warm_up:
                continue
            timings = take_turns(calls, ROUNDS)
            work = case.pop("work", None)
            for name in calls:
                seconds = timings.median(name)
                rate = {"µs": seconds * 1e6} if work is None else {"TFLOP/s": work / seconds}
                rows.append({**case, "contender": name, **rate})
            print(case, {row["contender"]: row for row in rows[-len(calls) :]}, flush=True)
    return rows


def _columns(*names: str) -> dict[str, dict[str, str]]:
    return {name: {"contender": name} for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--save-to", type=Path)
    parser.add_argument("--warm-up", action="store_true")
    given = parser.parse_args()
    fa3 = next(x for x in load(given.peers) if x.name == "FA3")
    torch.manual_seed(0)
    rows = measure(fa3, given.warm_up)
    if given.save_to is None:
        return
    run = results.collect("query-invariance", rows)
    names = ("default", "query-invariant", "FA3")
    run["tables"] = {
        PREFILL: {
            "where": {"table": PREFILL},
            "by": ["D, S", "causal"],
            "columns": _columns(*names),
            "value": "TFLOP/s",
            "format": "{:.0f}",
            "caption": f"TFLOP/s, bf16, {TOKENS:,} tokens in all, causal counts half",
        },
        DECODE: {
            "where": {"table": DECODE},
            "by": ["decode"],
            "columns": _columns(*names),
            "value": "µs",
            "format": "{:.1f}",
            "caption": "µs, bf16, in CUDA graphs; 32 query and 8 KV heads where nothing else is "
            "said, 64 and 8 at D 64",
        },
        FEW: {
            "where": {"table": FEW},
            "by": ["queries"],
            "columns": _columns("default", "query-invariant", "triton"),
            "value": "µs",
            "format": "{:.0f}",
            "caption": f"µs, bf16, in CUDA graphs; {TOKENS:,} keys in pages of 16, 32 query and 8 "
            "KV heads, D 128, causal",
        },
    }
    print(results.save_for_gpu(run, "query-invariance", given.save_to))


if __name__ == "__main__":
    main()
