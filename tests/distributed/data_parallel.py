"""A layer whose weights belong to DDP or FSDP while its attention goes over the same ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed import context_parallel_attention, shard


class Layer(torch.nn.Module):
    """Attention between two linear maps."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.before, self.behind = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        q, k, v = self.before(x).chunk(3, -1)
        return self.behind(self.attend(q, k, v))


def data_parallel(mesh: Any, whole: list[Any], options: dict[str, Any]) -> list[str]:
    """What goes wrong where DDP, FSDP or FSDP with checkpoints own the weights of a layer."""
    together = partial(context_parallel_attention, mesh=mesh, **options)

    def made(attend: Any = together) -> Layer:
        torch.manual_seed(0)
        return Layer(attend)

    def fsdp(layer: Layer) -> Layer:
        for part in (layer.before, layer.behind, layer):
            fully_shard(part, mesh=mesh)
        return layer

    def step(layer: Any, x: Any, run: Any = None) -> list[Any]:
        out = (run or layer)(x)
        out.sin().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        whole_grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        return [out.detach(), *whole_grads]

    x = shard(whole[0], mesh, 2)
    out, *alone = step(made(partial(lockstep.attention, **options)), whole[0])
    first, *expected = step(DistributedDataParallel(made()), x)
    said = [] if torch.allclose(first, shard(out, mesh, 2), atol=1e-6) else ["DDP: out"]
    # Both average over ranks what one process sums.
    for name, got, right in zip(("w", "b") * 2, expected, alone, strict=True):
        if not torch.allclose(got * dist.get_world_size(), right, rtol=1e-4, atol=1e-5):
            said.append(f"DDP: d{name}")
    sharded, again = fsdp(made()), fsdp(made())
    others = {
        "FSDP": step(sharded, x),
        "FSDP, checkpointed": step(again, x, lambda x: checkpoint(again, x, use_reentrant=False)),
    }
    for name, got in others.items():
        if not all(map(torch.equal, got, [first, *expected])):
            said.append(name)
    return said
