"""When a rank of a ring exchanges and when it computes: docs/distributed.md.

    PYTHONPATH=src torchrun --nproc-per-node 4 benchmarks/distributed_timeline.py

All ranks are on one GPU, take turns on it and exchange through the memory of the host (gloo), which
is slow: blocks are under way for long. Rank 0 traces the forward of one call, after its results
have been compared with one process, and writes benchmarks/results/distributed-timeline.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep.distributed import context_parallel_attention, shard
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
S, H, D = 32768, 16, 128
Interval = tuple[float, float]


def trace(run: Any) -> list[Any]:
    """The events of one run, in order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        run()
        torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events()
    return sorted(events, key=lambda event: event.start_ns())


def intervals(events: list[Any], name: str) -> list[Interval]:
    """From when to when each event of a name lasted, in ns."""
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if name in event.name()
    ]


def common(some: list[Interval], others: list[Interval]) -> float:
    """How long an interval of both lists lasted; those of a list do not overlap."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


def main() -> None:
    dist.init_process_group("gloo")
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, H, S, D).bfloat16().cuda() for _ in range(3)]
    options = {"query_invariant": True, "kernel": "triton"}
    expected = shard(lockstep.attention(*whole, **options), group, 2)
    q, k, v = (shard(x, group, 2) for x in whole)
    del whole

    def run() -> torch.Tensor:
        return context_parallel_attention(q, k, v, mesh=group, method="ring", **options)

    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(run(), expected), "other bits than one process has"
        torch.cuda.synchronize()
        dist.barrier()
        events = trace(run)
    dist.barrier()
    if rank == 0:
        save(events, ranks)
    dist.destroy_process_group()


def save(events: list[Any], ranks: int) -> None:
    sent = intervals(events, "gloo:broadcast")[-ranks:]
    arrived = intervals(events, "Memcpy HtoD")[-ranks:]
    folds = [x for x in intervals(events, "attend") if x[1] - x[0] > 50_000]
    for name, found in (("broadcasts", sent), ("copies", arrived), ("kernels", folds)):
        assert len(found) == ranks, f"{len(found)} {name} of {ranks} blocks"
    exchanges = [(a, d) for (a, _), (_, d) in zip(sent, arrived, strict=True)]
    start = exchanges[0][0]
    rows = [
        {"block": block, "what": what, "moment": moment, "ms": (at - start) / 1e6}
        for what, found in (("exchange", exchanges), ("computation", folds))
        for block, interval in enumerate(found)
        for moment, at in zip(("begins", "ends"), interval, strict=True)
    ]
    run = results.collect("distributed-timeline", rows)
    run["hidden_ms"] = common(merged(exchanges), folds) / 1e6
    columns = {
        f"{what} {moment}": {"what": what, "moment": moment}
        for what in ("exchange", "computation")
        for moment in ("begins", "ends")
    }
    run["tables"] = {
        "distributed_timeline": {
            "by": ["block"],
            "columns": columns,
            "value": "ms",
            "format": "{:.1f}",
            "caption": f"ms, rank 0 of {ranks} on one GPU, {S:,} tokens, {H} heads of {D}",
        }
    }
    print(rows, run["hidden_ms"])
    results.write(run, ROOT / results.RESULTS / "distributed-timeline.json")


def merged(found: list[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap; `found` is in order."""
    apart: list[Interval] = []
    for a, b in found:
        if apart and a <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(b, apart[-1][1])
        else:
            apart.append((a, b))
    return apart


if __name__ == "__main__":
    main()
