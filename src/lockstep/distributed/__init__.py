"""Attention over sequences that are sharded across ranks, on torch.distributed."""

from lockstep.distributed.attention import context_parallel_attention, explain
from lockstep.distributed.sharding import shard, unshard

__all__ = ["context_parallel_attention", "explain", "shard", "unshard"]
