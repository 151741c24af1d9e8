"""What query_invariant=True costs on a Hopper GPU: prefill and decode, beside FA3.

    python benchmarks/query_invariance_h200.py PEERS_DIRECTORY --save-to benchmarks/results

PEERS_DIRECTORY is that of `gpu_h200.py`. Most of a first run is compilation. With --warm-up all of
Lockstep's calls are made once and nothing is timed; several processes may share them:

    for i in 0 1 2 3; do python benchmarks/query_invariance_h200.py --warm-up $i/4 & done; wait
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
# What describes a case, and what sets its calls up.
Case = tuple[dict[str, Any], Callable[[], Calls]]


def ours(call: Callable[..., Tensor]) -> Calls:
    return {"default": call, "query-invariant": partial(call, query_invariant=True)}


def prefill(fa3: Any) -> Iterator[Case]:
    def calls(B: int, H: int, S: int, D: int, causal: bool) -> Calls:
        q, k, v = torch.randn((3, B, H, S, D), device="cuda").bfloat16()
        found = ours(partial(lockstep.attention, q, k, v, causal=causal))
        return found if fa3 is None else found | {"FA3": fa3.prefill(q, k, v, causal)}

    for D, H in ((64, 32), (128, 16)):
        for S in (1024, 4096, TOKENS):
            for causal in (False, True):
                flops = 4 * H * TOKENS * S * D / (2 if causal else 1)
                case = {"table": PREFILL, "D": D, "S": S, "causal": causal, "work": flops / 1e12}
                yield case, partial(calls, TOKENS // S, H, S, D, causal)


def few_queries(fa3: Any) -> Iterator[Case]:
    def calls(B: int, Sq: int) -> Calls:
        q = torch.randn(B, 32, Sq, 128, device="cuda").bfloat16()
        call = partial(lockstep.attention_paged, *paged_cache(q, TOKENS, 16, 8), causal=True)
        found = {**ours(call), "triton": partial(call, kernel="triton")}
        return {name: _graphed(x) for name, x in found.items()}

    for B, Sq in ((1, 16), (1, 64), (1, 128), (4, 16), (4, 64), (4, 128), (4, 256)):
        yield {"table": FEW, "queries": f"{B} × {Sq}"}, partial(calls, B, Sq)


def paged_cache(q: Tensor, keys: int, page: int, Hkv: int) -> tuple[Tensor, ...]:
    """The queries, pages of keys and values, their table, and lengths."""
    n = len(q) * -(-keys // page)
    k, v = torch.randn(2, n, page, Hkv, q.shape[-1], device="cuda").bfloat16()
    table = torch.randperm(n, device="cuda").int().view(len(q), -1)
    return q, k, v, table, torch.full((len(q),), keys, device="cuda", dtype=torch.int32)


def decode(fa3: Any) -> Iterator[Case]:
    def calls(cache: Cache) -> Calls:
        B, S, page, Hq, Hkv, D = cache
        q = torch.randn(B, Hq, 1, D, device="cuda").bfloat16()
        if page is None:
            k, v = torch.randn(2, B, Hkv, S, D, device="cuda").bfloat16()
            found = ours(partial(lockstep.attention, q, k, v, causal=True))
        else:
            paged = paged_cache(q, S, page, Hkv)
            found = ours(partial(lockstep.attention_paged, *paged, causal=True))
            if fa3 is not None:
                found["FA3"] = fa3.decode(*paged)
        return {name: _graphed(x) for name, x in found.items()}

    for cache in CACHES:
        yield {"table": DECODE, "decode": cache.name}, partial(calls, cache)


def _graphed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call in a CUDA graph; returns what it has written. Holds the call, whose tensors the
    graph reads."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay(_held: Callable[[], Tensor] = call) -> Tensor:
        graph.replay()
        return out

    return replay


def warm_up(share: int, n: int) -> None:
    """Makes every n-th of Lockstep's calls once, from number `share` on."""
    cases = [*prefill(None), *decode(None), *few_queries(None)]
    for _case, calls in cases[share::n]:
        for call in calls().values():
            call()
    torch.cuda.synchronize()


def measure(fa3: Any) -> list[dict[str, Any]]:
    rows = []
    for case, set_up in (*prefill(fa3), *decode(fa3), *few_queries(fa3)):
        calls = set_up()
        expected = calls["default"]().float()
        for name, call in calls.items():
            difference = float((call().float() - expected).abs().max())
            assert difference < MOST_DIFFERENCE, (case, name, difference)
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
    parser.add_argument("peers", type=Path, nargs="?")
    parser.add_argument("--save-to", type=Path)
    parser.add_argument("--warm-up", metavar="SHARE/OF", help="0/1 for all calls in one process")
    given = parser.parse_args()
    if given.warm_up:
        warm_up(*map(int, given.warm_up.split("/")))
        return
    if given.peers is None:
        parser.error("takes PEERS_DIRECTORY unless --warm-up is given")
    fa3 = next(x for x in load(given.peers) if x.name == "FA3")
    torch.manual_seed(0)
    rows = measure(fa3)
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
