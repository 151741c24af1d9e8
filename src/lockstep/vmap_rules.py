"""What `torch.vmap` makes of the operators.

Dense attention folds the mapped dim into the batch. What has no batch dim to fold it into (sinks
that differ from sample to sample, gradients that are sums over the batch, packed and paged calls)
runs sample by sample. Batch invariance makes both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (call, info, in_dims, *args) -> (output, out_dims): `call` takes args without the mapped dim.
VmapRule = Callable[..., tuple[Any, Any]]


def sample_by_sample(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """Runs the samples one after another."""
    if info.batch_size == 0:
        outline = _outline(call, in_dims, args)
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        stacked = [x.new_empty((0, *x.shape), device=device) for x in outline]
        return _like(outline, stacked)
    results = []
    for i in range(info.batch_size):
        sample = (
            arg.select(dim, i) if isinstance(dim, int) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        )
        results.append(call(*sample))
    stacked = [torch.stack(tensors) for tensors in zip(*results, strict=True)]
    return _like(results[0], stacked)


def fold_attention(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """The vmap rule of `attention`."""
    q, k, v, bias, sinks, kv_lens, *options = args
    if in_dims[4] is not None:
        return sample_by_sample(call, info, in_dims, *args)
    # Samples that do not fit together may still do so once they are folded.
    _outline(call, in_dims, args)
    n, B = info.batch_size, _batch(q, in_dims[0])
    q, k, v, bias, kv_lens = (
        _fold(x, dim, n, B)
        for x, dim in zip((q, k, v, bias, kv_lens), (*in_dims[:4], in_dims[5]), strict=True)
    )
    results = call(q, k, v, bias, sinks, kv_lens, *options)
    return _like(results, [x.unflatten(0, (n, B)) for x in results])


def fold_attention_backward(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """The vmap rule of `attention_backward`."""
    *tensors, sinks, kv_lens = args[:10]  # tensors: dout, dlse, out, statistics, q, k, v, bias
    needs = args[-1]
    if in_dims[8] is not None or needs[3] or needs[4]:
        return sample_by_sample(call, info, in_dims, *args)
    n, B = info.batch_size, _batch(tensors[4], in_dims[4])
    tensors = [_fold(x, dim, n, B) for x, dim in zip(tensors, in_dims[:8], strict=True)]
    kv_lens = _fold(kv_lens, in_dims[9], n, B)
    grads = call(*tensors, sinks, kv_lens, *args[10:])
    return _like(grads, [grad.unflatten(0, (n, B)) for grad in grads])


def lead_with_samples(
    call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: list[Tensor]
) -> tuple[Any, Any]:
    """The vmap rule of `merge`, whose tensors may have any dims before their last."""
    leading = [
        [_lead(x, dim, info.batch_size) for x, dim in zip(xs, dims, strict=True)]
        for xs, dims in zip(args, in_dims, strict=True)
    ]
    results = call(*leading)
    return _like(results, list(results))


def _like(results: Any, mapped: list[Tensor]) -> tuple[Any, Any]:
    """Results with the mapped dim first, in the kind of sequence that an operator returns."""
    kind = type(results)
    return kind(mapped), kind(0 for _ in mapped)


def _outline(call: Callable[..., Any], in_dims: tuple[int | None, ...], args: Any) -> Any:
    """What one sample gives, in all but its numbers. Raises what its shapes and dtypes raise."""

    def sample(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        shape = [size for i, size in enumerate(arg.shape) if i != dim]
        return torch.empty(shape, dtype=arg.dtype, device="meta")

    return call(*map(sample, args, in_dims))


def _batch(q: Tensor, dim: int | None) -> int:
    return q.shape[0] if dim is None or dim > 0 else q.shape[1]


def _lead(x: Tensor, dim: int | None, n: int) -> Tensor:
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _fold(x: Tensor | None, dim: int | None, n: int, B: int) -> Tensor | None:
    """[n, B or 1, ...], the mapped dim anywhere or absent -> [n * B, ...]"""
    if x is None:
        return None
    x = _lead(x, dim, n)
    return x.expand(n, B, *x.shape[2:]).flatten(0, 1)
