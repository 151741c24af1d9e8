"""The exchanges that every method is made of. They move bits and add nothing.

A sequence dim is sharded as a `Sharding` says; the head dim of a shard is whole. A `Box` is the
opposite: some heads, of a whole range of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.distributed.faults import named_faults
from lockstep.distributed.groups import moves_host_memory
from lockstep.distributed.layout import Sharding
from lockstep.distributed.streams import beside, join_streams

# torch 2.13 renamed it.
_ALL_GATHER = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)


class Dims(NamedTuple):
    """Which dims of a tensor are heads and tokens."""

    heads: int
    tokens: int


DENSE, PACKED = Dims(1, 2), Dims(1, 0)


class Box(NamedTuple):
    """Heads and tokens of a whole tensor."""

    heads: range
    tokens: range


def gather_sequence(x: Tensor, dim: int, sharding: Sharding, group: ProcessGroup) -> Tensor:
    """The whole tensor, on every rank, from a shard along `dim`."""
    rank, n = dist.get_rank(group), sharding.largest
    mine = _padded(x, dim, n - sharding.size(rank))
    shards = all_gather(mine, group)  # [ranks, *mine.shape]
    whole = x.new_empty(_with_size(x, dim, sharding.length))
    for other, shard in enumerate(shards):
        for piece in sharding.pieces(other):
            part = shard.narrow(dim, piece.start, len(piece.tokens))
            whole.narrow(dim, piece.tokens.start, len(piece.tokens)).copy_(part)
    return whole


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks, *x.shape] from an x of the same shape on every rank."""
    if x.numel() == 0:
        return x.new_empty((dist.get_world_size(group), *x.shape))
    sent = _on_the_wire(x.contiguous(), group)
    received = sent.new_empty(dist.get_world_size(group) * sent.numel())
    with named_faults(group, "all-gather"):
        getattr(dist, _ALL_GATHER)(received, sent, group)
    return received.view(x.dtype).view(-1, *x.shape).to(x.device)


def to_boxes(
    x: Tensor, dims: Dims, sharding: Sharding, boxes: list[Box], group: ProcessGroup
) -> Tensor:
    """The box of this rank, of which every rank sends the tokens that it holds."""
    rank = dist.get_rank(group)
    mine = boxes[rank]
    sent = [
        [_part(x, dims, box.heads, start, n) for start, _, n in sharding.overlaps(rank, box.tokens)]
        for box in boxes
    ]
    shape = list(x.shape)
    shape[dims.heads], shape[dims.tokens] = len(mine.heads), len(mine.tokens)
    result = x.new_empty(shape)
    whole = range(len(mine.heads))
    received = [
        [_part(result, dims, whole, at, n) for _, at, n in sharding.overlaps(other, mine.tokens)]
        for other in range(sharding.ranks)
    ]
    _all_to_all(sent, received, result, group)
    return result


def from_boxes(
    box: Tensor, dims: Dims, sharding: Sharding, boxes: list[Box], heads: int, group: ProcessGroup
) -> Tensor:
    """The shard of this rank, from boxes that hold every head of every token once."""
    rank = dist.get_rank(group)
    mine = boxes[rank]
    whole = range(len(mine.heads))
    sent = [
        [_part(box, dims, whole, at, n) for _, at, n in sharding.overlaps(other, mine.tokens)]
        for other in range(sharding.ranks)
    ]
    shape = list(box.shape)
    shape[dims.heads], shape[dims.tokens] = heads, sharding.size(rank)
    result = box.new_empty(shape)
    received = [
        [
            _part(result, dims, other.heads, start, n)
            for start, _, n in sharding.overlaps(rank, other.tokens)
        ]
        for other in boxes
    ]
    _all_to_all(sent, received, result, group)
    return result


class Part(NamedTuple):
    """A broadcast under way."""

    to: Tensor
    moved: Tensor  # on the wire
    work: dist.Work


class Arriving(NamedTuple):
    """A tensor whose parts are broadcast by different ranks."""

    whole: Tensor
    parts: list[Part]
    group: ProcessGroup

    def wait(self) -> Tensor:
        """The tensor, once it is there; on a GPU, for what comes next in the current stream."""
        with beside(self.whole.device):
            for to, moved, work in self.parts:
                with named_faults(self.group, "broadcast"):
                    work.wait()
                to.copy_(moved.view(to.dtype).view(to.shape))
        join_streams(self.whole)
        return self.whole


def start_broadcast(to: Tensor, held: Tensor | None, rank: int, group: ProcessGroup) -> Part:
    """Begins to fill `to` with what `rank` holds: `held` there, None elsewhere."""
    source = torch.empty(to.shape, dtype=to.dtype, device=to.device) if held is None else held
    moved = _on_the_wire(source.contiguous(), group)
    with named_faults(group, "broadcast"):
        work = dist.broadcast(moved, group=group, group_src=rank, async_op=True)
    assert work is not None
    return Part(to, moved, work)


def _part(x: Tensor, dims: Dims, heads: range, start: int, n: int) -> Tensor:
    return x.narrow(dims.heads, heads.start, len(heads)).narrow(dims.tokens, start, n)


def _all_to_all(
    sent: list[list[Tensor]], received: list[list[Tensor]], like: Tensor, group: ProcessGroup
) -> None:
    """Fills the tensors in `received[r]` with those that rank r has in its `sent[this rank]`."""
    flat = [x.reshape(-1) for parts in sent for x in parts]
    outgoing = _on_the_wire(torch.cat(flat) if flat else like.new_empty(0), group)
    bytes_in, bytes_out = (
        [sum(x.numel() for x in parts) * like.element_size() for parts in side]
        for side in (received, sent)
    )
    incoming = outgoing.new_empty(sum(bytes_in))
    with named_faults(group, "all-to-all"):
        dist.all_to_all_single(incoming, outgoing, bytes_in, bytes_out, group=group)
    values = incoming.view(like.dtype)
    at = 0
    for x in (x for parts in received for x in parts):
        x.copy_(values[at : at + x.numel()].view(x.shape))
        at += x.numel()


def _on_the_wire(x: Tensor, group: ProcessGroup) -> Tensor:
    """A contiguous tensor as bytes, where the group can take them: no dtype is left out."""
    x = x.cpu() if moves_host_memory(group, x.device) else x
    return x.reshape(-1).view(torch.uint8)


def _padded(x: Tensor, dim: int, n: int) -> Tensor:
    if n == 0:
        return x
    return torch.cat([x, x.new_zeros(_with_size(x, dim, n))], dim)


def _with_size(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
