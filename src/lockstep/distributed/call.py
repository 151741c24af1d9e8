"""The arguments of a method besides tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.distributed.layout import Sharding, share
from lockstep.distributed.local import Settings


class ShardedCall(NamedTuple):
    """One call of context-parallel attention, as all ranks have agreed on it."""

    group: ProcessGroup
    sharding: Sharding
    settings: Settings
    uses_lse: bool  # so that a gradient may come through it

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return self.sharding.ranks


def spread(values: Tensor, heads: range, n: int) -> Tensor:
    """[n] with the values of some heads, and 0 for those of other ranks.

    Every gradient of a parameter is partial: summed over the ranks, it is that of one process.
    """
    whole = values.new_zeros(n)
    whole[heads.start : heads.stop] = values
    return whole


def share_of_heads(call: ShardedCall, n: int) -> range:
    """The heads whose sums over all queries fall to this rank."""
    return share(n, call.ranks, call.rank)


def join(parts: list[Tensor], dim: int, like: Tensor) -> Tensor:
    """Parts along `dim`; an empty tensor like `like`, cut to no tokens, where there is none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else like.narrow(dim, 0, 0).clone()
