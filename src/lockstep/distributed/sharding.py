"""From whole tensors to shards, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.agreement import agree, check_equal, sharding_of, word
from lockstep.distributed.call import join
from lockstep.distributed.collectives import gather_sequence
from lockstep.distributed.groups import Mesh, group_of
from lockstep.distributed.layout import Sharding


def shard(x: Tensor, mesh: Mesh, dim: int, *, balanced: bool = False) -> Tensor:
    """The tokens of this rank, out of a tensor that every rank has whole. Sends nothing.

    Contiguous shards are those of `torch.chunk` and of DTensor's `Shard`. With `balanced`, a rank
    gets a chunk near the start and one near the end, so that under a causal mask all ranks have
    equal work; pass `balanced=True` to attention, too. Position ids and labels are sharded by the
    same call.

    Args:
        x: Any tensor, the same on every rank.
        mesh: A DeviceMesh of 1 dim or a process group.
        dim: The dim of the tokens, of size S. Shards have `ceil(S / ranks)` tokens, the last ones
            fewer, or none.
        balanced: Two chunks per rank, of `ceil(S / ranks / 2)` tokens.

    Returns:
        A tensor of its own: a copy.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: `mesh` is not a group with this process; x has no such dim.

    Example:
        >>> positions = shard(torch.arange(S), mesh, 0, balanced=True)
        >>> q, k, v = (shard(x, mesh, 2, balanced=True) for x in (q, k, v))
    """
    group = group_of(mesh)
    dim = _checked_dim(x, dim)
    sharding = Sharding(x.shape[dim], dist.get_world_size(group), balanced)
    parts = [
        x.narrow(dim, piece.tokens.start, len(piece.tokens))
        for piece in sharding.pieces(dist.get_rank(group))
    ]
    return join([part.clone() for part in parts], dim, x)


def unshard(x: Tensor, mesh: Mesh, dim: int, *, balanced: bool = False) -> Tensor:
    """The whole tensor on every rank, from the shards that `shard` makes. One all-gather.

    Differentiable: the gradient of a shard is its part of the gradient that this rank has for the
    whole, which is right where all ranks compute the same from it.

    Args:
        x: The shard of this rank.
        mesh: A DeviceMesh of 1 dim or a process group.
        dim: The dim of the tokens.
        balanced: How it was sharded.

    Returns:
        The whole tensor, the same on every rank.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not answer.
        TypeError, ValueError: `mesh` is not a group with this process; x has no such dim; the
            shards of the ranks do not fit together, on every rank.

    Example:
        >>> out = unshard(context_parallel_attention(q, k, v, mesh=mesh), mesh, 2)
    """
    group = group_of(mesh)
    dim = _checked_dim(x, dim)
    words = {"dims of x": x.dim(), "dtype of x": word(x.dtype), "dim": dim, "balanced": balanced}
    check_equal(words, agree(words, group, x.device))
    words = {f"size of x in dim {i}": n for i, n in enumerate(x.shape)}
    table = agree(words, group, x.device)
    check_equal(words, table, frozenset({f"size of x in dim {dim}"}))
    sharding = sharding_of("x", [row[dim] for row in table], balanced)
    whole: Tensor = _Unshard.apply(x, dim, sharding, group)  # type: ignore[no-untyped-call]
    return whole


def _checked_dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"x takes a torch.Tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim takes an integer, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim takes a dim of x, which has {x.dim()}, got {dim}")
    return dim % x.dim()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sharding: Sharding, group: Any) -> Tensor:
        ctx.dim, ctx.pieces = dim, sharding.pieces(dist.get_rank(group))
        return gather_sequence(x, dim, sharding, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = [
            grad.narrow(ctx.dim, piece.tokens.start, len(piece.tokens)) for piece in ctx.pieces
        ]
        return join(parts, ctx.dim, grad), None, None, None
