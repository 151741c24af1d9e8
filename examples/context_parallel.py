"""Trains a small causal model on any number of processes, with the loss curve of one, bit for bit.

    torchrun --nproc-per-node 2 examples/context_parallel.py

The tokens of one sequence are sharded across the ranks. Attention is context-parallel; everything
else is local to a token. That leaves gradients of weights, which are sums over tokens. Here they
are summed in an order that does not depend on the ranks either: chunk by chunk of 32 tokens.
Needs 1, 2, 4 or 8 processes. Exit status 1 if a bit differs, 2 without a launcher such as torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lockstep
from lockstep.distributed import context_parallel_attention

CHUNKS, CHUNK, VOCABULARY, HEADS, D = 8, 32, 61, 4, 16
WIDTH, STEPS, RATE = HEADS * D, 12, 2.0
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "qkv": (3 * WIDTH, WIDTH),
    "output": (VOCABULARY, WIDTH),
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Gather = Callable[[Tensor], Tensor]


def loss_of_chunks(
    weights: list[dict[str, Tensor]], tokens: list[Tensor], labels: list[Tensor], attend: Attention
) -> list[Tensor]:
    """The loss of each chunk of a shard, with weights of its own."""
    hidden = [F.embedding(x, w["embedding"]) for x, w in zip(tokens, weights, strict=True)]
    qkv = torch.cat([F.linear(x, w["qkv"]) for x, w in zip(hidden, weights, strict=True)])
    q, k, v = qkv.view(1, -1, 3, HEADS, D).permute(2, 0, 3, 1, 4)  # [1, HEADS, tokens, D] each
    out = attend(q, k, v).transpose(1, 2).reshape(-1, WIDTH)
    parts = zip(out.split(CHUNK), hidden, labels, weights, strict=True)
    return [
        F.cross_entropy(F.linear(x + h, w["output"]), y, reduction="sum") for x, h, y, w in parts
    ]


def train(attend: Attention, gather: Gather, mine: range) -> list[float]:
    """The loss before each step. `gather` takes one row per chunk in `mine`, gives all rows."""
    random = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (CHUNKS * CHUNK // 4,), generator=random).repeat(4)
    tokens, labels = text.split(CHUNK), text.roll(-1).split(CHUNK)
    model = {n: 0.1 * torch.randn(shape, generator=random) for n, shape in SHAPES.items()}
    losses = []
    for _ in range(STEPS):
        weights = [{n: w.clone().requires_grad_() for n, w in model.items()} for _ in mine]
        own = [[x[i] for i in mine] for x in (tokens, labels)]
        loss = loss_of_chunks(weights, *own, attend)
        torch.autograd.backward(loss)
        rows = [
            torch.cat([value.detach().view(1), *(w.grad.view(-1) for w in chunk.values())])
            for value, chunk in zip(loss, weights, strict=True)
        ]
        total = torch.zeros_like(rows[0])
        for row in gather(torch.stack(rows)):
            total += row / len(text)
        losses.append(total[0].item())
        sizes = [w.numel() for w in model.values()]
        grads = total[1:].split(sizes)
        model = {
            n: w - RATE * g.view(w.shape) for (n, w), g in zip(model.items(), grads, strict=True)
        }
    return losses


def main() -> int:
    if "RANK" not in os.environ:
        command = "torchrun --nproc-per-node 2 examples/context_parallel.py"
        print(f"error: a launcher has to start this, as in: {command}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, mesh=group, causal=True, query_invariant=True)

    def gather(rows: Tensor) -> Tensor:
        shards = [torch.empty_like(rows) for _ in range(ranks)]
        dist.all_gather(shards, rows)
        return torch.cat(shards)

    def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lockstep.attention(q, k, v, causal=True, query_invariant=True)

    n = CHUNKS // ranks
    together = train(attend, gather, range(n * rank, n * (rank + 1)))
    alone = train(attend_alone, lambda rows: rows, range(CHUNKS))
    if rank == 0:
        print(f"step  loss on {ranks} ranks         of one process")
        for step, (a, b) in enumerate(zip(together, alone, strict=True)):
            print(f"{step:4}  {a.hex():22}  {b.hex():22}  {a:.4f}  {'=' if a == b else 'differs'}")
        print("Every bit is the same." if together == alone else "The curves differ.")
    dist.destroy_process_group()
    return int(together != alone)


if __name__ == "__main__":
    sys.exit(main())
