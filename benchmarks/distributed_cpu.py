"""Two processes against one with as many threads as both of them: docs/distributed.md.

    PYTHONPATH=src python benchmarks/distributed_cpu.py [threads [tokens]]

Each of the two has half of the threads, so the same processor does the same work; what is lost goes
into exchanges and waiting. Both take turns, forward and backward, and the bits of all gradients are
compared first. Writes benchmarks/results/distributed-cpu.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep
from lockstep.bench import pivot_tables
from lockstep.distributed import context_parallel_attention, shard
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("heads", "gather", "ring")
Hq, Hkv, D = 8, 4, 64
MASKS = {"full": False, "causal": True}
ROUNDS = 3


def step(attend, inputs, dout):
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def rank_of_two(rank: int, threads: int, S: int, folder: str, found) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, H, S, D, generator=random) for H in (Hq, Hkv, Hkv, Hq)]
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    mine = [shard(x, group, 2, balanced=True).detach().requires_grad_() for x in whole[:3]]
    dout = shard(whole[3], group, 2, balanced=True)
    for mask, causal in MASKS.items():
        options = {"causal": causal, "query_invariant": True}

        def one(*inputs, options=options):
            return lockstep.attention(*inputs, **options)

        times: dict[str, list[float]] = {name: [] for name in ("one process", *METHODS)}
        torch.set_num_threads(2 * threads)
        expected = [shard(x, group, 2, balanced=True) for x in step(one, alone, whole[3])]
        for round_ in range(ROUNDS + 1):
            for name in times:
                if name == "one process":
                    torch.set_num_threads(2 * threads)
                    dist.barrier()
                    start = time.perf_counter()
                    if rank == 0:
                        step(one, alone, whole[3])
                    took = time.perf_counter() - start
                    dist.barrier()
                else:
                    torch.set_num_threads(threads)

                    def two(*inputs, options=options, name=name):
                        return context_parallel_attention(
                            *inputs, mesh=group, method=name, balanced=True, **options
                        )

                    dist.barrier()
                    start = time.perf_counter()
                    got = step(two, mine, dout)
                    dist.barrier()
                    took = time.perf_counter() - start
                    assert all(map(torch.equal, got, expected)), f"{name}: other bits"
                if round_:
                    times[name].append(took)
        if rank == 0:
            found[mask] = {name: statistics.median(x) for name, x in times.items()}
    dist.destroy_process_group()


def main() -> None:
    import tempfile

    threads = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 2
    S = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        found = manager.dict()
        mp.spawn(rank_of_two, (threads // 2, S, folder, found), nprocs=2)
        medians = dict(found)
    rows = []
    for mask, by_name in medians.items():
        for method in METHODS:
            figures = {
                "one process, ms": by_name["one process"] * 1e3,
                "two processes, ms": by_name[method] * 1e3,
                "efficiency": by_name["one process"] / by_name[method],
            }
            rows += pivot_tables.rows_of({"mask": mask, "method": method}, figures)
            print(mask, method, figures)
    run = results.collect("distributed-cpu", rows)
    run["threads"] = threads
    caption = (
        f"forward and backward, fp32, {S:,} tokens, {Hq} query heads and {Hkv} key heads of {D}"
    )
    table = pivot_tables.table_of(["mask", "method"], figures, 3, caption)
    run["tables"] = {"distributed_cpu": {"on": "cpu", **table}}
    results.write(run, ROOT / results.RESULTS / "distributed-cpu.json")


if __name__ == "__main__":
    main()
