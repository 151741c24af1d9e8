"""torch.vmap over the operators.

Dense attention folds the mapped dim into the batch. What has no batch dim to fold into (sinks that
differ from sample to sample, gradients that are sums over the batch, packed and paged calls) runs
sample by sample. Batch invariance makes both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., tuple[Any, Any]]


def _sample_by_sample(op: Any) -> Rule:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = []
        for i in range(info.batch_size):
            sample = (
                arg if dim is None or not isinstance(arg, Tensor) else arg.select(dim, i)
                for arg, dim in zip(args, in_dims, strict=True)
            )
            results.append(op(*sample))
        stacked = [torch.stack(tensors) for tensors in zip(*results, strict=True)]
        kind = type(results[0])
        return kind(stacked), kind(0 for _ in stacked)

    return rule


def _front(x: Tensor, dim: int | None, n: int) -> Tensor:
    """Brings the mapped dim to the front, expanding what has none: [n, ...]."""
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _fold(x: Tensor | None, dim: int | None, n: int, B: int) -> Tensor | None:
    """[n, B or 1, ...] -> [n * B, ...]"""
    if x is None:
        return None
    x = _front(x, dim, n)
    return x.expand(n, B, *x.shape[2:]).flatten(0, 1)


def _batch(q: Tensor, dim: int | None) -> int:
    return q.shape[0] if dim is None or dim > 0 else q.shape[1]


def _attention(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    op = torch.ops.lockstep.attention.default
    q, k, v, bias, sinks, kv_lens, *options = args
    if in_dims[4] is not None:
        return _sample_by_sample(op)(info, in_dims, *args)
    n, B = info.batch_size, _batch(q, in_dims[0])
    q, k, v, bias, kv_lens = (
        _fold(x, dim, n, B)
        for x, dim in zip((q, k, v, bias, kv_lens), (*in_dims[:4], in_dims[5]), strict=True)
    )
    out, lse = op(q, k, v, bias, sinks, kv_lens, *options)
    return (out.unflatten(0, (n, B)), lse.unflatten(0, (n, B))), (0, 0)


def _attention_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    op = torch.ops.lockstep.attention_backward.default
    *tensors, sinks, kv_lens = args[:10]  # dout, dlse, out, lse, q, k, v, bias
    options, needs = args[10:-1], args[-1]
    if in_dims[8] is not None or needs[3] or needs[4]:
        return _sample_by_sample(op)(info, in_dims, *args)
    n, B = info.batch_size, _batch(tensors[4], in_dims[4])
    tensors = [_fold(x, dim, n, B) for x, dim in zip(tensors, in_dims[:8], strict=True)]
    kv_lens = _fold(kv_lens, in_dims[9], n, B)
    grads = op(*tensors, sinks, kv_lens, *options, needs)
    return [grad.unflatten(0, (n, B)) for grad in grads], [0 for _ in grads]


def _merge(info: Any, in_dims: tuple[Any, ...], *parts: list[Tensor]) -> tuple[Any, Any]:
    outs, lses = (
        [_front(x, dim, info.batch_size) for x, dim in zip(xs, dims, strict=True)]
        for xs, dims in zip(parts, in_dims, strict=True)
    )
    return torch.ops.lockstep.merge.default(outs, lses), (0, 0)


def register(lib: torch.library.Library) -> None:
    """Registers a rule for every operator in `lib`."""
    ops = torch.ops.lockstep
    rules: dict[str, Rule] = {
        "attention": _attention,
        "attention_backward": _attention_backward,
        "attention_varlen": _sample_by_sample(ops.attention_varlen.default),
        "attention_varlen_backward": _sample_by_sample(ops.attention_varlen_backward.default),
        "attention_paged": _sample_by_sample(ops.attention_paged.default),
        "merge": _merge,
    }
    for name, rule in rules.items():
        torch.library.register_vmap(f"lockstep::{name}", rule, lib=lib)
