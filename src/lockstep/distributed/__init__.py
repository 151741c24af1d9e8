"""Attention over sequences that are sharded across ranks, on torch.distributed."""

from lockstep.distributed.attention import context_parallel_attention, explain
from lockstep.distributed.attention_varlen import context_parallel_attention_varlen
from lockstep.distributed.cache import sharded_cache_attention
from lockstep.distributed.sharding import shard, unshard

__all__ = [
    "context_parallel_attention",
    "context_parallel_attention_varlen",
    "explain",
    "shard",
    "sharded_cache_attention",
    "unshard",
]
