"""What ranks of context-parallel attention compute, one by one on one GPU: docs/distributed.md.

    PYTHONPATH=src python benchmarks/distributed_h200.py

Each rank of 1, 2, 4 and 8 gets its share of one sequence, and only its computation is timed: a GPU
that had exchanged everything in no time would need as long. Results are compared first, bit by bit,
with one call over the whole sequence. Then the time of a call in a group of one rank is compared
with that of the kernel, and the bytes are counted that it copies on the device. Writes
benchmarks/results/distributed-h200.json.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep import dispatch
from lockstep.bench import pivot_tables
from lockstep.distributed import context_parallel_attention
from lockstep.distributed.heads import divide
from lockstep.distributed.layout import Sharding
from lockstep.distributed.local import Settings, attend
from lockstep.options import Options
from lockstep.output import results
from lockstep.problem import Tensors, describe

ROOT = Path(__file__).resolve().parents[1]
S, Hq, Hkv, D = 32768, 32, 8, 128
RANKS = (1, 2, 4, 8)
ROUNDS = 7
SIZES = f"causal, {S:,} tokens, {Hq} query heads, {Hkv} key heads of {D}, bf16"
# Kernels, and the methods that run by them.
KERNELS = {"triton": ("heads", "gather", "ring"), "hopper": ("heads", "gather")}
CALL_COLUMNS = ("call, ms", "kernel, ms", "copied, MB", "q, k, v and out, MB")


class Share:
    """What one rank computes, by each method."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kernel: str, ranks: int, rank: int) -> None:
        self.q, self.k, self.v = q, k, v
        options = Options(causal=True, query_invariant=True)
        self.settings, self.ranks = Settings(*options, kernel), ranks
        self.problem = describe(Tensors(q, k, v), options)
        self.pieces = Sharding(S, ranks, balanced=True).pieces(rank)
        self.part = divide(Hq, Hkv, ranks, S)[rank]
        self.kernel = dispatch.select(self.problem, kernel)

    def heads(self) -> list[tuple[Any, Tensor]]:
        of_q, of_k = (slice(x.start, x.stop) for x in (self.part.q_heads, self.part.kv_heads))
        q, k, v = self.q[:, of_q], self.k[:, of_k], self.v[:, of_k]
        rows = attend(q, k, v, None, range(S), self.settings)
        return [((slice(None), of_q), rows.out)]

    def gather(self) -> list[tuple[Any, Tensor]]:
        return [
            (
                (slice(None), slice(None), slice(at.start, at.stop)),
                attend(self._of(at), self.k, self.v, None, at, self.settings).out,
            )
            for at, _ in self.pieces
        ]

    def ring(self) -> list[tuple[Any, Tensor]]:
        carry = self.kernel.carry()
        states = [
            carry.forward(self.problem, self._of(at), None, at.start) for at, _ in self.pieces
        ]
        step = -(-S // (self.ranks * carry.span)) * carry.span
        for first in range(0, S, step):
            k, v = (x[:, :, first : first + step] for x in (self.k, self.v))
            for state in states:
                state.fold(k, v, first)
        return [
            ((slice(None), slice(None), slice(at.start, at.stop)), state.close()[0])
            for (at, _), state in zip(self.pieces, states, strict=True)
        ]

    def _of(self, at: range) -> Tensor:
        return self.q[:, :, at.start : at.stop]


def milliseconds(run: Callable[[], Any]) -> float:
    """The median of the times between events before and after."""
    for _ in range(2):
        run()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def shares(q: Tensor, k: Tensor, v: Tensor, rounds: bool) -> list[dict[str, Any]]:
    """A row for each kernel, method and number of ranks, with the time of the slowest rank."""
    rows = []
    for kernel, methods in KERNELS.items():
        options = {"causal": True, "query_invariant": True, "kernel": kernel}
        whole = lockstep.attention(q, k, v, **options)
        alone = milliseconds(lambda options=options: lockstep.attention(q, k, v, **options))
        for method in methods:
            for ranks in RANKS:
                of_ranks = [Share(q, k, v, kernel, ranks, rank) for rank in range(ranks)]
                for share in of_ranks:
                    for at, out in getattr(share, method)():
                        assert torch.equal(out, whole[at]), (kernel, method, ranks)
                if rounds:
                    ms = max(milliseconds(getattr(share, method)) for share in of_ranks)
                    figures = {"ms": ms, "of one GPU": alone / (ranks * ms)}
                    common = {"what": "share", "kernel": kernel, "method": method, "ranks": ranks}
                    rows.append({**common, **figures})
                    print(rows[-1], flush=True)
    return rows


class Copies(TorchDispatchMode):
    """Counts the bytes that operators of PyTorch write on the device."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.cat, torch.ops.aten.clone):
            self.n_bytes += out.numel() * out.element_size() * out.is_cuda
        return out


def calls(q: Tensor, k: Tensor, v: Tensor) -> list[dict[str, Any]]:
    """In a group of one rank: the time of a call beside the kernel's, and what it copies."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29555", "RANK": "0"}
    dist.init_process_group("nccl", world_size=1, rank=0)
    options = {"causal": True, "query_invariant": True, "kernel": "triton"}
    alone = milliseconds(lambda: lockstep.attention(q, k, v, **options))
    moved = sum(x.numel() * x.element_size() for x in (q, k, v, q))
    rows = []
    for method in ("heads", "gather", "ring"):

        def run(method: str = method) -> Tensor:
            return context_parallel_attention(
                q, k, v, mesh=dist.group.WORLD, method=method, **options
            )

        ms = milliseconds(run)
        with Copies() as copies:
            run()
        figures = (ms, alone, copies.n_bytes / 1e6, moved / 1e6)
        for column, figure in zip(CALL_COLUMNS, figures, strict=True):
            row = {"what": "call", "method": method, "column": column, "figure": figure}
            rows.append(row)
            print(row, flush=True)
    dist.destroy_process_group()
    return rows


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, S, D, device="cuda", dtype=torch.bfloat16) for H in (Hq, Hkv, Hkv))
    with torch.no_grad():
        rows = shares(q, k, v, rounds=True) + calls(q, k, v)
    run = results.collect("distributed-h200", rows)
    run["tables"] = {
        "distributed_shares": {
            "where": {"what": "share"},
            "by": ["kernel", "method"],
            "columns": {f"{ranks} rank{'s' * (ranks > 1)}": {"ranks": ranks} for ranks in RANKS},
            "value": "of one GPU",
            "format": "{:.2f}",
            "caption": f"query-invariant, {SIZES}",
        },
        "distributed_calls": {
            "where": {"what": "call"},
            **pivot_tables.table_of(
                ["method"], CALL_COLUMNS, 4, f"forward, one rank, Triton kernels, {SIZES}"
            ),
        },
    }
    results.write(run, ROOT / results.RESULTS / "distributed-h200.json")


if __name__ == "__main__":
    main()
