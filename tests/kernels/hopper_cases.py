"""Random calls for the Hopper kernels, many shapes for few builds."""

from __future__ import annotations

import math
import random

import torch
from problems import Case

KINDS = [
    (64, "causal"),
    *((128, kind) for kind in ("full", "window", "kv_lens", "varlen")),
    (192, "varlen"),
]
# By D. Each pair has a design of its own in the backward.
DV = {64: 64, 128: 128, 192: 128, 256: 256}


def random_case(draws: random.Random, pool: torch.Tensor, D: int, kind: str) -> Case:
    """A call of any lengths whose tensors are views of `pool`, on its device."""
    B, Hq = draws.randint(1, 3), draws.choice((1, 2, 4))
    Sq, Skv = draws.randint(16, 700), draws.randint(1, 700)
    shapes = ((B, Hq, Sq, D), (B, Hq, Skv, D), (B, Hq, Skv, DV[D]))
    q, k, v = (pool[: math.prod(shape)].view(shape) for shape in shapes)
    tensors, options = {"q": q, "k": k, "v": v}, {"causal": kind != "full"}
    if kind == "window":
        options = {"window": (draws.randint(0, 300), draws.randint(0, 300))}
    elif kind == "kv_lens":
        lens = [draws.randint(0, Skv) for _ in range(B)]
        tensors["kv_lens"] = torch.tensor(lens, device=pool.device)
    elif kind == "varlen":
        tensors = {n: x.reshape(-1, Hq, x.shape[-1]) for n, x in tensors.items()}
        for n, S in (("q", Sq), ("k", Skv)):
            cuts = sorted(draws.randint(0, B * S) for _ in range(B))
            cu_seqlens = torch.tensor([0, *cuts, B * S], dtype=torch.int32, device=pool.device)
            tensors[f"cu_seqlens_{n}"] = cu_seqlens
    return Case(tensors, options)
