"""DTensors in, DTensors out. They take as long to import as torch itself: none are, without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.call.eager import PLAIN_TYPES
from lockstep.distributed.groups import Mesh
from lockstep.problem import Tensors

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor

TOKENS = 2


def is_distributed(x: object) -> TypeGuard[DTensor]:
    """Whether x is a DTensor."""
    if type(x) in PLAIN_TYPES or not isinstance(x, Tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def are_distributed(tensors: Tensors) -> bool:
    """Whether q, k and v are DTensors. Raises TypeError where some are and some are not."""
    kinds = {is_distributed(x) for x in tensors[:3]}
    if len(kinds) > 1:
        raise TypeError("q, k and v take DTensors, all three or none")
    return kinds.pop()


def to_local(tensors: Tensors, mesh: Mesh) -> Tensors:
    """The shards of this rank. Raises ValueError for DTensors that are sharded otherwise."""
    from torch.distributed.tensor import Shard

    for name, x in zip("qkv", tensors[:3], strict=True):
        assert is_distributed(x)
        if x.placements != (Shard(TOKENS),):
            raise ValueError(f"{name} takes a DTensor of placements [Shard(2)], got {x.placements}")
        if isinstance(mesh, DeviceMesh) and x.device_mesh != mesh:
            raise ValueError(f"{name} takes a DTensor on mesh, got one on {x.device_mesh}")
    q, k, v = (x.to_local() for x in tensors[:3] if is_distributed(x))
    if is_distributed(tensors.sinks):
        raise TypeError("sinks takes a plain tensor, whole on every rank, got a DTensor")
    return tensors._replace(q=q, k=k, v=v)


def like(local: Tensor, q: DTensor) -> DTensor:
    """A result of this rank, [B, Hq, S_rank, ...], as a part of the whole, sharded as q is."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*q.shape[: TOKENS + 1], *local.shape[TOKENS + 1 :]))
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return DTensor.from_local(
        local,
        q.device_mesh,
        q.placements,
        run_check=False,
        shape=shape,
        stride=tuple(reversed(strides)),
    )
