"""Attention over packed sequences whose tokens are sharded across ranks."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.agreement import agree, check_equal
from lockstep.distributed.attention import Asked, agree_on_call
from lockstep.distributed.groups import Mesh, group_of, not_compiled
from lockstep.distributed.packed import PackedGather, PackedHeads, as_dense, as_packed
from lockstep.problem import INDEX_DTYPES, Tensors, Window, short

_RUN: dict[str, Any] = {"heads": PackedHeads.apply, "gather": PackedGather.apply}


@not_compiled
def context_parallel_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    mesh: Mesh,
    method: str | None = None,
    balanced: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lockstep.attention_varlen` over packed sequences whose tokens are sharded across ranks.

    The T tokens of all sequences together are sharded, wherever sequences begin and end. Each
    sequence has as many queries as keys. As for `context_parallel_attention`, results and gradients
    have the bits of one process.

    Args:
        q: [T_rank, Hq, D]: the queries of this rank, as `shard` gives them.
        k: [T_rank, Hkv, D]
        v: [T_rank, Hkv, Dv]
        cu_seqlens: [B + 1] int32 or int64, from 0 to T, never decreasing: of all sequences, and the
            same on every rank.
        mesh: A DeviceMesh of 1 dim or a process group.
        method: "heads", which takes at least as many key heads as ranks, or "gather", which runs
            the sequences of a rank one by one. None chooses.
        balanced: Whether the shards are those of `shard(..., balanced=True)`.

    The other arguments are those of `context_parallel_attention`.

    Returns:
        out [T_rank, Hq, Dv], and with `return_lse` the pair `(out, lse)` with lse [T_rank, Hq].

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not answer.
        ValueError, TypeError: An argument does not fit, or not everywhere the same: on every rank,
            before anything is sent.
        NotImplementedError: The method or every kernel refuses; the message has the reason.

    Example:
        >>> q, k, v = (shard(x, mesh, 0) for x in (q, k, v))
        >>> out = context_parallel_attention_varlen(q, k, v, cu_seqlens, mesh=mesh, causal=True)
    """
    group = group_of(mesh)
    options = (causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel)
    asked = Asked(options, method, balanced)
    ranks = dist.get_world_size(group)
    to_dense = partial(_to_dense, cu_seqlens, method, ranks)
    tensors, found, call = agree_on_call(Tensors(q, k, v, None, sinks), asked, group, to_dense)
    words = {"cu_seqlens": zlib.crc32(str(cu_seqlens.tolist()).encode())}
    check_equal(words, agree(words, group, q.device))
    offsets = cu_seqlens.tolist()
    if offsets[-1] != call.sharding.length:
        raise ValueError(
            f"cu_seqlens takes offsets up to the {call.sharding.length} tokens of all ranks, got "
            f"{offsets[-1]} as the last"
        )
    packed = (as_packed(x) for x in (tensors.q, tensors.k, tensors.v))
    out, lse = _RUN[found.name](call, cu_seqlens, *packed, tensors.sinks)
    return (out, lse) if return_lse else out


def _to_dense(cu_seqlens: Any, method: Any, ranks: int, tensors: Tensors) -> Tensors:
    """Shards as dense tensors with a batch of one, once everything of packed ones is checked."""
    for name, x in zip("qkv", tensors[:3], strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} takes a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 3:
            raise ValueError(f"{name} takes shape [T, H, D], got {x.dim()} dims: {list(x.shape)}")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in INDEX_DTYPES:
        kind = short(cu_seqlens.dtype) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise TypeError(f"cu_seqlens takes a tensor of int32 or int64, got {kind}")
    offsets = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
    if not offsets or offsets[0] != 0 or offsets != sorted(offsets):
        raise ValueError(
            "cu_seqlens takes shape [B + 1], from 0 on and never decreasing, got "
            f"{cu_seqlens.tolist()}"
        )
    Hkv = tensors.k.shape[1]
    if method == "ring" or (method == "heads" and Hkv < ranks):
        why = "" if method == "ring" else f" with {Hkv} key heads on {ranks} ranks"
        raise NotImplementedError(f"method {method!r} does not take packed sequences{why}")
    q, k, v = map(as_dense, tensors[:3])
    return tensors._replace(q=q, k=k, v=v)
